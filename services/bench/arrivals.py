"""When requests arrive in an open loop: seconds since the start, in ascending order, fixed by a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from enum import StrEnum
from itertools import islice, takewhile
from pathlib import Path

import msgspec

from engine_core.types.errors import ConfigError


class Arrival(StrEnum):
    """How the gaps between arrivals are spread; the mean rate is the same."""

    POISSON = "poisson"
    """Each arrival is independent of all others, as with many users."""
    BURSTS = "bursts"
    """Groups arrive at one moment; the groups come as a Poisson process."""
    CONSTANT = "constant"
    """Equal gaps."""


def arrival_times(kind: Arrival, rate: float, rng: random.Random, burst_size: int = 8) -> Iterator[float]:
    """Endless arrival times in seconds at `rate` requests per second; `burst_size` is for BURSTS."""
    now, serial = 0.0, 0
    while True:
        if kind is Arrival.CONSTANT:
            yield serial / rate
        elif kind is Arrival.POISSON:
            now += rng.expovariate(rate)
            yield now
        else:
            now += rng.expovariate(rate / burst_size)
            for _ in range(burst_size):
                yield now
        serial += 1


def first_arrivals(times: Iterator[float], requests: int | None, duration: float | None) -> list[float]:
    """The arrivals up to a count, a time in seconds, or whichever comes first; one of them must be given."""
    if requests is None and duration is None:
        raise ValueError("an open loop without an end")
    if duration is not None:
        times = takewhile(lambda at: at < duration, times)
    return list(times if requests is None else islice(times, requests))


class TraceEntry(msgspec.Struct, frozen=True):
    """One line of a trace file."""

    timestamp: float
    """Seconds; only differences count."""
    prompt_tokens: int
    output_tokens: int
    prefix_group: int | None = None
    """Requests with the same number begin with the same --shared-prefix tokens; without it, drawn by chance."""


def read_trace(path: Path) -> list[TraceEntry]:
    """A trace file: one JSON object a line, as TraceEntry; sorted, and beginning at 0 seconds.

    Raises ConfigError, which names the line.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as exc:
        raise ConfigError(f"--trace {path} can't be read: {exc.strerror}") from exc
    entries = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = msgspec.json.decode(line, type=TraceEntry)
        except msgspec.DecodeError as exc:
            form = '{"timestamp": 0.5, "prompt_tokens": 128, "output_tokens": 64}'
            raise ConfigError(f"--trace {path} line {number}: {exc}; a line is like {form}") from None
        if entry.prompt_tokens < 1 or entry.output_tokens < 1:
            raise ConfigError(f"--trace {path} line {number}: token counts must be 1 or more")
        entries.append(entry)
    if not entries:
        raise ConfigError(f"--trace {path} has no line")
    entries.sort(key=lambda entry: entry.timestamp)
    start = entries[0].timestamp
    return [msgspec.structs.replace(entry, timestamp=entry.timestamp - start) for entry in entries]
