"""What one request gave, and whether it met the objectives. Times are in seconds since the level's start."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Failure(StrEnum):
    """Why a request failed, as far as its client can tell."""

    REJECTED = "rejected"
    """429: the server is full. Counted apart from errors."""
    BAD_REQUEST = "bad_request"
    """Any other 4xx."""
    SERVER_ERROR = "server_error"
    """5xx."""
    CONNECTION = "connection"
    """Refused, reset, or closed before an answer."""
    TIMEOUT = "timeout"
    STREAM_ERROR = "stream_error"
    """An error event inside a stream."""
    CUT_SHORT = "cut_short"
    """The stream ended without [DONE] and without a finish reason."""
    NO_TOKENS = "no_tokens"
    """A whole stream without a token."""
    MALFORMED = "malformed"
    """The stream holds what is no JSON event."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One request. A failed one keeps what it got until then."""

    index: int
    request_id: str
    due: float
    """When it should be sent; all waits count from here. In a closed loop, when it was sent."""
    sent: float
    end: float
    first: float | None = None
    """The first chunk with text."""
    gaps: tuple[float, ...] = ()
    """Seconds between chunks with text."""
    prompt_asked: int = 0
    output_asked: int = 0
    prompt_tokens: int | None = None
    """As the server counted them; None when it does not say."""
    output_tokens: int | None = None
    cached_tokens: int | None = None
    """Prompt tokens that it found in its prefix cache."""
    failure: Failure | None = None
    status: int = 0
    """HTTP status; 0 without an answer."""
    detail: str = ""
    retry_afters: tuple[float | None, ...] = ()
    """The Retry-After of every 429 on the way, in seconds; None where the header was missing."""

    @property
    def ok(self) -> bool:
        """True when it is whole."""
        return self.failure is None

    @property
    def chunks(self) -> int:
        """Chunks with text."""
        return 0 if self.first is None else len(self.gaps) + 1

    @property
    def tokens(self) -> int:
        """Output tokens: by the server's count, else a chunk is one."""
        return self.chunks if self.output_tokens is None else self.output_tokens

    @property
    def ttft(self) -> float | None:
        """Time to first token, from when the request was due."""
        return None if self.first is None else self.first - self.due

    @property
    def latency(self) -> float:
        """The whole request, from when it was due."""
        return self.end - self.due

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first: independent of how tokens are put into chunks."""
        return sum(self.gaps) / (self.tokens - 1) if self.chunks > 1 and self.tokens > 1 else None


class Objectives(msgspec.Struct, frozen=True):
    """What a request must keep to be good, in milliseconds; None does not count."""

    ttft_ms: float | None = None
    itl_ms: float | None = None
    """The 99th percentile of the request's own gaps."""
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    share: float = 0.9
    """The share of requests that must be good for a load to count as carried."""

    @property
    def any(self) -> bool:
        """True when there is an objective."""
        return not (self.ttft_ms is self.itl_ms is self.tpot_ms is self.e2e_ms is None)

    def missed(self, outcome: Outcome) -> tuple[str, ...]:
        """The objectives that a request missed; a failed one misses all."""
        if not outcome.ok:
            return tuple(name for name, limit in self.limits() if limit is not None)
        gap = percentile(outcome.gaps, 99)
        measured = {"ttft": outcome.ttft, "itl": gap, "tpot": outcome.tpot, "e2e": outcome.latency}
        return tuple(
            name
            for name, limit in self.limits()
            if limit is not None and (value := measured[name]) is not None and value * 1e3 > limit
        )

    def limits(self) -> tuple[tuple[str, float | None], ...]:
        """Each objective's name and limit in milliseconds."""
        return (("ttft", self.ttft_ms), ("itl", self.itl_ms), ("tpot", self.tpot_ms), ("e2e", self.e2e_ms))

    def met(self, outcome: Outcome) -> bool:
        """True for a whole request that missed none."""
        return outcome.ok and not self.missed(outcome)


def percentile(values: tuple[float, ...] | list[float], q: float) -> float | None:
    """The q-th percentile (0 to 100), linear between the two nearest ranks; None of nothing."""
    if not values:
        return None
    return percentile_sorted(sorted(values), q)


def percentile_sorted(ordered: list[float], q: float) -> float:
    """The same of values in ascending order; at least one."""
    rank = (len(ordered) - 1) * q / 100
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)
