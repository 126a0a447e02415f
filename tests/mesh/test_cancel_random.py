"""Hundreds of requests, most of whom go away at some moment: afterwards both workers and the router are as new."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from tests.mesh.conftest import BLOCK_BYTES, Served, assert_right
from tests.support.asking import Answer, random_prompt, until

pytestmark = pytest.mark.asyncio(loop_scope="session")

AT_ONCE = 32


@pytest.mark.parametrize("count", [200, pytest.param(500, marks=pytest.mark.slow)])
async def test_random_cancels(llama: Served, count: int) -> None:
    rng = random.Random(count)
    slots = asyncio.Semaphore(AT_ONCE)
    salts = [llama.asker.salt() for _ in range(4)]
    plans = [
        {
            "prompt": random_prompt(rng.choice((1, 16, 47, 100, 300)) + rng.randrange(20), rng.randrange(40)),
            "stream": rng.random() < 0.7,
            "cancel": rng.choice(("never", "at once", "soon", "soon", "tokens", "tokens")),
            "seconds": rng.uniform(0, 0.5),
            "tokens": rng.randrange(1, 30),
            "salt": rng.choice(salts),
        }
        for _ in range(count)
    ]

    async def one(plan: dict[str, Any]) -> Answer:
        """What came until the end, or until the client went away."""
        async with slots:
            asking = llama.asker.start(
                plan["prompt"], stream=plan["stream"], max_tokens=40, ignore_eos=True, cache_salt=plan["salt"]
            )
            if plan["cancel"] == "never":
                return await asking.whole()
            if plan["cancel"] == "soon":
                await asyncio.sleep(plan["seconds"])
            elif plan["cancel"] == "tokens" and plan["stream"]:
                await until(lambda: asking.done or len(asking.answer.ids) >= plan["tokens"], 60.0, lambda: str(asking))
            await asking.disconnect()
            return asking.answer

    answers = await asyncio.gather(*map(one, plans))
    await llama.mesh.quiet()
    await llama.asker.router_idle()
    kept = [answer for answer, plan in zip(answers, plans, strict=True) if plan["cancel"] == "never"]
    assert len(kept) > count // 10
    assert_right(llama, kept)
    assert not [answer for answer in answers if answer.error is not None]
    llama.oracle.assert_right([answer.claim() for answer in answers if answer.ids])

    # Nothing that went away is still counted.
    before = await llama.pushed()
    assert_right(llama, [await llama.asker.generate(random_prompt(200, 1), max_tokens=4)])
    assert (await llama.pushed(before, 1)).bytes == 13 * BLOCK_BYTES
    decode = await llama.asker.counters("decode-0")
    assert decode["cancelled"] > count // 10
