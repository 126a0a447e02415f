"""State moves as spans. The states of the machines are the only source: what `pdmesh explain` shows as a line is
here a span of the same length, and the engine knows nothing of it.

    router.request                      the client's span is above it, if there is one
      router.queue, router.place        per sample, and per attempt
      router.attempt                    one per attempt; what follows hangs below it, in other processes
        decode
          decode.queued … decode.decoding
          transfer.receive              from the ticket until the KV is whole
          prefill
            prefill.queued … prefill.pushing
            transfer.push               from the first push until the last has arrived

Pure over a Tracer; times are seconds since the epoch.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from engine_core.lifecycle.machine import Move
from engine_core.types.ids import SessionId
from services.runtime.telemetry.moves import wall_offset
from services.runtime.telemetry.tracing import Attributes, OpenSpan, Tracer

_REQUEST_STAGES: Mapping[str, tuple[str, frozenset[str]]] = {
    "decode_request": (
        "decode",
        frozenset({"QUEUED", "AWAITING_START", "AWAITING_KV", "READY", "COMPUTING", "DECODING", "PREEMPTED"}),
    ),
    "prefill_request": ("prefill", frozenset({"QUEUED", "COMPUTING", "COMPUTED", "PUSHING"})),
}
_TRANSFER_STAGES: Mapping[tuple[str, str], str] = {
    ("decode", "TICKETED"): "transfer.receive",
    ("prefill", "PUSHING"): "transfer.push",
    ("decode", "ABORTING"): "transfer.abort",
    ("prefill", "ABORTING"): "transfer.abort",
}
_ENDS = frozenset({"FINISHED", "FAILED", "CANCELLED"})
_QUIET = frozenset({"RELEASED", "QUIET"})
_LEFT_SECONDS = 5.0
"""How long after a stream's end its last moves are awaited."""
_KEPT = 20_000


class _Session:
    __slots__ = ("ended", "error", "left_at", "moved", "offset", "quiet", "span", "start")

    def __init__(self, span: OpenSpan, start: float, offset: float) -> None:
        self.span, self.start, self.offset = span, start, offset
        self.moved = self.ended = self.quiet = False
        self.left_at: float | None = None
        self.error = ""


class SessionSpans:
    """The spans of a worker's sessions. `role` is decode or prefill. Used on one event loop only."""

    def __init__(
        self,
        tracer: Tracer,
        role: str,
        *,
        wall: Callable[[], float] = time.time,
        offset: Callable[[], float] = wall_offset,
    ) -> None:
        self._tracer, self._role, self._wall, self._offset = tracer, role, wall, offset
        self._open: OrderedDict[SessionId, _Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, session: SessionId, traceparent: str, attributes: Attributes) -> OpenSpan:
        """A stream of this session has come, with the caller's context."""
        self._sweep()
        now = self._wall()
        span = self._tracer.open(self._role, traceparent, now, attributes, serves=True)
        self._open[session] = _Session(span, now, self._offset())
        self._open.move_to_end(session)
        while len(self._open) > _KEPT:
            self._drop(next(iter(self._open)), "too many sessions are traced")
        return span

    def left(self, session: SessionId, error: str = "") -> None:
        """The stream is over. Its last moves may still be on their way; without any it was refused."""
        found = self._open.get(session)
        if found is None:
            return
        found.left_at, found.error = self._wall(), error
        if not found.moved:
            self._end(found, found.left_at, {}, error)
            found.quiet = True
        self._forget_if_done(session, found)

    def observe(self, moves: Iterable[Move]) -> None:
        """Takes the engine's moves; those of sessions that are not traced are passed over."""
        for move in moves:
            found = self._open.get(move.session)
            if found is None:
                continue
            found.moved = True
            at = found.offset + move.at
            self._stage(found, move, at)
            if move.machine in _REQUEST_STAGES and move.target in _ENDS:
                failed = move.target == "FAILED"
                attributes = {"pdmesh.end": move.target.lower(), "pdmesh.reason": move.reason}
                self._end(found, at, attributes, move.reason or "failed" if failed else "")
            elif move.machine == "transfer_session" and move.target in _QUIET:
                found.quiet = True
            self._forget_if_done(move.session, found)

    def close(self) -> None:
        """The process ends: so do all spans."""
        for session in list(self._open):
            self._drop(session, "the process ended")

    def _stage(self, found: _Session, move: Move, at: float) -> None:
        name = None
        if move.machine in _REQUEST_STAGES:
            prefix, states = _REQUEST_STAGES[move.machine]
            name = f"{prefix}.{move.source.lower()}" if move.source in states else None
        elif move.machine == "transfer_session":
            name = _TRANSFER_STAGES.get((self._role, move.source))
        if name is not None:
            failed = move.target in ("FAILED", "ABORTING")
            attributes = {"pdmesh.next_state": move.target, "pdmesh.reason": move.reason}
            found.span.child(name, at - move.seconds, at, attributes, move.reason or move.target if failed else "")

    def _end(self, found: _Session, at: float, attributes: Attributes, error: str) -> None:
        if not found.ended:
            found.ended = True
            found.span.end(max(at, found.start), attributes, error)

    def _forget_if_done(self, session: SessionId, found: _Session) -> None:
        if found.ended and found.quiet:
            self._open.pop(session, None)

    def _sweep(self) -> None:
        """Ends what an engine will tell nothing more about: it died, or forgot."""
        late = self._wall() - _LEFT_SECONDS
        for session, found in list(self._open.items()):
            if found.left_at is None:
                continue
            if found.left_at > late:
                break
            self._drop(session, "the engine told no end")

    def _drop(self, session: SessionId, why: str) -> None:
        found = self._open.pop(session)
        self._end(found, self._wall() if found.left_at is None else found.left_at, {}, found.error or why)


