"""An engine process without an engine: speaks engine_core/host/frames.py and echoes prompts.

Run as `python tests/support/fake_engine.py --script JSON --fd N`, where the real one would be. Output
token i is prompt[i % len(prompt)], with the log probabilities of scored() where they are asked for. Links are
real unix sockets between two fakes. Every frame that arrives is written to the journal file as one line
"FrameName room.attempt", so that tests can count.

What a session does beside that, its request_id says, as "ACTION:POINT":

    hold     stay there and do nothing more           fail    end the session in QueueFullError
    die      kill -9 oneself                          mute    send no frame at all any more (stats neither)
    gap      leave out one token                      burst   send all tokens as one frame each, at once
    stick    stay there and call it work                overflow  call the whole pool quarantined for too long
    omit     leave out log probabilities: of the "first" token, of a prompt "position", of an "output"

Points: p.open p.started p.token (prefill: before Started, FirstToken, Delivered),
d.open d.started d.token d.decoding (decode: before OpenLeg, SendTicket, the first output, the third one).
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from engine_core.host import frames
from engine_core.host.step_page import StepPage
from engine_core.lifecycle.machine import Move
from engine_core.types.ids import SessionId
from engine_core.types.kv import (
    GroupBlocks,
    KvGroupLayout,
    KvGroupSpec,
    KvLayout,
    KvUsage,
    ShardCount,
    ShardTicket,
    Ticket,
    TransferDescriptor,
)
from engine_core.types.request import Finish, FinishReason, GenerateSpec, StageTimings
from engine_core.types.sampling import TokenLogprobs

BLOCK = 16
PARTS = {"model": "echo", "tokenizer": "tok", "block_size": str(BLOCK)}


def command(**script: Any) -> tuple[str, ...]:
    """The command line of a fake. Keys: journal, socket, parts, startup_error, ready_delay, stats_every,
    link_error, ignore_shutdown, drop (links are dropped while that file exists), in_step (rooms that it always
    claims to compute)."""
    return (sys.executable, str(Path(__file__).resolve()), "--script", json.dumps(script))


def echo(prompt: tuple[int, ...], index: int) -> int:
    """Output token `index` of a prompt."""
    return prompt[index % len(prompt)]


def scored(token: int, place: int, best: int | None) -> TokenLogprobs:
    """Log probabilities of output token, or prompt position, `place`."""
    top = tuple((token + i, -float(place + i)) for i in range(best or 0))
    return TokenLogprobs(token, -float(place), 1, top)


class _Session:
    def __init__(self, spec: GenerateSpec, without_transfer: bool, link_id: int) -> None:
        self.spec, self.without_transfer, self.link_id = spec, without_transfer, link_id
        self.next_index = len(spec.emitted_token_ids)
        self.decoding = False
        self.got_token = False
        action, _, self.point = spec.request_id.partition(":")
        self.action = action if self.point else ""

    def omits(self, what: str) -> bool:
        """True when log probabilities of that kind are to be left out."""
        return self.action == "omit" and self.point == what


class FakeEngine:
    """Single-threaded loop over the frame socket and the links."""

    def __init__(self, fd: int, script: dict[str, Any]) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.set_inheritable(False)
        self._script = script
        self._splitter = frames.FrameSplitter()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ, self._on_frames)
        self._journal = open(script["journal"], "a", buffering=1) if script.get("journal") else None  # noqa: SIM115
        self._sessions: dict[SessionId, _Session] = {}
        self._links: dict[int, socket.socket] = {}
        self._pairs: dict[int, frames.LinkUp] = {}
        self._incarnation, self._instance = 0, ""
        self._mute = self._stuck = self._overflow = False
        self._steps = 0

    def run(self) -> None:
        """Until the service process is gone."""
        every = float(self._script.get("stats_every", 0.05))
        due = time.monotonic()
        while True:
            for key, _ in self._selector.select(timeout=0.002 if self._decoding() else every):
                key.data(key.fileobj)
            self._step()
            if self._links and os.path.exists(self._script.get("drop", "")):
                self._drop_links()
            if self._instance and time.monotonic() >= due:
                due = time.monotonic() + every
                self._send(self._stats())

    def _decoding(self) -> bool:
        return any(s.decoding for s in self._sessions.values())

    # ---- frames -----------------------------------------------------------------------------------

    def _send(self, frame: frames.Frame) -> None:
        if not self._mute:
            try:
                self._socket.sendall(frames.encode(frame))
            except OSError:
                sys.exit(0)

    def _on_frames(self, _: Any) -> None:
        data = self._socket.recv(1 << 20)
        if not data:
            sys.exit(0)
        for body in self._splitter.feed(data):
            self._handle(frames.to_engine_decoder.decode(body))

    def _note(self, frame: frames.Frame) -> None:
        if self._journal is None or isinstance(frame, frames.ReportStats):
            return
        session = getattr(frame, "session", None)
        if session is None and isinstance(frame, frames.Open | frames.OpenPrefill):
            session = frame.spec.session
        detail = f" {frame.reason}" if isinstance(frame, frames.EndSession) else ""
        self._journal.write(f"{type(frame).__name__} {session or '-'}{detail}\n")

    def _handle(self, frame: frames.ToEngine) -> None:
        self._note(frame)
        match frame:
            case frames.Configure():
                self._configure(frame)
            case frames.Open():
                self._open(frame)
            case frames.OpenPrefill():
                session = _Session(frame.spec, frame.without_transfer, frame.link_id)
                self._sessions[frame.spec.session] = session
                self._move(session, "prefill_request", "ACCEPTED", "QUEUED")
                if self._passes(session, "p.open"):
                    self._send(frames.Started(session=frame.spec.session, cached_tokens=0))
                    if frame.without_transfer:
                        self._first_token(session)
            case frames.EndSession():
                self._sessions.pop(frame.session, None)
            case frames.ConnectLink():
                self._connect(frame)
            case frames.ReportStats():
                self._send(self._stats())
            case frames.StartProfile() | frames.StopProfile() | frames.ExpectPeer() | frames.Tokens():
                pass
            case frames.Shutdown():
                if not self._script.get("ignore_shutdown"):
                    sys.exit(0)
            case _:
                if (known := self._sessions.get(frame.session)) is not None:
                    self._leg(known, frame)

    def _configure(self, frame: frames.Configure) -> None:
        self._incarnation, instance = frame.incarnation, frame.instance
        if error := self._script.get("startup_error"):
            self._send(frames.StartupFailed(message=error))
            sys.exit(1)
        time.sleep(float(self._script.get("ready_delay", 0)))
        descriptors: tuple[TransferDescriptor, ...] = ()
        if path := self._script.get("socket"):
            listener = socket.socket(socket.AF_UNIX)
            Path(path).unlink(missing_ok=True)  # of a former life
            listener.bind(path)
            listener.listen()
            self._selector.register(listener, selectors.EVENT_READ, self._accept)
            descriptors = (TransferDescriptor(transport="shm", address=path, nonce=b"n"),)
        spec = KvGroupSpec(num_layers=2, num_heads=2, head_size=8, dtype="float32")
        group = KvGroupLayout(spec=spec, block_size=BLOCK, num_blocks=65)
        self._send(
            frames.Ready(
                pid=os.getpid(),
                layout=KvLayout(groups=(group,), region_bytes=65 * group.block_bytes),
                descriptors=descriptors,
                fingerprint_parts=self._script.get("parts", PARTS),
                max_model_len=1024,
                num_kv_tokens=64 * BLOCK,
                eos_token_ids=(2,),
                seconds_to_ready=0.01,
            )
        )
        self._instance = instance

    # ---- sessions -----------------------------------------------------------------------------------

    def _passes(self, session: _Session, point: str) -> bool:
        """Does what the request asks for at this point; False when it asks to stay."""
        if session.point != point or session.spec.session not in self._sessions:
            return session.spec.session in self._sessions
        sid = session.spec.session
        if session.action == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if session.action == "mute":
            self._mute = True
        self._stuck = self._stuck or session.action == "stick"
        self._overflow = self._overflow or session.action == "overflow"
        if session.action == "fail":
            info = frames.ErrorInfo(
                kind="QueueFullError", message="asked to fail", reason="QUEUE_FULL", retryable=True, retry_after=2.0
            )
            if point.startswith("p."):
                self._send(frames.SessionFailed(session=sid, error=info))
            else:
                failed = frames.SessionOutput(sid, session.next_index, (), error=info)
                self._send(frames.Outputs(outputs=(failed,)))
        if session.action == "gap":
            session.next_index += 1
            return True
        return session.action == "burst"

    def _open(self, frame: frames.Open) -> None:
        session = _Session(frame.spec, frame.without_transfer, frame.link_id)
        self._sessions[frame.spec.session] = session
        self._move(session, "decode_request", "ADMITTED", "QUEUED")
        if not self._passes(session, "d.open"):
            return
        if frame.remote:
            self._send(frames.OpenLeg(session=frame.spec.session))
        else:
            self._scores(session)
            session.decoding = True

    def _leg(self, session: _Session, frame: Any) -> None:
        sid = session.spec.session
        match frame:
            case frames.LegStarted():
                if not session.without_transfer and self._passes(session, "d.started"):
                    self._send(frames.SendTicket(session=sid, ticket=self._ticket(session)))
            case frames.LegToken():
                if self._passes(session, "d.token"):
                    self._output(session, (frame.token_id,))
            case frames.LegDelivered():
                session.decoding = True
            case frames.LegFailed():
                failed = frames.SessionOutput(sid, session.next_index, (), error=frame.error)
                self._send(frames.Outputs(outputs=(failed,)))
            case frames.TicketArrived():
                if self._passes(session, "p.started"):
                    self._first_token(session)
                    if self._passes(session, "p.token"):
                        shard = ShardCount(coord=(0, 0, 0), bytes=BLOCK * 256, blocks=1)
                        self._send(frames.Delivered(session=sid, shards=(shard,), timings=StageTimings(transferring=1)))

    def _ticket(self, session: _Session) -> Ticket:
        blocks = GroupBlocks(0, (1, 2, 3))
        return Ticket(
            link_id=session.link_id,
            first_token=0,
            num_tokens=len(session.spec.known_token_ids),
            shards=(ShardTicket(coord=(0, 0, 0), groups=(blocks,)),),
        )

    def _first_token(self, session: _Session) -> None:
        token = echo(session.spec.prompt_token_ids, session.next_index)
        timings = StageTimings(queued=0.25, computing=0.5)
        best = session.spec.sampling.logprobs
        logprobs = None if best is None or session.omits("first") else scored(token, session.next_index, best)
        self._scores(session)
        self._send(frames.FirstToken(session.spec.session, token, BLOCK, timings, logprobs))

    def _scores(self, session: _Session) -> None:
        """Prompt positions, each in a frame of its own."""
        prompt, best = session.spec.prompt_token_ids, session.spec.sampling.prompt_logprobs
        for position in range(1, len(prompt) if best is not None else 1):
            if not (session.omits("position") and position == 2):
                found = (scored(prompt[position], position, best),)
                self._send(frames.PromptLogprobs(session.spec.session, position, found))

    def _output(self, session: _Session, tokens: tuple[int, ...]) -> None:
        first = session.next_index
        session.next_index += len(tokens)
        finish = None
        if session.next_index >= session.spec.sampling.max_tokens:
            session.decoding = False
            path = "pd" if session.link_id or session.without_transfer else "local"
            finish = Finish(reason=FinishReason.LENGTH, cached_tokens=BLOCK, path=path, transport="shm")
        best = session.spec.sampling.logprobs
        logprobs = () if best is None else tuple(scored(t, i, best) for i, t in enumerate(tokens, first))
        if session.omits("output"):
            logprobs = logprobs[1:]
        output = frames.SessionOutput(session.spec.session, first, tokens, finish=finish, logprobs=logprobs)
        self._send(frames.Outputs(outputs=(output,)))

    def _step(self) -> None:
        decoding = [s for s in self._sessions.values() if s.decoding]
        self._steps += bool(decoding)
        for session in decoding:
            start = len(session.spec.emitted_token_ids)
            if session.next_index == start + 2 and not self._passes(session, "d.decoding"):
                session.decoding = False
                continue
            rounds = session.spec.sampling.max_tokens - session.next_index if session.action == "burst" else 1
            for _ in range(rounds):
                self._output(session, (echo(session.spec.prompt_token_ids, session.next_index),))

    def _move(self, session: _Session, machine: str, source: str, target: str) -> None:
        move = Move(machine, session.spec.session, source, target, "opened", time.monotonic(), 0.5)
        self._send(frames.Moves(moves=(move,)))

    def _stats(self) -> frames.Stats:
        pairs = tuple(
            frames.PairStats(
                link_id=up.link_id,
                peer_incarnation=up.peer_incarnation,
                peer_instance=up.peer_instance,
                transport=up.transport,
                reason=up.reason,
                up=True,
            )
            for up in self._pairs.values()
        )
        return frames.Stats(
            running=len(self._sessions),
            queued=0,
            queued_tokens=0,
            sessions=len(self._sessions),
            kv=KvUsage(total=64, free=64),
            steps=self._steps,
            busy=self._decoding() or self._stuck,
            stuck=64 if self._overflow else 0,
            pairs=pairs,
            counters={"steps": float(self._steps)},
        )

    # ---- links ------------------------------------------------------------------------------------------

    def _connect(self, frame: frames.ConnectLink) -> None:
        link = socket.socket(socket.AF_UNIX)
        try:
            if error := self._script.get("link_error"):
                raise OSError(error)
            link.connect(frame.descriptors[0].address)
            hello = {"link_id": frame.link_id, "incarnation": self._incarnation, "instance": self._instance}
            link.sendall(json.dumps(hello).encode() + b"\n")
        except OSError as exc:
            link.close()
            self._send(frames.LinkDown(frame.link_id, frame.peer_incarnation, f"cannot connect: {exc}"))
            return
        self._up(link, frames.LinkUp(frame.link_id, frame.peer_incarnation, frame.peer_instance, "shm", "same host"))

    def _accept(self, listener: Any) -> None:
        link, _ = listener.accept()
        hello = json.loads(link.makefile("rb").readline())
        self._up(link, frames.LinkUp(hello["link_id"], hello["incarnation"], hello["instance"], "shm", "same host"))

    def _up(self, link: socket.socket, up: frames.LinkUp) -> None:
        self._links[up.link_id], self._pairs[up.link_id] = link, up

        def gone(_: Any) -> None:
            if not link.recv(1):
                self._down(up.link_id, "peer closed")

        self._selector.register(link, selectors.EVENT_READ, gone)
        self._send(up)

    def _drop_links(self) -> None:
        for link_id in list(self._links):
            self._down(link_id, "dropped")

    def _down(self, link_id: int, reason: str) -> None:
        link, up = self._links.pop(link_id), self._pairs.pop(link_id)
        self._selector.unregister(link)
        link.close()
        self._send(frames.LinkDown(up.link_id, up.peer_incarnation, reason))


def main() -> None:
    """Reads the command line and runs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--page-fd", type=int)
    parser.add_argument("--script", default="{}")
    args = parser.parse_args()
    script = json.loads(args.script)
    if args.page_fd is not None and "in_step" in script:
        StepPage(args.page_fd).begin([SessionId(room) for room in script["in_step"]])
    FakeEngine(args.fd, script).run()


if __name__ == "__main__":
    main()
