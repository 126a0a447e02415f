"""Where one sample's time went: stages that follow each other and add up to its whole time.

    tokenize          arrival ─▶ QUEUED             reading, checking, the tokenizer
    router_queue      QUEUED ─▶ admitted            waiting for a slot
    placement         admitted ─▶ first PLACED      choosing a pair
    earlier_attempts  first PLACED ─▶ last PLACED   attempts that failed, 0 mostly
    decode_queue      ┐                             decode: until its prefill stream was asked for
    prefill_queue     │ last PLACED ─▶ token 1      prefill: until the prompt's blocks were there
    prefill_compute   │ of that attempt             prefill: the prompt
    first_token       ┘                             the rest: calls, the ticket, token 1's way back
    transfer          ┐ token 1 ─▶ FINISHED         decode: from token 1 until the KV was whole
    decode            ┘                             the rest: all other tokens

The borders are the router's, on one clock; inside a bracket the workers' own durations are taken off in order, none
beyond what is left, and the last name of the bracket gets the rest. So every stage is at least 0, and their sum is
the time from arrival to FINISHED to the microsecond. KV that travels while prefill still computes is no stage:
`transfer_total` tells how long the transfer took in all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

STAGES = (
    "tokenize",
    "router_queue",
    "placement",
    "earlier_attempts",
    "decode_queue",
    "prefill_queue",
    "prefill_compute",
    "first_token",
    "transfer",
    "decode",
)


class Borders:
    """When one sample came to which state, on CLOCK_MONOTONIC, in seconds; `first` is that of the last attempt."""

    __slots__ = ("admitted", "arrival", "finished", "first", "first_placed", "first_token", "placed", "queued")

    def __init__(self, arrival: float) -> None:
        self.arrival = arrival
        self.queued = self.admitted = self.first_placed = self.placed = 0.0
        self.first = self.first_token = self.finished = 0.0

    def move(self, state: str, now: float) -> None:
        """The sample is in `state` from now on."""
        match state:
            case "QUEUED":
                self.queued = now
            case "PLACED":
                self.first_placed = self.first_placed or now
                self.placed, self.first = now, 0.0
            case "FIRST_TOKEN" | "RESUMED":
                self.first = now
                self.first_token = self.first_token or now
            case "FINISHED":
                self.finished = now


def stages_of(borders: Borders, timings: Mapping[str, float]) -> dict[str, int]:
    """Microseconds per stage, in order. `timings` are a SampleResult's: those of the workers, in seconds."""

    def at(seconds: float, least: int) -> int:
        """A border as microseconds since arrival; none is before the one that precedes it."""
        return max(least, round((seconds - borders.arrival) * 1e6) if seconds else least)

    def of_worker(name: str) -> int:
        return max(0, round(timings.get(name, 0.0) * 1e6))

    queued = at(borders.queued, 0)
    admitted = at(borders.admitted, queued)
    first_placed = at(borders.first_placed, admitted)
    placed = at(borders.placed, first_placed)
    finished = at(borders.finished, placed)
    first = min(at(borders.first or borders.finished, placed), finished)
    remote = "prefill_queued" in timings
    before = {
        "decode_queue": of_worker("decode_queued") - of_worker("decode_starting"),
        "prefill_queue": of_worker("prefill_queued"),
        "prefill_compute": of_worker("prefill_computing" if remote else "decode_computing"),
    }
    after = {"transfer": of_worker("decode_transferring") - of_worker("decode_first_token")}
    return {
        "tokenize": queued,
        "router_queue": admitted - queued,
        "placement": first_placed - admitted,
        "earlier_attempts": placed - first_placed,
        **_split(first - placed, before, "first_token"),
        **_split(finished - first, after, "decode"),
    }


def _split(whole: int, parts: Mapping[str, int], rest: str) -> dict[str, int]:
    found, left = {}, whole
    for name, part in parts.items():
        found[name] = min(max(part, 0), left)
        left -= found[name]
    return {**found, rest: left}


def timings_json(borders: Borders, timings: Mapping[str, float], index: int, attempts: int) -> dict[str, Any]:
    """What `x-pdmesh-timings` asks for, of one choice; times in milliseconds with microseconds behind the point."""
    stages = stages_of(borders, timings)
    first = borders.first_token or borders.finished
    return {
        "index": index,
        "attempts": attempts,
        "stages_ms": {name: micros / 1000 for name, micros in stages.items()},
        "ttft_ms": round((first - borders.arrival) * 1e6) / 1000,
        "total_ms": sum(stages.values()) / 1000,
        "transfer_total_ms": round(timings.get("prefill_transferring", 0.0) * 1e6) / 1000,
    }
