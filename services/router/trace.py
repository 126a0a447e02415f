"""What the router did for a request, for `pdmesh explain`: a bounded ring by request id."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Any

import msgspec

_MAX_MOVES = 200
"""Moves kept per request; a batch of many prompts keeps its last ones."""


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


class Trace:
    """The moves of one request."""

    __slots__ = ("_states", "moves", "request_id", "rooms")

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.rooms: list[int] = []
        self.moves: list[RouterMove] = []
        self._states: dict[int, tuple[str, float]] = {}

    def move(self, room: int, attempt: int, state: str, reason: str = "") -> None:
        """Notes that the sample of `room` is now in `state`."""
        now = time.time()
        before, since = self._states.get(room, ("", now))
        if not before:
            self.rooms.append(room)
        self._states[room] = (state, now)
        if len(self.moves) >= _MAX_MOVES:
            del self.moves[0]
        self.moves.append(RouterMove(now, room, attempt, before, state, reason, now - since))

    def state_of(self, room: int) -> tuple[str, float]:
        """The state of a sample, and since when in seconds since the epoch."""
        return self._states.get(room, ("", 0.0))

    def as_json(self) -> dict[str, Any]:
        """What GET /explain/{request_id} answers."""
        return {
            "request_id": self.request_id,
            "rooms": self.rooms,
            "moves": [msgspec.structs.asdict(move) for move in self.moves],
        }


class TraceRing:
    """Traces of the last requests."""

    def __init__(self, size: int = 4096) -> None:
        self._size = size
        self._traces: OrderedDict[str, Trace] = OrderedDict()

    def open(self, request_id: str) -> Trace:
        """A new trace; one of the same id is replaced."""
        trace = self._traces[request_id] = Trace(request_id)
        self._traces.move_to_end(request_id)
        while len(self._traces) > self._size:
            self._traces.popitem(last=False)
        return trace

    def find(self, request_id: str) -> Trace | None:
        """By request id, or by the id in a response (cmpl-…, chatcmpl-…)."""
        found = self._traces.get(request_id)
        if found is None:
            found = self._traces.get(request_id.removeprefix("chatcmpl-").removeprefix("cmpl-"))
        return found
