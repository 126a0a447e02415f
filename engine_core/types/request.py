"""What is asked of an engine, and what it answers."""

from __future__ import annotations

import enum

import msgspec

from engine_core.types.ids import Incarnation, SessionId
from engine_core.types.sampling import SamplingParams


class Role(enum.StrEnum):
    """What an instance does."""

    PREFILL = "PREFILL"
    DECODE = "DECODE"
    MIXED = "MIXED"


class FinishReason(enum.StrEnum):
    """Why an output ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    PREEMPTED = "preempted"


class GenerateSpec(msgspec.Struct, frozen=True):
    """One attempt of one sample, as both roles see it.

    `known` tokens are prompt + emitted: what has to be computed before the next one can be drawn.
    `arrival_ms` orders every queue: Unix milliseconds at the router, moved by the request's priority, and the same in
    every attempt and for every worker. `deadline` is on this host's CLOCK_MONOTONIC, in seconds.
    """

    session: SessionId
    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    arrival_ms: int
    deadline: float
    emitted_token_ids: tuple[int, ...] = ()
    cache_salt: str = ""

    @property
    def known_token_ids(self) -> tuple[int, ...]:
        """Prompt and emitted tokens."""
        return self.prompt_token_ids + self.emitted_token_ids

    @property
    def max_total_tokens(self) -> int:
        """Tokens whose KV may have to be held: the last output token never is."""
        return len(self.prompt_token_ids) + self.sampling.max_tokens - 1


class StageTimings(msgspec.Struct, frozen=True, array_like=True):
    """Seconds per stage in one engine. In decode `starting` is the part of `queued` after the prefill stream was
    asked for, and `first_token` the part of `transferring` before token 1."""

    queued: float = 0.0
    computing: float = 0.0
    transferring: float = 0.0
    decoding: float = 0.0
    starting: float = 0.0
    first_token: float = 0.0


class Finish(msgspec.Struct, frozen=True):
    """The end of an output."""

    reason: FinishReason
    stop_token_id: int | None = None
    cached_tokens: int = 0
    path: str = "local"
    transport: str = ""
    timings: StageTimings = StageTimings()
    prefill_timings: StageTimings = StageTimings()


class PrefillTarget(msgspec.Struct, frozen=True):
    """The prefill leader that a decode worker is to use."""

    endpoint: str
    incarnation: Incarnation
