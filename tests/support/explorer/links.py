"""Links and their transports, one slot at a time.

shm-like: the writer copies into the reader's pool itself, at moments of the schedule's choosing; a
stopped writer goes on after it is continued; a dead one is proved quiet by end-of-file.
tcp-like: slots travel behind one another with the control messages; the reader writes them if it
still accepts the session, and otherwise sinks them.
"""

from __future__ import annotations

import zlib
from collections import deque
from typing import TYPE_CHECKING, Any

from engine_core.transfer import base
from engine_core.types.ids import Incarnation, SessionId
from tests.support.explorer.symbols import Content, Violation

if TYPE_CHECKING:
    from tests.support.explorer.engines import EngineProcess


class PushRun:
    """One push on its way."""

    __slots__ = ("arrived", "at", "cancelled", "command", "pieces")

    def __init__(self, command: base.Push, block_size: int) -> None:
        pairs = list(zip(command.src_blocks[0], command.dst_blocks[0], strict=True))
        self.command = command
        self.pieces = [(src, dst, slot) for src, dst in pairs for slot in range(block_size)]
        self.at = 0
        self.arrived = len(self.pieces)
        self.cancelled = False


class Link:
    """One link; `writer` is prefill's engine, `reader` decode's."""

    def __init__(self, link_id: int, flavour: str, writer: EngineProcess, reader: EngineProcess) -> None:
        self.link_id, self.flavour, self.writer, self.reader = link_id, flavour, writer, reader
        self.to_reader: deque[tuple[Any, ...]] = deque([("open",)])
        self.to_writer: deque[tuple[Any, ...]] = deque()
        self.writer_up = self.reader_up = False
        self.writer_closed = self.reader_closed = False
        self.severed = False
        self.pushes: dict[SessionId, deque[PushRun]] = {}
        self.accepts: dict[SessionId, set[int]] = {}
        self.crcs: dict[SessionId, int] = {}

    # ---- commands of the engines, carried out by transfer threads ----

    def command(self, engine: EngineProcess, command: Any) -> None:
        """Carries out one command."""
        if engine is self.writer:
            self._writer_command(command)
        else:
            self._reader_command(command)

    def _writer_command(self, command: Any) -> None:
        match command:
            case base.Push():
                if self.writer_closed:
                    self._failed(command, "link is closed")
                    return
                run = PushRun(command, self.writer.layout.groups[0].block_size)
                self.pushes.setdefault(command.session, deque()).append(run)
            case base.CancelPush():
                self._cancel_pushes(command.session)
            case base.SendQuiet():
                self._assert_source_quiet(command.session)
                if not (self.writer_closed or self.severed):
                    self.to_reader.append(("quiet", command.session))
            case base.CloseLink():
                self.close_writer("closed by this end")
            case _:
                raise Violation(f"a writer cannot carry out {command}")

    def _reader_command(self, command: Any) -> None:
        match command:
            case base.PrepareReceive():
                self.accepts[command.session] = set(command.block_ids[0])
            case base.DropReceive():
                self.accepts.pop(command.session, None)
                if self.flavour == "tcp":
                    self.reader.post(base.ReceiveQuiet(self.link_id, command.session))
            case base.SendAbort():
                if not (self.reader_closed or self.severed):
                    self.to_writer.append(("abort", command.session))
            case base.VerifyBlocks():
                checksum = 0
                for block in command.block_ids[0]:
                    for content in self.reader.pool.slots[block]:
                        checksum = _crc(content, checksum)
                self.reader.post(base.Verified(self.link_id, command.session, checksum))
            case base.CloseLink():
                # The writer may hold the mapping: only its end-of-file proves anything.
                if not self.reader_closed:
                    self.to_writer.append(("eof",))
                    if self.flavour == "tcp":
                        self._close_reader("closed by this end")
            case _:
                raise Violation(f"a reader cannot carry out {command}")

    def _cancel_pushes(self, session: SessionId) -> None:
        runs = self.pushes.get(session)
        if not runs:
            self.writer.post(base.SourceQuiet(self.link_id, session))
            return
        rng = self.writer.world.rng
        if rng.random() < 0.5:  # the copy that runs cannot be stopped in the middle
            while len(runs) > 1:
                run = runs.pop()
                if rng.random() < 0.5:
                    self._failed(run.command, "cancelled")
            runs[0].cancelled = True
            return
        del self.pushes[session]
        for run in runs:
            if rng.random() < 0.5:
                self._failed(run.command, "cancelled")
        self.writer.post(base.SourceQuiet(self.link_id, session))

    def _assert_source_quiet(self, session: SessionId) -> None:
        if self.pushes.get(session):
            raise Violation(f"QUIET of {session} while a push runs")

    # ---- the writer's copying thread ----

    def copy(self, session: SessionId) -> None:
        """Moves some slots of the push that runs for a session."""
        rng, run = self.writer.world.rng, self.pushes[session][0]
        if run.at == 0:
            self.writer.world.faults.shorten(run)
        left = len(run.pieces) - run.at
        for _ in range(rng.randint(1, left) if rng.random() < 0.7 else left):
            src, dst, slot = run.pieces[run.at]
            run.at += 1
            if not self.writer.owns(session, src):
                raise Violation(f"push of {session} reads block {src}, which it does not hold at the source")
            content = self.writer.pool.slots[src][slot]
            self.crcs[session] = _crc(content, self.crcs.get(session, 0))
            content = self.writer.world.faults.damage(content)
            if run.at > run.arrived:
                continue  # cut short: lost on the way, and not counted by the receiver
            if self.flavour == "shm":
                self._write(session, dst, slot, content)
            elif not self.severed:
                self.to_reader.append(("data", session, dst, slot, content))
        if run.at < len(run.pieces):
            return
        self.pushes[session].popleft()
        if self.flavour == "shm":
            self._done(run)
        elif not self.severed:
            self.to_reader.append(("sent", run))
        if run.cancelled or not self.pushes[session]:
            del self.pushes[session]
        if run.cancelled:
            self.writer.post(base.SourceQuiet(self.link_id, session))

    def _write(self, session: SessionId, block: int, slot: int, content: Content | None) -> None:
        if not self.reader.alive:
            return  # the region outlives its owner as long as it is mapped
        if not self.reader.owns(session, block):
            raise Violation(f"push of {session} writes block {block}, which it does not hold at the destination")
        accepted = self.accepts.get(session)
        if accepted is not None and block not in accepted:
            raise Violation(f"push of {session} writes block {block}, which it was not granted")
        if not self.reader.alone(session, block):
            raise Violation(f"push of {session} writes block {block}, which another session shares")
        self.reader.pool.slots[block][slot] = content

    def _done(self, run: PushRun) -> None:
        command, layout = run.command, self.writer.layout.groups[0]
        blocks = run.arrived // layout.block_size
        size = blocks * layout.block_bytes
        self.writer.post(
            base.PushDone(
                self.link_id, command.session, command.push_id, size, blocks, 0.001, self.crcs.get(command.session, 0)
            )
        )

    def _failed(self, command: base.Push, reason: str) -> None:
        self.writer.post(base.PushFailed(self.link_id, command.session, command.push_id, reason))

    # ---- what the ends read ----

    def read_at_reader(self) -> None:
        """Decode's transfer thread reads one item."""
        item = self.to_reader.popleft()
        match item:
            case ("open",):
                self.reader_up = True
                self.reader.post(self._opened(self.writer, "open"))
                self.to_writer.append(("opened",))
            case ("data", session, block, slot, content):
                if session in self.accepts:
                    self._write(session, block, slot, content)
            case ("sent", run):
                self.to_writer.append(("count", run, run.command.session in self.accepts))
            case ("quiet", session):
                self.reader.post(base.QuietReceived(self.link_id, session))
            case ("eof",):
                self._close_reader("end of file")

    def read_at_writer(self) -> None:
        """Prefill's transfer thread reads one item."""
        item = self.to_writer.popleft()
        match item:
            case ("opened",):
                self.writer_up = True
                self.writer.post(self._opened(self.reader, "proved"))
            case ("abort", session):
                self.writer.post(base.AbortReceived(self.link_id, session))
            case ("count", run, True):
                self._done(run)
            case ("count", run, _):
                self._failed(run.command, "not accepted")
            case ("eof",):
                self.close_writer("end of file")

    def _opened(self, peer: EngineProcess, reason: str) -> base.LinkOpened:
        return base.LinkOpened(
            self.link_id, peer.incarnation, peer.instance, self.flavour, reason, self.flavour == "tcp"
        )

    # ---- ends ----

    def close_writer(self, reason: str) -> None:
        """The writer's threads left, unmapped and closed the socket."""
        if self.writer_closed:
            return
        self.writer_closed, self.writer_up = True, False
        for runs in self.pushes.values():
            for run in runs:
                self._failed(run.command, reason)
            if runs[0].cancelled:
                self.writer.post(base.SourceQuiet(self.link_id, runs[0].command.session))
        self.pushes.clear()
        self.to_writer.clear()
        self.writer.post(base.LinkClosed(self.link_id, self.reader.incarnation, reason, quiet_proved=True))
        if not self.reader_closed:
            self.to_reader.append(("eof",))

    def _close_reader(self, reason: str) -> None:
        if self.reader_closed:
            return
        self.reader_closed, self.reader_up = True, False
        self.to_reader.clear()
        self.accepts.clear()
        self.reader.post(base.LinkClosed(self.link_id, self.writer.incarnation, reason, quiet_proved=True))
        if not self.writer_closed:
            self.to_writer.append(("eof",))

    def process_died(self, engine: EngineProcess) -> None:
        """The kernel closes what a dead process held; what it had written before may arrive."""
        rng = engine.world.rng
        if engine is self.writer and not self.writer_closed:
            self.writer_closed, self.writer_up = True, False
            self.pushes.clear()
            self.to_writer.clear()
            if self.flavour == "tcp":
                keep = rng.randint(0, len(self.to_reader))
                while len(self.to_reader) > keep:
                    self.to_reader.pop()
            if not self.reader_closed:
                self.to_reader.append(("eof",))
        elif engine is self.reader and not self.reader_closed:
            self.reader_closed, self.reader_up = True, False
            self.to_reader.clear()
            if not self.writer_closed:
                self.to_writer.append(("eof",))

    def cut(self) -> None:
        """A connection breaks under two living ends. Over shm that proves nothing: the reader learns at once
        that the link is gone, and that it is quiet when the writer has unmapped."""
        self.severed = True
        if self.flavour == "shm":
            self.to_reader.clear()
            self.to_writer.clear()
            if not self.writer_closed:
                self.to_writer.append(("eof",))
            self.reader_up = False
            self.reader.post(base.LinkClosed(self.link_id, self.writer.incarnation, "broken", quiet_proved=False))
            return
        for queue, closed in ((self.to_reader, self.reader_closed), (self.to_writer, self.writer_closed)):
            keep = self.writer.world.rng.randint(0, len(queue))
            while len(queue) > keep:
                queue.pop()
            if not closed:
                queue.append(("eof",))


class DeadEnd:
    """Stands for a link that could not be opened."""

    def __init__(self, link_id: int, peer: Incarnation, writer: EngineProcess) -> None:
        self.link_id = link_id
        writer.post(base.LinkClosed(link_id, peer, "nobody listens", quiet_proved=True))


def _crc(content: Content | None, before: int) -> int:
    return zlib.crc32(repr(content).encode(), before)
