"""How a worker empties itself: for a stop, for `pdmesh drain`, for a change of role.

    order     out of placement, no new sessions
    wait      until no stream is open and the engine knows no session (nothing is pinned or quarantined)
    limit     what is left is handed over: streams end with HANDOVER, and routers resume them elsewhere;
              the last pair of a fingerprint waits instead, unless it is forced
    grace     a moment for what was handed over to end
    drained   ends the process, comes back in another role, or stays as it is until the next order

Pure: orders and figures go in with the time, a verdict comes out. The last order counts.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, replace

from engine_core.types.request import Role

HANDOVER = "HANDOVER"
"""Reason of streams that were given back in good order: they cost no attempt, and nobody is to blame."""

HANDOVER_GRACE = 5.0
"""Seconds that a worker waits for what it handed over to be quiet before it ends all the same."""


@dataclass(frozen=True)
class DrainOrder:
    """What a worker was told. `limit` counts from the order, in seconds; None waits for all sessions.

    `stop` ends the process once drained, `role` brings it back in that role. `force` hands over even when
    nobody is there to take over.
    """

    limit: float | None = None
    force: bool = False
    stop: bool = False
    role: Role | None = None

    @property
    def leaves(self) -> bool:
        """True when the worker does not stay as it is once it is drained."""
        return self.stop or self.role is not None


class Verdict(enum.Enum):
    """What to do now."""

    WAIT = enum.auto()
    HAND_OVER = enum.auto()
    DONE = enum.auto()


class Drain:
    """The order in force and how far it has come. `now` is any clock that does not run backwards."""

    def __init__(self) -> None:
        self._order: DrainOrder | None = None
        self._due = math.inf
        self._handed_over_at = math.inf
        self._note = ""
        self.done = False

    @property
    def order(self) -> DrainOrder | None:
        """The order in force."""
        return self._order

    @property
    def note(self) -> str:
        """What it waits for, in words; empty before the first order."""
        return self._note

    def give(self, order: DrainOrder, now: float) -> None:
        """A new order replaces the one before; its limit counts from now. Who was told to stop does stop."""
        if self._order is not None and self._order.stop:
            order = replace(order, stop=True, role=None)
        self._order = order
        self._due = math.inf if order.limit is None else now + order.limit
        self._handed_over_at = math.inf
        self.done = False
        self._note = "drains"

    def look(self, now: float, *, streams: int, quiet: bool, last_pair: bool) -> Verdict:
        """What to do, given the open streams, whether the engine knows of no session either, and whether no
        other pair of the fingerprint is ready."""
        order = self._order
        if order is None:
            return Verdict.WAIT
        if quiet:
            return self._end("drained")
        if now - self._handed_over_at >= HANDOVER_GRACE and order.leaves:
            return self._end("drained but for sessions that no peer has proved quiet")
        left = f"{streams} streams" if streams else "the engine's last sessions"
        if now < self._due:
            self._note = f"waits for {left}" + ("" if math.isinf(self._due) else f", at most {self._due - now:.0f} s")
        elif streams and last_pair and not order.force:
            self._note = f"waits for {left}: no other pair of the fingerprint is ready to take over; force hands over"
        else:
            self._note = f"hands over {left}"
            if math.isinf(self._handed_over_at):
                self._handed_over_at = now
            return Verdict.HAND_OVER if streams else Verdict.WAIT
        return Verdict.WAIT

    def _end(self, note: str) -> Verdict:
        self.done, self._note = True, note
        return Verdict.DONE
