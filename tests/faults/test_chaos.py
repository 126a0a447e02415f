"""Random faults on two prefill workers, two decode workers, two routers and two Bootstraps under mixed load: every
output is right, clients see no error but those that are promised, nothing hangs, and nothing is left over."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Any

import psutil
import pytest

from tests.support.chaos import Chaos, Fault, Kind, draw_plan
from tests.support.churn import claim_of
from tests.support.load import Answer, Ask, Load, run_all
from tests.support.models import tiny_model
from tests.support.oracle import oracle_for
from tests.support.serving import descriptors

OPTIONS: Mapping[str, Any] = {
    "kv_tokens": 8192,
    "max_batch_tokens": 64,
    "drain_timeout": 30.0,
    # Faults here come faster than a stream of a slow machine may go on between two of them.
    "max_attempts": 100,
    "watchdog_timeout": 30.0,
}
LIMIT = 300.0
"""Seconds in which a request must end; far beyond what any fault lasts."""
PROMISED = {"NO_WORKER", "QUEUE_FULL", "DRAINING", "QUEUE_TIMEOUT", "WAIT_TOO_LONG"}
"""Reasons of errors before token 1 that tell a client to come back later."""


def some_asks(longest: int) -> list[Ask]:
    """Short and long prompts and outputs, greedy and sampled, streamed and not."""
    draw = random.Random(11)
    asks = []
    for i in range(24):
        prompt = tuple(draw.randrange(3, 300) for _ in range(draw.choice((1, 16, 17, 60, 150, 300))))
        asks.append(
            Ask(
                prompt,
                draw.choice((8, 60, longest)),
                stream=i % 4 != 3,
                temperature=0.0 if i % 3 else 0.9,
                seed=1000 + i,
            )
        )
    return asks


def assert_promised(answers: Sequence[Answer], calm: Mapping[Ask, Sequence[int]], outages: Sequence[float]) -> int:
    """Right, or an error that is promised; returns how many were right. `outages` are the times at which this load's
    router was killed or stopped."""
    doubtful = []
    right = 0
    for answer in answers:
        told = str(answer)
        assert answer.over and not answer.timed_out, f"it hung: {told}"
        if answer.token_ids != list(calm[answer.ask])[: len(answer.token_ids)]:
            doubtful.append(claim_of(answer))
        if answer.ok:
            assert answer.status == 200 and answer.done and len(answer.token_ids) == answer.ask.max_tokens, told
            right += 1
        elif answer.broken:
            assert any(answer.began - 60 <= moment <= answer.ended for moment in outages), f"its router lived: {told}"
        else:
            assert answer.error is not None and answer.status in (429, 503) and not answer.token_ids, told
            assert answer.error["code"] in PROMISED or answer.error["code"].upper() in PROMISED, told
    if doubtful:
        oracle_for(tiny_model()).assert_right(doubtful)
    return right


async def storm(plan: Sequence[Fault], *, width: int, longest: int, least: int) -> None:
    """Load over both routers while the plan is carried out."""
    asks = some_asks(longest)
    async with Chaos(tiny_model(), options=OPTIONS) as chaos:
        urls = [chaos.mesh.url_of(name) for name in chaos.routers]
        calm = await run_all(urls[0], asks, limit=LIMIT)
        await run_all(urls[1], asks, limit=LIMIT)
        await chaos.mesh.quiet()
        before = {name: usage(pid) for name, pid in chaos.pids().items()}
        async with (
            Load(urls[0], asks, width=width, limit=LIMIT, name="a") as first,
            Load(urls[1], asks[::-1], width=width, limit=LIMIT, name="b") as second,
        ):
            await first.until(lambda: first.streaming() >= 1, "load runs", LIMIT)
            await second.until(lambda: second.streaming() >= 1, "load runs", LIMIT)
            await chaos.carry_out(plan)
            await chaos.recover()
            for load in (first, second):
                load.stop()
        right = 0
        for name, load in zip(chaos.routers, (first, second), strict=True):
            right += assert_promised(load.answers, calm, chaos.broken[name])
        assert right >= least, f"{right} of {len(first.answers) + len(second.answers)} were right"
        again = await run_all(urls[0], asks, limit=LIMIT)
        assert_promised([], again, [])
        await chaos.mesh.quiet(60.0)
        await settled(chaos, before)


def usage(pid: int) -> tuple[int, int]:
    """Open files, and resident memory in MiB."""
    return descriptors(pid), psutil.Process(pid).memory_info().rss // 2**20


async def settled(chaos: Chaos, before: Mapping[str, tuple[int, int]]) -> None:
    """Files and memory are back to where they were; a few connections more or less are the pairs of the moment."""
    found: dict[str, Any] = {}

    def back() -> bool:
        found.clear()
        for name, pid in chaos.pids().items():
            files, memory = usage(pid)
            most = before[name][0] + 12, before[name][1] * 1.25 + 48
            if files > most[0] or memory > most[1]:
                found[name] = {"files": (before[name][0], files), "MiB": (before[name][1], memory)}
        return not found

    for _ in range(150):
        if back():
            return
        await asyncio.sleep(0.2)
    raise AssertionError(f"left over: {found}")


@pytest.mark.timeout(400)
async def test_a_short_storm() -> None:
    """Each kind of fault once."""
    plan = [
        Fault(0.0, Kind.KILL_ENGINE, "decode-0"),
        Fault(1.5, Kind.STALL, "prefill-1", 2.0),
        Fault(3.0, Kind.KILL, "bootstrap"),
        Fault(4.5, Kind.RESET, "decode-1"),
        Fault(5.0, Kind.KILL, "prefill-0"),
        Fault(7.0, Kind.STOP_ENGINE, "decode-1", 2.0),
        Fault(8.5, Kind.DELAY, "decode-0", 2.0),
        Fault(9.0, Kind.STOP, "bootstrap-1", 2.0),
        Fault(10.5, Kind.KILL, "router-1"),
        Fault(12.0, Kind.STOP, "prefill-1", 2.0),
        Fault(13.5, Kind.KILL, "decode-1"),
    ]
    await storm(plan, width=3, longest=200, least=12)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [1, 2])
async def test_ten_minutes_of_chaos(seed: int) -> None:
    """A fault every 2 to 5 s, stops of up to 20 s."""
    names = ["prefill-0", "prefill-1", "decode-0", "decode-1"], ["router", "router-1", "bootstrap", "bootstrap-1"]
    seconds = 600.0 if seed == 1 else 120.0
    await storm(draw_plan(seed, seconds, *names), width=4, longest=400, least=200 if seed == 1 else 40)
