"""What a run does, level by level: pure, from options that were checked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

import msgspec

from engine_core.types.errors import ConfigError
from services.bench.arrivals import Arrival, TraceEntry
from services.bench.outcome import Objectives
from services.bench.workload import Ask, Shape, closed_asks, open_asks, trace_asks

DEFAULT_DURATION = 30.0
"""Seconds of arrivals of an open loop, when neither a count nor a time is given."""


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A run. `rates` or `trace` make it an open loop, else it is a closed one over `concurrency`."""

    shape: Shape
    concurrency: tuple[int, ...] = ()
    rates: tuple[float, ...] = ()
    arrival: Arrival = Arrival.POISSON
    burst_size: int = 8
    trace: tuple[TraceEntry, ...] = ()
    trace_name: str = ""
    trace_speeds: tuple[float, ...] = (1.0,)
    requests: int | None = None
    duration: float | None = None
    warmup: int = 2
    max_in_flight: int = 0
    """Of an open loop; 0: no limit."""
    retry_429: bool = False
    timeout: float = 600.0
    objectives: Objectives = Objectives()
    rows: bool = False

    @property
    def loop(self) -> str:
        """closed, open or trace."""
        return "trace" if self.trace else "open" if self.rates else "closed"

    @property
    def load_name(self) -> str:
        """What the levels differ in."""
        return {"closed": "concurrency", "open": "request rate", "trace": "trace speed"}[self.loop]

    @property
    def load_unit(self) -> str:
        """Its unit."""
        return {"closed": "requests in flight", "open": "requests/s", "trace": "times"}[self.loop]


class LevelPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a sweep. An open loop has its asks; a closed one makes them as it goes."""

    name: str
    load: float
    concurrency: int = 0
    """Of a closed loop; 0: open."""
    requests: int | None = None
    duration: float | None = None
    """Seconds in which a closed loop sends."""
    asks: tuple[Ask, ...] = ()

    def closed(self, shape: Shape) -> Iterator[Ask]:
        """The requests of a closed loop: endless when only a time is set."""
        asks = closed_asks(shape, self.name)
        return asks if self.requests is None else islice(asks, self.requests)


def levels(options: RunOptions) -> list[LevelPlan]:
    """The levels in the order given. Raises ConfigError for one without a request."""
    plans = list(_levels(options))
    for plan in plans:
        if not plan.concurrency and not plan.asks:
            raise ConfigError(f"at {plan.name} no request arrives in {options.duration or DEFAULT_DURATION:g} s")
    return plans


def _levels(o: RunOptions) -> Iterable[LevelPlan]:
    if o.trace:
        for speed in o.trace_speeds:
            name = f"trace x{speed:g}"
            asks = trace_asks(o.shape, name, o.trace, speed=speed, requests=o.requests, duration=o.duration)
            yield LevelPlan(name=name, load=speed, asks=tuple(asks))
        return
    for rate in o.rates:
        name = f"{rate:g} requests/s"
        duration = DEFAULT_DURATION if o.requests is o.duration is None else o.duration
        asks = open_asks(
            o.shape, name,
            arrival=o.arrival, rate=rate, burst_size=o.burst_size, requests=o.requests, duration=duration,
        )  # fmt: skip
        yield LevelPlan(name=name, load=rate, asks=tuple(asks))
    for concurrency in () if o.rates else o.concurrency:
        requests = max(32, 8 * concurrency) if o.requests is o.duration is None else o.requests
        yield LevelPlan(
            name=f"{concurrency} in flight",
            load=concurrency,
            concurrency=concurrency,
            requests=requests,
            duration=o.duration,
        )
