"""Samples that this router serves now, and the last that ended; for the console and `pdmesh top`.

Nothing is copied while tokens flow: a sample is entered once, taken out once, and read when somebody looks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import msgspec

SLOW_FIRST_TOKEN = 5.0
"""Seconds without token 1 after which a sample is slow."""
SLOW_TOKEN = 2.0
"""Seconds without a further token after which a sample is slow."""
_KEPT = 100
"""Ended samples that are kept."""


class Progress(msgspec.Struct, frozen=True):
    """Where a sample is. `first_at` and `last_at` are on CLOCK_MONOTONIC, 0 before token 1; `since` is seconds
    since the epoch."""

    state: str
    since: float
    attempt: int
    tokens: int
    first_at: float
    last_at: float
    prefill: str = ""
    decode: str = ""


class Outcome(msgspec.Struct, frozen=True):
    """What an ended sample adds to its progress. `timings` are in seconds, as in SampleResult."""

    finish_reason: str
    timings: dict[str, float]
    cached_tokens: int = 0
    transport: str = ""


class Sample(Protocol):
    """A journey, as far as it is of interest here."""

    room: int

    def progress(self) -> Progress:
        """Where it is now."""
        ...


class Spec(Protocol):
    """What was asked, as far as it is of interest here. `arrival` is on CLOCK_MONOTONIC."""

    @property
    def request_id(self) -> str: ...
    @property
    def index(self) -> int: ...
    @property
    def arrival(self) -> float: ...
    @property
    def prompt_token_ids(self) -> Sequence[int]: ...


class Entry(msgspec.Struct):
    """One sample under way."""

    sample: Sample
    spec: Spec
    outcome: Outcome | None = None


def is_slow(progress: Progress, arrival: float, now: float) -> bool:
    """True when token 1, or the next one, has been awaited for long. All times on one clock."""
    if progress.tokens == 0:
        return now - arrival > SLOW_FIRST_TOKEN
    return now - progress.last_at > SLOW_TOKEN


class LiveRequests:
    """The register. Used on one event loop only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: dict[int, Entry] = {}
        self._ended: deque[dict[str, Any]] = deque(maxlen=_KEPT)

    @contextmanager
    def track(self, sample: Sample, spec: Spec) -> Iterator[Entry]:
        """Holds a sample in the register; set the entry's outcome when there is one."""
        entry = Entry(sample, spec)
        self._open[sample.room] = entry
        try:
            yield entry
        finally:
            del self._open[sample.room]
            self._ended.append(_ended(entry, self._clock()))

    def __len__(self) -> int:
        return len(self._open)

    def states(self) -> list[str]:
        """The states of all samples under way."""
        return [entry.sample.progress().state for entry in self._open.values()]

    def rows(self, limit: int) -> list[dict[str, Any]]:
        """The oldest `limit` samples under way as plain data; times in seconds."""
        now = self._clock()
        oldest = list(self._open.values())[:limit]
        return [_row(entry, entry.sample.progress(), now) for entry in oldest]

    def recent(self, limit: int) -> list[dict[str, Any]]:
        """The last `limit` samples that ended, latest first."""
        return list(self._ended)[: -limit - 1 : -1]


def _row(entry: Entry, progress: Progress, now: float) -> dict[str, Any]:
    spec = entry.spec
    return {
        "id": spec.request_id,
        "index": spec.index,
        "room": f"{entry.sample.room:016x}",
        "state": progress.state,
        "age": now - spec.arrival,
        "attempt": progress.attempt,
        "prompt_tokens": len(spec.prompt_token_ids),
        "tokens": progress.tokens,
        "ttft": progress.first_at - spec.arrival if progress.first_at else None,
        "quiet": now - progress.last_at if progress.last_at else None,
        "prefill": progress.prefill,
        "decode": progress.decode,
        "slow": is_slow(progress, spec.arrival, now),
    }


def _ended(entry: Entry, now: float) -> dict[str, Any]:
    row = _row(entry, entry.sample.progress(), now)
    outcome = entry.outcome
    del row["quiet"], row["slow"]
    return row | {
        "ended": time.time(),
        "finish_reason": outcome.finish_reason if outcome is not None else "",
        "timings": outcome.timings if outcome is not None else {},
        "cached_tokens": outcome.cached_tokens if outcome is not None else 0,
        "transport": outcome.transport if outcome is not None else "",
    }
