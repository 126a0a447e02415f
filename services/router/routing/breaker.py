"""Circuit breakers: whom new requests leave alone for a while. Pure: the time is an argument.

    CLOSED ──k faults in a row, or one that leaves no doubt──▶ OPEN ──hold is over──▶ HALF_OPEN
       ▲                                                        ▲                        │
       └──────────── a probe or one trial succeeds ─────────────┼────────────────────────┤
                                                                └── it fails: longer hold ┘

A key is an incarnation (a worker's breaker) or (prefill, decode) incarnations (the way between two of them).
A new incarnation is a new key and begins CLOSED.

What feeds them is in faults_of(): a breaker counts the faults of its own worker's leg, told as such. Never:
what the request is to blame for, cancels and deadlines of the client, a full queue, a worker that drains or
hands over, a stale table, the other leg. What fails on the way between two workers speaks against that pair.

A worker is probed by a health check, and a pair by one request. A worker that fails its health checks until
the hold is longest is tried by a request too: who reaches it may not be this router. Who was closed by a probe
is on probation: one more fault opens it again, for longer, until a request has succeeded. So a breaker always
closes again, and a worker that only looks well is not tried for ever at the same pace.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Hashable, Iterable

import msgspec

from engine_core.types.errors import (
    CancelledSessionError,
    DeadlineError,
    FencedError,
    InvalidRequestError,
    Leg,
    NotFoundError,
    PdmeshError,
    QueueFullError,
)

THRESHOLD = 3
"""Faults in a row that open a breaker."""
FIRST_HOLD = 1.0
"""Seconds that a breaker is OPEN at first; doubled each time it opens again before a request has succeeded."""
LONGEST_HOLD = 8.0
TRIAL_SECONDS = 5.0
"""After which a trial that nobody has reported on is given to another request."""

Key = int | tuple[int, int]

_NO_FAULT = frozenset(
    {"DRAINING", "JOINING", "STARTING", "HANDOVER", "PREEMPTED", "CANCELLED", "PEER_UNKNOWN", "QUEUE_TIMEOUT"}
)
_NO_DOUBT = frozenset({"ENGINE_DIED", "ENGINE_CRASHED", "CONNECT_FAILED", "QUARANTINE"})


class BreakerState(enum.StrEnum):
    """States of a breaker."""

    CLOSED = "CLOSED"
    OPEN = "OPEN"
    HALF_OPEN = "HALF_OPEN"


class Fault(msgspec.Struct, frozen=True):
    """One fault of `key`; `no_doubt` opens its breaker at once."""

    key: Key
    no_doubt: bool = False


def faults_of(exc: PdmeshError, prefill: int, decode: int) -> tuple[Fault, ...]:
    """Whom a failed attempt speaks against. `prefill` and `decode` are the incarnations of its pair; prefill is
    0 where one worker serves alone."""
    if isinstance(exc, QueueFullError | InvalidRequestError | FencedError | CancelledSessionError | NotFoundError) or (
        exc.reason in _NO_FAULT
    ):
        return ()
    if isinstance(exc, DeadlineError) and not exc.retryable:
        return ()
    no_doubt = exc.reason in _NO_DOUBT
    match exc.leg:
        case Leg.DECODE:
            return (Fault(decode, no_doubt),)
        case Leg.TRANSFER if prefill:
            return (Fault((prefill, decode), no_doubt),)
        case Leg.PREFILL if prefill and exc.reason == "CONNECT_FAILED":
            # One decode worker says so of it: the way between them is at fault, for certain.
            return (Fault((prefill, decode), no_doubt=True), Fault(prefill))
        case Leg.PREFILL if prefill:
            return (Fault(prefill, no_doubt),)
        case _:
            return ()


class _Breaker:
    __slots__ = ("faults", "hold", "state", "trial_at", "until")

    def __init__(self) -> None:
        self.state = BreakerState.CLOSED
        self.faults = 0
        self.hold = FIRST_HOLD
        self.until = 0.0
        self.trial_at = float("-inf")


class Breakers:
    """All breakers of a router. A key without a fault takes no memory."""

    def __init__(self, threshold: int = THRESHOLD) -> None:
        self._threshold = threshold
        self._known: dict[Key, _Breaker] = {}

    def state(self, key: Key) -> BreakerState:
        """The state of a breaker, as of the last tick."""
        found = self._known.get(key)
        return BreakerState.CLOSED if found is None else found.state

    def fault(self, fault: Fault, now: float) -> bool:
        """Counts a fault; True when its breaker opens by it. What fails while it is OPEN began before."""
        breaker = self._known.setdefault(fault.key, _Breaker())
        if breaker.state is BreakerState.OPEN:
            return False
        breaker.faults += 1
        if not (fault.no_doubt or breaker.faults >= self._threshold or breaker.state is BreakerState.HALF_OPEN):
            return False
        self._open(breaker, now)
        return True

    def success(self, *keys: Key) -> bool:
        """A request has succeeded there; True when a breaker closes by it."""
        closed = False
        for key in keys:
            found = self._known.pop(key, None)
            closed |= found is not None and found.state is not BreakerState.CLOSED
        return closed

    def probed(self, key: Key, *, well: bool, now: float) -> None:
        """A health check of a HALF_OPEN worker was answered, or not."""
        breaker = self._known.get(key)
        if breaker is None or breaker.state is not BreakerState.HALF_OPEN:
            return
        if not well:
            if breaker.hold < LONGEST_HOLD:
                self._open(breaker, now)
            breaker.trial_at = float("-inf")
            return
        breaker.state = BreakerState.CLOSED
        breaker.faults = self._threshold - 1

    def blocked(self, now: float) -> Collection[Hashable]:
        """Keys that placement leaves alone: OPEN, or HALF_OPEN with a trial under way."""
        return {
            key
            for key, b in self._known.items()
            if b.state is BreakerState.OPEN or (b.state is BreakerState.HALF_OPEN and now - b.trial_at < TRIAL_SECONDS)
        }

    def begin_trials(self, keys: Iterable[Key], now: float) -> None:
        """A request goes there: for HALF_OPEN ones it is the trial."""
        for key in keys:
            found = self._known.get(key)
            if found is not None and found.state is BreakerState.HALF_OPEN:
                found.trial_at = now

    def end_trials(self, keys: Iterable[Key]) -> bool:
        """The request is over, and said nothing of them: the next one may try. True when that one has waited for it."""
        freed = False
        for key in keys:
            found = self._known.get(key)
            if found is not None:
                freed |= found.state is BreakerState.HALF_OPEN and found.trial_at > float("-inf")
                found.trial_at = float("-inf")
        return freed

    def tick(self, now: float) -> list[Key]:
        """Makes those HALF_OPEN whose hold is over; returns them. The caller probes the workers among them: that is
        their trial."""
        due = [k for k, b in self._known.items() if b.state is BreakerState.OPEN and now >= b.until]
        for key in due:
            self._known[key].state = BreakerState.HALF_OPEN
            self._known[key].trial_at = now if isinstance(key, int) else float("-inf")
        return due

    def keep(self, incarnations: Collection[int]) -> None:
        """Forgets the breakers of workers that are no more."""
        gone = [
            key
            for key in self._known
            if any(i not in incarnations for i in (key if isinstance(key, tuple) else (key,)))
        ]
        for key in gone:
            del self._known[key]

    def _open(self, breaker: _Breaker, now: float) -> None:
        breaker.state, breaker.faults = BreakerState.OPEN, 0
        breaker.until = now + breaker.hold
        breaker.hold = min(breaker.hold * 2, LONGEST_HOLD)
