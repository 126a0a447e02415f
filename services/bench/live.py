"""The view of a run while it goes on: bars and figures where stderr is a terminal, else a line now and then."""

from __future__ import annotations

import asyncio
import time

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from services.bench.outcome import percentile
from services.bench.report import Level
from services.bench.tally import Tally
from services.bench.text import number

REFRESH = 0.5
_SLOWEST_REFRESH = 3.0
_SHARE = 0.005
"""The view may take so much of the time: what arrives while it is drawn is timed late, but too little to move a p99."""
PLAIN_EVERY = 5.0
_LOOK_EVERY = 0.5
_BARS = " ▁▂▃▄▅▆▇█"


def sparkline(values: list[float]) -> str:
    """Values as a line of bars; the greatest is a full one."""
    top = max(values, default=0.0)
    if top <= 0:
        return ""
    return "".join(_BARS[round(value / top * (len(_BARS) - 1))] for value in values)


def view(tally: Tally, title: str, now: float) -> RenderableType:
    """The whole view at a moment of time.perf_counter()."""
    grid = Table.grid(padding=(0, 2))
    for _ in range(9):
        grid.add_column(justify="left", no_wrap=True)
    headings = ("level", "", "ok", "errors", "429", "in flight", "out tok/s", "TTFT p50 / p99", "ITL p50 / p99")
    grid.add_row(*(Text(heading, style="dim") for heading in headings))
    for level in tally.finished:
        grid.add_row(*_finished(level))
    plan = tally.plan
    names = [p.name for p in tally.plans[len(tally.finished) :]]
    if plan is not None and tally.phase not in ("done",):
        grid.add_row(*_running(tally, now))
        names = names[1:]
    for name in names:
        grid.add_row(Text(name, style="dim"), Text("waits", style="dim"))
    parts: list[RenderableType] = [Text(title, style="bold"), grid]
    if tally.rates:
        last = list(tally.rates)
        parts.append(Text(f"tokens/s  {sparkline(last)}  {number(last[-1])}", style="cyan"))
    if tally.last_error:
        parts.append(Text(f"last error: {tally.last_error[:160]}", style="red"))
    return Group(*parts)


def _finished(level: Level) -> tuple[RenderableType, ...]:
    spreads = (level.ttft_ms, level.itl_ms)
    times = [f"{number(s.p50)} / {number(s.p99)} ms" for s in spreads]
    return (
        level.name,
        Text("done", style="green"),
        str(level.completed),
        _count(level.errors, "red"),
        _count(level.rejections.answers, "yellow"),
        f"{level.in_flight_mean:.1f}",
        number(level.output_tokens_per_s),
        *times,
    )


def _running(tally: Tally, now: float) -> tuple[RenderableType, ...]:
    assert tally.plan is not None
    bar = ProgressBar(total=1.0, completed=tally.share_done(now), width=16, pulse=False)
    warming = tally.phase == "warming up"
    seconds = now - tally.started
    times = [_pair(list(values)) for values in (tally.ttfts, tally.gaps)]
    return (
        Text(tally.plan.name, style="dim" if warming else "bold"),
        bar,
        str(tally.completed),
        _count(tally.errors, "red"),
        _count(tally.rejected, "yellow"),
        str(tally.in_flight),
        number(tally.chunks / seconds if seconds > 0 else 0.0),
        *times,
    )


def _count(count: int, style: str) -> Text:
    return Text(str(count), style=style if count else "")


def _pair(seconds: list[float]) -> str:
    middle, high = percentile(seconds, 50), percentile(seconds, 99)
    return "-" if middle is None or high is None else f"{number(middle * 1e3)} / {number(high * 1e3)} ms"


def plain_line(tally: Tally, now: float) -> str:
    """The same in one line."""
    if tally.plan is None:
        return tally.phase
    parts = [f"{tally.plan.name}: {tally.phase}, {tally.share_done(now):.0%}", f"{tally.completed} ok"]
    parts += [f"{tally.errors} errors", f"{tally.rejected} × 429", f"{tally.in_flight} in flight"]
    return ", ".join(parts)


async def _tell(tally: Tally, title: str, console: Console) -> None:
    """A line when a level starts, and now and then."""
    console.print(title, markup=False)
    told, seen = time.perf_counter(), (tally.plan, tally.phase)
    while True:
        await asyncio.sleep(_LOOK_EVERY)
        now = time.perf_counter()
        if now - told >= PLAIN_EVERY or seen != (tally.plan, tally.phase):
            told, seen = now, (tally.plan, tally.phase)
            console.print(plain_line(tally, now), markup=False)


async def watch(tally: Tally, title: str, console: Console) -> None:
    """Shows the tally until cancelled."""
    if not console.is_terminal:
        await _tell(tally, title, console)
    chunks, at, plan, wait = 0, time.perf_counter(), None, REFRESH
    with Live(view(tally, title, at), console=console, auto_refresh=False, transient=True) as live:
        while True:
            await asyncio.sleep(wait)
            now = time.perf_counter()
            if plan is not tally.plan:
                plan, chunks, at = tally.plan, 0, tally.started
            if now - at >= 1.0:
                tally.rates.append((tally.chunks - chunks) / (now - at))
                chunks, at = tally.chunks, now
            live.update(view(tally, title, now), refresh=True)
            wait = min(max(REFRESH, (time.perf_counter() - now) / _SHARE), _SLOWEST_REFRESH)