_PLACING = frozenset({"PLACING", "REPLANNED", "RESUMING"})
_BROKEN = frozenset({"REPLANNED", "RESUMING", "FAILED", "CANCELLED"})


class RequestSpans:
    """The spans of one request at the router, fed with what Trace is told."""

    def __init__(self, tracer: Tracer, traceparent: str, start: float, attributes: Attributes) -> None:
        self._tracer = tracer
        self._request = tracer.open("router.request", traceparent, start, attributes, serves=True)
        self._attempts: dict[int, OpenSpan] = {}

    @property
    def trace_id(self) -> str:
        """Of the trace, in hex; "" when it isn't recorded."""
        return self._request.trace_id

    def traceparent(self, room: int) -> str:
        """What a call for this sample carries."""
        span = self._attempts.get(room)
        return (span or self._request).traceparent

    def move(self, room: int, attempt: int, before: str, since: float, state: str, now: float, reason: str) -> None:
        """A sample went from `before`, where it was since `since`, to `state`."""
        own: Attributes = {"pdmesh.room": f"{room:016x}", "pdmesh.attempt": attempt}
        if before == "QUEUED":
            self._request.child("router.queue", since, now, own)
        elif before in _PLACING:
            self._request.child("router.place", since, now, {**own, "pdmesh.placement": reason})
        if state == "PLACED":
            self._attempts[room] = self._tracer.open(
                "router.attempt", self._request.traceparent, now, {**own, "pdmesh.placement": reason}, serves=False
            )
        elif state in ("FIRST_TOKEN", "RESUMED") and room in self._attempts:
            self._attempts[room].event(state.lower(), now, {})
        elif state in _BROKEN or state == "FINISHED":
            span = self._attempts.pop(room, None)
            if span is not None:
                end = {"pdmesh.end": state.lower(), "pdmesh.reason": reason}
                span.end(now, end, reason or state if state in _BROKEN else "")

    def end(self, now: float, attributes: Attributes, error: str = "") -> None:
        """The request is over, and with it whatever attempt is left."""
        for span in self._attempts.values():
            span.end(now, {}, error or "the request ended")
        self._attempts.clear()
        self._request.end(now, attributes, error)


def traceparent_in(metadata: Iterable[Any] | None) -> str:
    """The caller's context out of a gRPC call's metadata; "" without one."""
    found = next((value for key, value in metadata or () if key == "traceparent"), "")
    return found if isinstance(found, str) else ""
