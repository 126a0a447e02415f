"""The ring of state moves that `pdmesh explain` reads."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Collection, Iterable

import msgspec

from engine_core.lifecycle.machine import Move


class RingEntry(msgspec.Struct, frozen=True, array_like=True):
    """A move with its time in seconds since the epoch."""

    unix_seconds: float
    move: Move


_CLOCK_SET = 0.010
"""Seconds by which the two clocks must have parted for somebody to have set one."""


def wall_offset() -> float:
    """Unix time minus CLOCK_MONOTONIC, in seconds, of the closest of a few readings: on a busy machine the process
    may be put aside between the two clocks."""
    best, offset = math.inf, 0.0
    for _ in range(5):
        before, wall, after = time.monotonic(), time.time(), time.monotonic()
        if after - before < best:
            best, offset = after - before, wall - (before + after) / 2
        if best < 1e-5:
            break
    return offset


class MoveRing:
    """The last `size` state moves of this process, engine's included.

    Their order is that of CLOCK_MONOTONIC: one offset makes all of them Unix time until the clock is set anew.
    """

    def __init__(self, size: int = 10_000) -> None:
        self._entries: deque[RingEntry] = deque(maxlen=size)
        self._offset = wall_offset()

    def log(self, move: Move) -> None:
        """Adds a move whose `at` is CLOCK_MONOTONIC of this host; fits as a MoveLog."""
        self.extend((move,))

    def extend(self, moves: Iterable[Move]) -> None:
        """As log(), for many: what an engine's Moves frame holds."""
        offset = wall_offset()
        if abs(offset - self._offset) > _CLOCK_SET:
            self._offset = offset
        self._entries.extend(RingEntry(self._offset + move.at, move) for move in moves)

    def find(self, rooms: Collection[int]) -> list[RingEntry]:
        """The moves of these rooms, oldest first."""
        wanted = frozenset(rooms)
        found = [entry for entry in self._entries if entry.move.session.room in wanted]
        return sorted(found, key=lambda entry: entry.unix_seconds)

    def __len__(self) -> int:
        return len(self._entries)
