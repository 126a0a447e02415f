"""What the router did for a request: its state moves, and what is made of them.

A move is told once, here. It goes into the ring that `pdmesh explain` reads, the borders that timings are taken
from, the metrics of stages, the spans of a trace, and the fields of the task's log lines.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import msgspec

from services.router.timings import Borders, timings_json
from services.runtime.telemetry import bind_log_fields
from services.runtime.telemetry.spans import RequestSpans
from services.runtime.telemetry.tracing import Tracer

_MAX_MOVES = 200
"""Moves kept per request; a batch of many prompts keeps its last ones."""

Observe = Callable[[str, float], None]
"""Called with a state that a sample has left, and the seconds that it was there."""


class RouterMove(msgspec.Struct, frozen=True):
    """One step of one sample; fields as pdmesh.common.v1.StateMove has them."""

    unix_seconds: float
    room: int
    attempt: int
    from_state: str
    to_state: str
    reason: str = ""
    seconds: float = 0.0
    machine: str = "router_request"


class Result(Protocol):
    """How a sample ended, as far as it is of interest here."""

    @property
    def room(self) -> int: ...
    @property
    def token_ids(self) -> list[int]: ...
    @property
    def finish_reason(self) -> str: ...
    @property
    def attempts(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def timings(self) -> dict[str, float]: ...
    @property
    def prefill_instance(self) -> str: ...
    @property
    def decode_instance(self) -> str: ...


class Trace:
    """The moves of one request. `arrival` is on CLOCK_MONOTONIC, now by default."""

    __slots__ = (
        "_admitted",
        "_arrival",
        "_borders",
        "_observe",
        "_spans",
        "_states",
        "moves",
        "request_id",
        "results",
        "rooms",
    )

    def __init__(
        self,
        request_id: str,
        arrival: float | None = None,
        spans: RequestSpans | None = None,
        observe: Observe | None = None,
    ) -> None:
        self.request_id = request_id
        self.rooms: list[int] = []
        self.moves: list[RouterMove] = []
        self.results: Sequence[Result] = ()
        """How its samples ended, by choice; empty until all have."""
        self._arrival = time.monotonic() if arrival is None else arrival
        self._spans, self._observe = spans, observe
        self._states: dict[int, tuple[str, float]] = {}
        self._borders: dict[int, Borders] = {}
        self._admitted: dict[int, float] = {}

    def move(self, room: int, attempt: int, state: str, reason: str = "") -> None:
        """Notes that the sample of `room` is now in `state`."""
        now = time.time()
        before, since = self._states.get(room, ("", now))
        if not before:
            self.rooms.append(room)
            self._borders[room] = Borders(self._arrival)
        self._states[room] = (state, now)
        self._borders[room].move(state, time.monotonic())
        bind_log_fields(room=room, attempt=attempt)
        if len(self.moves) >= _MAX_MOVES:
            del self.moves[0]
        self.moves.append(RouterMove(now, room, attempt, before, state, reason, now - since))
        left, begun = before, since
        if before == "QUEUED" and room in self._admitted:
            left, begun = "PLACING", self._admitted[room]
        if left and self._observe is not None:
            self._observe(left, max(0.0, now - begun))
        if self._spans is not None:
            self._spans.move(room, attempt, left, begun, state, now, reason)

    def admitted(self, room: int, attempt: int) -> None:
        """The sample has a slot: from here on its time goes into choosing a pair."""
        now = time.time()
        _, since = self._states[room]
        self._admitted[room] = now
        self._borders[room].admitted = time.monotonic()
        if self._observe is not None:
            self._observe("QUEUED", max(0.0, now - since))
        if self._spans is not None:
            self._spans.move(room, attempt, "QUEUED", since, "PLACING", now, "")

    def state_of(self, room: int) -> tuple[str, float]:
        """The state of a sample, and since when in seconds since the epoch."""
        return self._states.get(room, ("", 0.0))

    def borders_of(self, room: int) -> Borders:
        """When a sample came to which state. Raises KeyError for another request's room."""
        return self._borders[room]

    def traceparent(self, room: int, given: str = "") -> str:
        """What a call for this sample carries: `given` by the client, where this process does not trace."""
        return given if self._spans is None else self._spans.traceparent(room)

    def end(self, failure: BaseException | None) -> None:
        """The request is over."""
        if self._spans is None:
            return
        error = "" if failure is None else "the client went away" if _went_away(failure) else str(failure) or "failed"
        tokens = sum(len(result.token_ids) for result in self.results)
        self._spans.end(time.time(), {"pdmesh.output_tokens": tokens}, error)

    def as_json(self) -> dict[str, Any]:
        """What GET /explain/{request_id} answers."""
        return {
            "request_id": self.request_id,
            "rooms": self.rooms,
            "moves": [msgspec.structs.asdict(move) for move in self.moves],
        }


def _went_away(failure: BaseException) -> bool:
    return isinstance(failure, asyncio.CancelledError)


_current: ContextVar[Trace | None] = ContextVar("pdmesh_trace", default=None)


def current_trace() -> Trace | None:
    """The trace of the request that the present task serves, once its samples have begun; also after they ended."""
    return _current.get()


def timings_of(index: int, result: Result) -> dict[str, Any]:
    """Where the time of choice `index` of the present task's request went, for `x-pdmesh-timings`."""
    trace = _current.get()
    assert trace is not None, "asked outside of a request"
    return timings_json(trace.borders_of(result.room), result.timings, index, result.attempts)


class TraceRing:
    """Traces of the last requests. With `tracer` they become spans too; `observe` gets the time spent per state."""

    def __init__(self, size: int = 4096) -> None:
        self._size = size
        self._traces: OrderedDict[str, Trace] = OrderedDict()
        self.tracer: Tracer | None = None
        self.observe: Observe | None = None

    @contextmanager
    def follow(self, request_id: str, arrival: float, traceparent: str, path: str) -> Iterator[Trace]:
        """Holds a new trace while the request runs; one of the same id is replaced. `arrival` is on CLOCK_MONOTONIC."""
        spans = None
        if self.tracer is not None:
            began = time.time() - (time.monotonic() - arrival)
            attributes = {"pdmesh.request_id": request_id, "url.path": path}
            spans = RequestSpans(self.tracer, traceparent, began, attributes)
            bind_log_fields(trace_id=spans.trace_id)
        trace = self._traces[request_id] = Trace(request_id, arrival, spans, self.observe)
        _current.set(trace)
        self._traces.move_to_end(request_id)
        while len(self._traces) > self._size:
            self._traces.popitem(last=False)
        try:
            yield trace
        except BaseException as exc:
            trace.end(exc)
            raise
        trace.end(None)

    def find(self, request_id: str) -> Trace | None:
        """By request id, or by the id in a response (cmpl-…, chatcmpl-…)."""
        found = self._traces.get(request_id)
        if found is None:
            found = self._traces.get(request_id.removeprefix("chatcmpl-").removeprefix("cmpl-"))
        return found
