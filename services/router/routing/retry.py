"""When a sample is tried again, and how soon. Pure: time and chance are arguments.

attempts   max_attempts counts attempts IN A ROW that brought no new token: one new token, and the count
           starts over. What a worker gave back (PREEMPTED, HANDOVER) costs no attempt, nor does on an open
           stream what nobody took up (a full queue, one that did not move, a worker that drains or can't be
           reached): such a stream waits until its deadline, which bounds the whole.
pace       before each new attempt a wait that doubles with every one in a row that brought nothing, from
           50 ms to 2 s, drawn between half and all of it. It counts the free ones too.
"""

from __future__ import annotations

import random

from engine_core.types.errors import FencedError, PdmeshError, QueueFullError

FIRST_WAIT = 0.05
"""Seconds before the first new attempt, at most."""

LONGEST_WAIT = 2.0

HANDED_BACK = frozenset({"PREEMPTED", "HANDOVER"})
"""Reasons with which a healthy worker gives a request back for another attempt."""

_NOT_TAKEN = frozenset({"DRAINING", "JOINING", "STARTING", "CONNECT_FAILED", "PEER_UNKNOWN", "QUEUE_TIMEOUT"})
"""Reasons of workers that never began to work on the attempt."""


def handed_back(exc: PdmeshError) -> bool:
    """True when a healthy worker gave the request back."""
    return exc.reason in HANDED_BACK


def not_taken(exc: PdmeshError) -> bool:
    """True when nobody has begun to work on the attempt."""
    return isinstance(exc, QueueFullError | FencedError) or exc.reason in _NOT_TAKEN


class Attempts:
    """Counts the failed attempts of one sample."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.spent = 0
        """Attempts in a row that cost one and brought no new token."""
        self.fruitless = 0
        """Attempts in a row that brought no new token, the free ones included; the last failure counts as one."""

    def failed(self, exc: PdmeshError, new_tokens: int, *, open_stream: bool) -> None:
        """An attempt has ended in `exc` after so many new tokens. `open_stream`: the client has some tokens."""
        if new_tokens:
            self.spent = self.fruitless = 0
        self.fruitless += 1
        free = handed_back(exc) or (open_stream and not_taken(exc))
        self.spent += not free and not new_tokens

    @property
    def exhausted(self) -> bool:
        """True when there may be no further attempt."""
        return self.spent >= self._limit


def backoff(fruitless: int, rng: random.Random) -> float:
    """Seconds to wait after `fruitless` attempts in a row without a new token, at least one."""
    longest = min(FIRST_WAIT * 2.0 ** min(max(fruitless, 1) - 1, 30), LONGEST_WAIT)
    return rng.uniform(longest / 2, longest)


class RetryBudget:
    """A token bucket for attempts that follow a failure before token 1: retries must not be what keeps a fleet
    down. Each request earns `share` of a token and each second `floor`, up to `burst`; a retry takes one.

    The burst holds what one worker's death can cost. Free: what was handed back, and refusals that a stale
    table explains (another incarnation, DRAINING, JOINING), which a rolling upgrade brings to every request.
    Free too are the resumes of open streams, which their client has paid for: backoff() alone paces them.
    """

    def __init__(self, *, share: float = 0.2, floor: float = 10.0, burst: float = 512.0) -> None:
        self._share, self._floor, self._burst = share, floor, burst
        self._tokens, self._at = burst, float("-inf")

    @property
    def tokens(self) -> float:
        """Retries that may be made at once."""
        return self._tokens

    def request(self) -> None:
        """One request came."""
        self._tokens = min(self._tokens + self._share, self._burst)

    def take(self, now: float) -> bool:
        """Takes a token; False when there is none."""
        earned = self._floor * (now - self._at) if now > self._at > float("-inf") else 0.0
        self._tokens = min(self._tokens + earned, self._burst)
        self._at = max(now, self._at)
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True


def charged(exc: PdmeshError) -> bool:
    """True when an attempt after `exc` takes from the budget."""
    return not (handed_back(exc) or isinstance(exc, FencedError) or exc.reason in ("DRAINING", "JOINING", "STARTING"))
