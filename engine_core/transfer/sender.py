"""The writing end of one link: its push thread.

A push's life:
1. `push` queues it; the thread takes it when those before are out, plans it and writes it.
2. Where the writer awaits the receiver's count (tcp), it stays in flight until `received`.
3. PushDone, or PushFailed, is its only answer. After PushFailed the session's later pushes fail too.
4. `cancel` drops what is queued and in flight of a session, and stops what is being written; SourceQuiet
   comes when the thread is out of it, and then nothing else for that session.

The thread ends when the link is stopped or breaks. It unmaps first; the owner closes the socket next, then
calls `finish`, which answers all that is left. All public methods but `counts` belong to the manager's loop.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import select
import threading
import time
from collections.abc import Callable

from engine_core.transfer.base import PostEvent, Push, PushDone, PushFailed, SourceQuiet
from engine_core.transfer.checksum import BlockChecksum, comparable
from engine_core.transfer.copy_plan import plan_copy
from engine_core.transfer.recent import Recent
from engine_core.transfer.transport import (
    Cancel,
    ConnectFailed,
    Interrupt,
    LinkBroken,
    PoolRegion,
    PushJob,
    Source,
    TransferFault,
    Writer,
    Written,
)
from engine_core.transfer.wire import Quiet, encode
from engine_core.types.ids import SessionId
from engine_core.types.kv import KvLayout

log = logging.getLogger(__name__)

_REMEMBERED = 8192

ConnectLink = Callable[[Interrupt, Cancel], Writer]


@dataclasses.dataclass(slots=True, eq=False)
class _Flight:
    """A push on its way."""

    push: Push
    cancel: Cancel
    started: float = 0.0
    checksum: int | None = None
    written: Written | None = None
    received: int | None = None


class Sender:
    """Push thread and state of one outgoing link.

    `connect` runs in the thread and raises ConnectFailed. `opened(writer)` is called in the thread when the
    link is up, before any push; `ended(reason)` as the thread's last act.
    """

    def __init__(
        self,
        link_id: int,
        connect: ConnectLink,
        region: PoolRegion,
        layout: KvLayout,
        peer_layout: KvLayout,
        post: PostEvent,
        opened: Callable[[Writer], None],
        ended: Callable[[str], None],
        *,
        verify: bool,
    ) -> None:
        self._link_id = link_id
        self._connect, self._opened, self._ended = connect, opened, ended
        self._region, self._layout, self._peer_layout, self._post = region, layout, peer_layout, post
        self._interrupt = Interrupt()
        self._stop = Cancel(self._interrupt)
        self._stop_reason = ""
        self._lock = threading.Lock()
        self._queue: collections.deque[_Flight] = collections.deque()
        self._quiets: collections.deque[SessionId] = collections.deque()
        self._active: _Flight | None = None
        self._in_flight: dict[tuple[SessionId, int], _Flight] = {}
        self._refused: Recent[SessionId, str] = Recent(_REMEMBERED)
        self._cancelled_active = False
        self._failed_active: list[PushFailed] = []
        self._checksums: Recent[SessionId, BlockChecksum] | None = None
        if verify and comparable(layout, peer_layout):
            self._checksums = Recent(_REMEMBERED)
        self._bytes, self._seconds, self._failures = 0, 0.0, 0
        self._thread = threading.Thread(target=self._run, name=f"kv-push-{link_id:x}", daemon=True)

    # ---- called by the manager's loop ---------------------------------------------------------------

    def start(self) -> None:
        """Starts to connect."""
        self._thread.start()

    def push(self, push: Push) -> None:
        """Queues a push."""
        with self._lock:
            reason = self._refused.get(push.session)
            if reason is not None:
                self._post(self._failure(push, reason))
                return
            self._queue.append(_Flight(push, Cancel(self._interrupt)))
        self._interrupt.set()

    def quiet(self, session: SessionId) -> None:
        """Queues the answer to an Abort, ahead of pushes."""
        with self._lock:
            self._quiets.append(session)
        self._interrupt.set()

    def cancel(self, session: SessionId) -> None:
        """Ends a session's pushes; see the module."""
        with self._lock:
            self._refused[session] = "the session was cancelled"
            self._forget(session)
            if self._active is not None and self._active.push.session == session:
                self._cancelled_active = True
                self._active.cancel.set()
            else:
                self._post(SourceQuiet(self._link_id, session))

    def received(self, session: SessionId, push_id: int, nbytes: int) -> None:
        """The receiver's count of a push."""
        with self._lock:
            flight = self._in_flight.get((session, push_id))
            if flight is None:
                return
            flight.received = nbytes
            if flight.written is not None:
                self._settle(flight, flight.written)

    def stop(self, reason: str) -> None:
        """Ends the thread soon; `ended` follows."""
        with self._lock:
            self._stop_reason = self._stop_reason or reason
            self._stop.set()
            if self._active is not None:
                self._active.cancel.set()

    def finish(self, reason: str) -> None:
        """After the thread ended and the socket is closed: answers what is left."""
        self._thread.join()
        with self._lock:
            left = [f.push for f in (*self._in_flight.values(), *self._queue)]
            if self._active is not None and self._cancelled_active:
                session = self._active.push.session
                left = [push for push in left if push.session != session]
                self._post(SourceQuiet(self._link_id, session))
            else:
                self._post_all(self._failed_active)
            self._post_all([self._failure(push, reason) for push in left])
            self._queue.clear()
            self._in_flight.clear()
            self._active = None
        self._interrupt.close()

    def counts(self) -> tuple[int, float, int]:
        """Bytes pushed, seconds of pushing, failed pushes. From any thread."""
        return self._bytes, self._seconds, self._failures

    # ---- the push thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        writer: Writer | None = None
        try:
            writer = self._connect(self._interrupt, self._stop)
            self._opened(writer)
            while (task := self._next()) is not None:
                if isinstance(task, SessionId):
                    writer.send(encode(Quiet(task)))
                else:
                    self._carry_out(writer, task)
            reason = self._stop_reason
        except (ConnectFailed, LinkBroken) as exc:
            reason = self._stop_reason or exc.message
        except Exception as exc:
            log.exception("link %x: the push thread failed", self._link_id)
            reason = f"the push thread failed: {exc!r}"
        if writer is not None:
            writer.release()
        self._ended(reason)

    def _next(self) -> _Flight | SessionId | None:
        """Waits for what to do next; None to end."""
        poll = select.poll()
        poll.register(self._interrupt.fileno(), select.POLLIN)
        while True:
            with self._lock:
                if self._stop.is_set():
                    return None
                if self._quiets:
                    return self._quiets.popleft()
                if self._queue:
                    self._active = flight = self._queue.popleft()
                    self._in_flight[(flight.push.session, flight.push.push_id)] = flight
                    return flight
            poll.poll()
            self._interrupt.clear()

    def _carry_out(self, writer: Writer, flight: _Flight) -> None:
        push, failure, written = flight.push, "", Written(0, 0)
        flight.started = time.monotonic()
        try:
            ops = plan_copy(self._layout, self._peer_layout, push.src_blocks, push.dst_blocks)
            flight.checksum = self._checksum(push)
            source = Source(self._region.address, self._region.nbytes, self._region.buffer)
            written = writer.write(PushJob(push.session, push.push_id, ops, source, flight.cancel))
        except (TransferFault, ValueError) as exc:
            failure = str(exc)
        with self._lock:
            if self._stop.is_set():
                raise LinkBroken("the link is being closed")  # finish() answers for this push
            self._leave(flight, written, failure, awaits_count=writer.awaits_count)

    def _checksum(self, push: Push) -> int | None:
        if self._checksums is None:
            return None
        with self._lock:
            running = self._checksums.get(push.session)
            if running is None:
                running = self._checksums[push.session] = BlockChecksum(self._layout)
        running.update(self._region.buffer, push.src_blocks)
        return running.value

    # ---- under the lock -----------------------------------------------------------------------------

    def _leave(self, flight: _Flight, written: Written, failure: str, *, awaits_count: bool) -> None:
        """The thread is out of this push; whoever waited for that is told."""
        push, self._active = flight.push, None
        if self._cancelled_active:
            self._cancelled_active = False
            self._failed_active.clear()
            self._forget(push.session)
            self._post(SourceQuiet(self._link_id, push.session))
        elif self._failed_active:
            self._in_flight.pop((push.session, push.push_id), None)
            events = [*self._failed_active, self._failure(push, self._failed_active[0].reason)]
            self._failed_active.clear()
            self._post_all(events)
        elif failure:
            self._fail_session(flight, failure)
        else:
            flight.written = written
            if not awaits_count or flight.received is not None:
                self._settle(flight, written)

    def _settle(self, flight: _Flight, written: Written) -> None:
        """A push is out, and counted where that is waited for."""
        push = flight.push
        if flight.received is not None and flight.received != written.nbytes:
            self._fail_session(flight, f"the receiver took {flight.received} of {written.nbytes} bytes")
            return
        self._in_flight.pop((push.session, push.push_id), None)
        seconds = time.monotonic() - flight.started
        self._bytes += written.claimed
        self._seconds += seconds
        blocks = sum(len(ids) for ids in push.dst_blocks)
        done = PushDone(
            push.link_id, push.session, push.push_id, written.claimed, blocks, seconds, checksum=flight.checksum
        )
        self._post(done)

    def _fail_session(self, flight: _Flight, reason: str) -> None:
        """A push failed, and with it all that the session still has here."""
        session = flight.push.session
        self._refused[session] = reason
        others = [f.push for f in (*self._in_flight.values(), *self._queue) if f.push.session == session]
        active = self._active
        pushes = [flight.push, *(p for p in others if p is not flight.push and (not active or p is not active.push))]
        events = [self._failure(push, reason) for push in pushes]
        self._forget(session)
        if active is not None and active.push.session == session:
            active.cancel.set()  # told when the thread has left it: after PushFailed nothing is written
            self._failed_active.extend(events)
        else:
            self._post_all(events)

    def _forget(self, session: SessionId) -> None:
        """Drops what is queued and in flight of a session, but for what is being written."""
        self._queue = collections.deque(f for f in self._queue if f.push.session != session)
        self._in_flight = {
            key: f for key, f in self._in_flight.items() if f.push.session != session or f is self._active
        }
        if self._checksums is not None:
            self._checksums.pop(session)

    def _failure(self, push: Push, reason: str) -> PushFailed:
        self._failures += 1
        return PushFailed(push.link_id, push.session, push.push_id, reason)

    def _post_all(self, events: list[PushFailed]) -> None:
        for event in events:
            self._post(event)
