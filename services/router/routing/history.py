"""The last minutes of a router in samples of one second: latencies, throughput, ends of requests.

Latencies are counted in buckets that grow by a sixth, so a percentile is off by 8 % at most, and a second costs
a few dozen integers however many tokens it saw. Counting is two additions; all else happens once a second.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

KEPT_SECONDS = 900
WINDOW_SECONDS = 5
"""Seconds that one sample's percentiles are taken over."""

_LEAST = 1e-4
_PER_DOUBLING = 4.5
_ERRORS = frozenset({"error", "timeout", "unavailable", "broken", "rejected"})


def bucket_of(seconds: float) -> int:
    """Which bucket a latency belongs to; 0 holds all up to 0.1 ms."""
    return 0 if seconds <= _LEAST else 1 + int(math.log2(seconds / _LEAST) * _PER_DOUBLING)


def middle_of(bucket: int) -> float:
    """The geometric middle of a bucket, in seconds."""
    return _LEAST if bucket == 0 else _LEAST * 2 ** ((bucket - 0.5) / _PER_DOUBLING)


def percentile(counts: Mapping[int, int], share: float) -> float | None:
    """The latency that `share` of all counted ones don't exceed, in seconds; None when none was counted."""
    total = sum(counts.values())
    if total == 0:
        return None
    wanted, seen = share * total, 0
    for bucket in sorted(counts):
        seen += counts[bucket]
        if seen >= wanted:
            return middle_of(bucket)
    return middle_of(max(counts))


class Second(msgspec.Struct, frozen=True):
    """One sample. Latencies in seconds over the last WINDOW_SECONDS, None without any; the rest counts of this
    second, or levels at its end. `time` is in seconds since the epoch."""

    time: float
    ttft_p50: float | None
    ttft_p95: float | None
    itl_p50: float | None
    itl_p95: float | None
    tokens: int
    requests: int
    errors: int
    in_flight: int
    queued: int


_FIELDS = Second.__struct_fields__


class _Counts:
    __slots__ = ("ends", "itl", "tokens", "ttft")

    def __init__(self) -> None:
        self.ttft: Counter[int] = Counter()
        self.itl: Counter[int] = Counter()
        self.tokens = 0
        self.ends: Counter[str] = Counter()


class History:
    """Counts what happens, and closes a sample at each tick(). Used on one event loop only."""

    def __init__(self, kept: int = KEPT_SECONDS) -> None:
        self._now = _Counts()
        self._window: deque[_Counts] = deque(maxlen=WINDOW_SECONDS)
        self._seconds: deque[Second] = deque(maxlen=kept)

    def first_token(self, seconds: float, count: int = 1) -> None:
        """A sample's first message came `seconds` after its arrival, with `count` tokens."""
        self._now.ttft[bucket_of(seconds)] += 1
        self._now.tokens += count

    def tokens(self, gap: float, count: int) -> None:
        """`count` further tokens, `gap` seconds apart."""
        self._now.itl[bucket_of(gap)] += count
        self._now.tokens += count

    def end(self, how: str) -> None:
        """An HTTP request ended: ok, cancelled, invalid, or one of the errors."""
        self._now.ends[how] += 1

    def tick(self, now: float, in_flight: int, queued: int) -> Second:
        """Closes the second that ends at `now`, in seconds since the epoch."""
        closed, self._now = self._now, _Counts()
        self._window.append(closed)
        ttft, itl = _sum(c.ttft for c in self._window), _sum(c.itl for c in self._window)
        second = Second(
            time=now,
            ttft_p50=percentile(ttft, 0.5),
            ttft_p95=percentile(ttft, 0.95),
            itl_p50=percentile(itl, 0.5),
            itl_p95=percentile(itl, 0.95),
            tokens=closed.tokens,
            requests=closed.ends.total(),
            errors=sum(n for how, n in closed.ends.items() if how in _ERRORS),
            in_flight=in_flight,
            queued=queued,
        )
        self._seconds.append(second)
        return second

    def since(self, time: float) -> dict[str, list[Any]]:
        """The samples after `time`, oldest first, as one list per field."""
        found = [second for second in self._seconds if second.time > time]
        return {name: [getattr(second, name) for second in found] for name in _FIELDS}


def _sum(counters: Iterable[Counter[int]]) -> Counter[int]:
    total: Counter[int] = Counter()
    for counter in counters:
        total.update(counter)
    return total
