"""Half an hour of mixed load without faults: memory, files, tasks, sessions and rooms stay where they were."""

from __future__ import annotations

import asyncio
import statistics
from typing import Any

import psutil
import pytest

from tests.support.chaos import Chaos
from tests.support.churn import assert_whole, some_asks
from tests.support.load import Load, run_all
from tests.support.models import tiny_model
from tests.support.serving import descriptors

MINUTES = 30
ROOMS_KEPT = 200
OPTIONS: dict[str, Any] = {"kv_tokens": 8192, "max_batch_tokens": 64, "rooms_kept": ROOMS_KEPT}


def usage(chaos: Chaos) -> dict[str, tuple[int, float, int]]:
    """By process: open files, resident MiB, threads."""
    found = {}
    for name, pid in chaos.pids().items():
        process = psutil.Process(pid)
        found[name] = descriptors(pid), process.memory_info().rss / 2**20, process.num_threads()
    return found


@pytest.mark.slow
@pytest.mark.timeout(MINUTES * 60 + 600)
async def test_half_an_hour() -> None:
    asks = some_asks(40, 60, seed=3)
    async with Chaos(tiny_model(), options=OPTIONS) as chaos:
        urls = [chaos.mesh.url_of(name) for name in chaos.routers]
        calm = await run_all(urls[0], asks)
        samples: list[dict[str, tuple[int, float, int]]] = []
        async with Load(urls[0], asks, width=4, name="a") as first, Load(urls[1], asks, width=4, name="b") as second:
            for _ in range(MINUTES):
                await asyncio.sleep(60.0)
                samples.append(usage(chaos))
                for load in (first, second):  # what has ended is checked, and forgotten, as it goes
                    ended = [answer for answer in load.answers if answer.over]
                    assert_whole(ended, tiny_model(), calm)
                    load.answers[:] = [answer for answer in load.answers if not answer.over]
                    assert ended, "a minute without an answer"
        await chaos.mesh.quiet()
        ranks = (await chaos.mesh.status())["ranks"]
        assert [(r["streams"], r["tasks"], r["sessions"]) for r in ranks] == [(0, 0, 0)] * 4
        # The first minutes fill caches, logs and rings, which are bounded; after a third of the time all is flat.
        early, late = samples[MINUTES // 3 : MINUTES // 2], samples[-MINUTES // 6 :]
        for name in samples[-1]:
            files, memory, threads = (
                [statistics.median(sample[name][i] for sample in part) for part in (early, late)] for i in range(3)
            )
            assert files[1] <= files[0] + 8, (name, "files", files)
            assert memory[1] <= 1.05 * memory[0] + 8, (name, "MiB", memory)
            assert threads[1] <= threads[0] + 2, (name, "threads", threads)
