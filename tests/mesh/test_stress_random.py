"""Many random requests at once on two pairs with tiny pools: each gets what it gets alone, to the last token.

Preemption, set-back, eviction, quarantine, delta pushes and queueing all happen meanwhile, as counters say.
Expected is what an aggregated worker with a large pool answers, asked few at a time; where the two differ, the
oracle says whether rounding explains it. Every mesh ends with the conservation check.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.support.asking import random_prompt
from tests.support.mesh import Mesh
from tests.support.models import tiny_model
from tests.support.oracle import oracle_for
from tests.support.stress import (
    Crowd,
    Direct,
    Outcome,
    StressAsk,
    ask_whole,
    differences,
    draw_asks,
    open_without_reading,
)

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

LIMIT = 256
"""Tokens of every pool, and so of every request."""
WIDTH = 40
PAIRS = [(f"prefill-{p}", f"decode-{d}") for p in (0, 1) for d in (0, 1)]
SHORT = (0.002, 0.02, 0.1, 0.3)
"""Seconds that some requests get."""
PRESSURE = ("preemptions", "set_back", "evictions", "quarantined", "delta", "received")


class Ring:
    """A mesh under stress, and an aggregated worker that says what is right."""

    def __init__(self, mesh: Mesh, calm: Mesh, model: Path) -> None:
        self.mesh, self.calm, self.model = mesh, calm, model

    async def alone(self, asks: Sequence[StressAsk]) -> list[Outcome]:
        """What the aggregated worker answers, a few at a time."""
        slots = asyncio.Semaphore(4)
        async with Crowd(self.calm.url, width=4) as crowd:

            async def one(ask: StressAsk) -> Outcome:
                async with slots:
                    return await ask_whole(crowd.client, self.calm.url, ask)

            return list(await asyncio.gather(*(one(ask) for ask in asks)))

    async def crowd(self, asks: Sequence[StressAsk], width: int = WIDTH, **more: str) -> list[Outcome]:
        """What the mesh answers, many at a time."""
        async with Crowd(self.mesh.url, width=width) as crowd:
            return await crowd.run(asks, **more)

    def assert_no_wrong_text(
        self, asks: Sequence[StressAsk], outcomes: Sequence[Outcome], alone: Sequence[Outcome]
    ) -> None:
        """Whatever came is right."""
        found = [
            f"{ask}: {told}"
            for ask, outcome, expected in zip(asks, outcomes, alone, strict=True)
            for told in differences(ask, outcome, expected, lambda: oracle_for(self.model))
        ]
        assert not found, "\n".join(found)

    def assert_right(self, asks: Sequence[StressAsk], outcomes: Sequence[Outcome], alone: Sequence[Outcome]) -> None:
        """The same, and nobody was told of an error."""
        self.assert_no_wrong_text(asks, outcomes, alone)
        assert not [(ask, outcome.error) for ask, outcome in zip(asks, outcomes, strict=True) if outcome.error]

    async def pressure(self) -> Counter[str]:
        """How often each thing of PRESSURE has happened, over all workers."""
        found: Counter[str] = Counter()
        for rank in (await self.mesh.status())["ranks"]:
            counters = rank["counters"]
            found.update({name: int(counters.get(name, 0)) for name in PRESSURE})
            if rank["role"] == "DECODE":
                found["delta"] += int(counters["prefix_hit_tokens"])
        return found


@asynccontextmanager
async def ring(
    arch: Any, backend: str, changes: Mapping[str, Mapping[str, Any]] | None = None, **options: Any
) -> AsyncIterator[Ring]:
    """Two pairs that differ in budgets; prefill-0 is slow to push, prefill-1 takes few at a time."""
    model = tiny_model(arch)
    slow = json.dumps({"transport": backend, "rules": [{"action": "delay", "seconds": 0.1}]})
    overrides: dict[str, Mapping[str, Any]] = {
        "router": {"max_in_flight": 64, "max_queued": 16, "pool_headroom": 0},
        "prefill-0": {"transfer_backend": "scripted", "transfer_script": slow, "max_batch_tokens": 33},
        "prefill-1": {"transfer_backend": "tcp", "max_batch_tokens": 17, "max_running": 5},
        "decode-0": {"max_batch_tokens": 7},
        "decode-1": {"max_batch_tokens": 50, "max_running": 9},
    }
    overrides |= changes or {}
    options = {"kv_tokens": LIMIT, "verify_kv": True, **options}
    mesh = Mesh(model, prefill=2, decode=2, options=options, overrides=overrides)
    calm = Mesh(model, prefill=0, decode=0, mixed=1, options={"kv_tokens": 8192, "max_model_len": LIMIT})
    async with AsyncExitStack() as stack:
        await asyncio.gather(stack.enter_async_context(calm), stack.enter_async_context(mesh))
        yield Ring(mesh, calm, model)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stressed() -> AsyncIterator[Ring]:
    async with ring("llama", "shm") as made:
        yield made


async def stress(ring: Ring, seed: int, rounds: int) -> None:
    """Rounds of a crowd, at most `rounds`, until everything that may hurt has happened."""
    draw, found = random.Random(seed), Counter[str]()
    for _ in range(rounds):
        asks = draw_asks(draw, 60, limit=LIMIT)
        alone = await ring.alone(asks)
        ring.assert_right(asks, await ring.crowd(asks), alone)
        await ring.mesh.quiet()
        found = await ring.pressure()
        if all(found[name] for name in PRESSURE):
            return
    raise AssertionError(f"this was too gentle: {found}")


async def test_a_crowd_gets_what_each_gets_alone(stressed: Ring) -> None:
    await stress(stressed, seed=1, rounds=6)


async def test_requests_that_need_whole_pools_take_turns(stressed: Ring) -> None:
    """Each fills a prefill pool and a decode pool; none waits for another for ever."""
    draw = random.Random(2)
    options = {"max_tokens": 10**6, "temperature": 0.0, "ignore_eos": True}
    asks = [StressAsk((random_prompt(draw.choice((LIMIT - 1, LIMIT - 40)), i % 8),), options) for i in range(24)]
    outcomes = await stressed.crowd(asks)
    stressed.assert_right(asks, outcomes, await stressed.alone(asks))
    assert {len(o.choices[0].ids) for o in outcomes} == {1, 40}


async def test_too_many_are_refused_and_the_others_are_right(stressed: Ring) -> None:
    asks = [StressAsk((random_prompt(20 + i % 9, i),), {"max_tokens": 16, "temperature": 0.0}) for i in range(120)]
    alone = await stressed.alone(asks)
    outcomes = await stressed.crowd(asks, width=120, request_id="one-for-all")
    ends = Counter(outcome.status for outcome in outcomes)
    assert set(ends) == {200, 429} and ends[200] >= 64 + 16
    stressed.assert_no_wrong_text(asks, outcomes, alone)
    assert all(o.error["code"] == "queue_full" for o in outcomes if o.error)
    stressed.assert_right(asks[:8], await stressed.crowd(asks[:8]), alone[:8])


async def test_deadlines_and_newer_attempts_cut_anywhere(stressed: Ring) -> None:
    """What came before the cut is a true beginning, and what follows is right."""
    draw = random.Random(3)
    prompts = [random_prompt(draw.randint(1, LIMIT - 60), seed) for seed in range(6)]
    async with Direct(stressed.mesh) as direct:
        right = [(await direct.generate(PAIRS[0], p, 50, room=1 + i))[0] for i, p in enumerate(prompts)]
        assert [len(ids) for ids in right] == [50] * len(prompts)
        which = [draw.randrange(len(prompts)) for _ in range(120)]
        calls = [
            direct.generate(draw.choice(PAIRS), prompts[k], 50, room=100 + i, timeout=draw.choice(SHORT))
            for i, k in enumerate(which)
        ]
        # Attempts of the same rooms, in any order and at any worker: at each, the highest it has seen goes on.
        rooms = [draw.randrange(6) for _ in range(48)]
        calls += [
            direct.generate(draw.choice(PAIRS), prompts[k], 50, room=1000 + k, attempt=draw.randrange(6)) for k in rooms
        ]
        answers = await asyncio.gather(*calls)
        for k, (ids, status) in zip(which + rooms, answers, strict=True):
            assert ids == right[k][: len(ids)]
            assert (status == "OK") == (len(ids) == 50) or status != "OK", (status, len(ids))
        statuses = Counter(status for _, status in answers)
        assert set(statuses) <= {"OK", "DEADLINE_EXCEEDED", "FAILED_PRECONDITION", "CANCELLED"}, statuses
        assert statuses["DEADLINE_EXCEEDED"] and statuses["FAILED_PRECONDITION"] and statuses["OK"], statuses

        for k, prompt in enumerate(prompts):
            done = draw.choice((1, 17, 49))
            ids, status = await direct.generate(
                PAIRS[k % 4], prompt, 50, room=2000 + k, attempt=1, emitted=right[k][:done]
            )
            assert (ids, status) == (right[k][done:], "OK")
    await stressed.mesh.quiet()


async def test_clients_that_read_nothing_hold_nobody_up(stressed: Ring) -> None:
    asks = draw_asks(random.Random(4), 16, limit=LIMIT, leaving=0.0)
    alone = await stressed.alone(asks)
    mute = StressAsk((random_prompt(9, 9),), {"max_tokens": 200, "temperature": 0.0, "ignore_eos": True})
    sockets = [open_without_reading(stressed.mesh.url, mute) for _ in range(32)]
    try:
        stressed.assert_right(asks, await stressed.crowd(asks, width=16), alone)
    finally:
        for sock in sockets:
            sock.close()
    await stressed.mesh.quiet()


@pytest.mark.slow
async def test_a_decode_worker_that_dies_in_the_crowd(stressed: Ring) -> None:
    """Who was served by it is told so, after a true beginning; its successor serves under the same name."""
    asks = draw_asks(random.Random(5), 80, limit=LIMIT)
    alone = await stressed.alone(asks)
    before = (await stressed.mesh.rank("decode-1"))["incarnation"]
    running = asyncio.ensure_future(stressed.crowd(asks))
    await until_received(stressed.mesh, "decode-1")
    await stressed.mesh.kill_engine("decode-1")
    await stressed.mesh.gone("decode-1")
    await stressed.mesh.start("decode-1")
    outcomes = await running
    stressed.assert_no_wrong_text(asks, outcomes, alone)
    assert {o.error["type"] for o in outcomes if o.error} <= {"server_error"}
    assert (await stressed.mesh.rank("decode-1"))["incarnation"] > before
    async with Direct(stressed.mesh) as direct:
        ids, status = await direct.generate(("prefill-0", "decode-1"), random_prompt(40, 1), 20, room=3000)
        assert (len(ids), status) == (20, "OK")
    stressed.assert_right(asks, await stressed.crowd(asks), alone)


async def until_received(mesh: Mesh, name: str) -> None:
    """Waits until a decode worker has sessions."""
    deadline = time.monotonic() + 30.0
    while not (await mesh.rank(name))["sessions"]:
        assert time.monotonic() < deadline, f"{name} has no session"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("arch", "backend", "options"),
    [
        ("llama", "shm", {}),
        ("qwen2", "tcp", {"block_size": 32, "verify_kv": False}),
        ("qwen3", "tcp", {"block_size": 32}),
    ],
)
async def test_many_crowds(arch: str, backend: str, options: dict[str, Any]) -> None:
    async with ring(arch, backend, **options) as made:
        for seed in range(100, 104):
            await stress(made, seed, rounds=6)


@pytest.mark.slow
async def test_crowds_without_a_prefix_cache() -> None:
    async with ring("llama", "tcp", prefix_cache=False) as made:
        for seed in range(4):
            asks = draw_asks(random.Random(seed), 60, limit=LIMIT)
            made.assert_right(asks, await made.crowd(asks), await made.alone(asks))
        found = await made.pressure()
        assert found["preemptions"] and found["set_back"] and not found["delta"] and not found["evictions"]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shm", "tcp"])
async def test_pushes_that_fail_in_the_crowd(backend: str) -> None:
    """Every third push fails, is cut short or arrives corrupt, and says so or not. Nobody gets wrong text; whoever
    can't be served elsewhere is told why. Workers' queues are short, and overflow."""
    actions = ("fail", "short", "short_silent", "corrupt", "delay")
    rules = [{"action": actions[i % 5], "push": 3 * i, "seconds": 0.02} for i in range(1, 1000)]
    script = {"transfer_backend": "scripted", "transfer_script": json.dumps({"transport": backend, "rules": rules})}
    overrides = {
        "prefill-0": {**script, "max_batch_tokens": 33, "max_queued": 6},
        "prefill-1": {**script, "max_batch_tokens": 17, "max_queued": 6},
        "decode": {"max_queued": 5},
    }
    async with ring("llama", backend, overrides) as made:
        codes: Counter[str] = Counter()
        for seed in range(3):
            asks = draw_asks(random.Random(seed), 80, limit=LIMIT)
            outcomes, alone = await made.crowd(asks), await made.alone(asks)
            made.assert_no_wrong_text(asks, outcomes, alone)
            codes.update(o.error["code"] for o in outcomes if o.error)
            await made.mesh.quiet()
        assert set(codes) == {"queue_full", "kv_corrupt", "kv_incomplete", "push_failed"}, codes
