"""Greedy output equals transformers at every boundary of blocks and chunks, for each architecture.

Where the two best logits are closer than the oracle's tolerance (2e-3 in float32) either may be taken.
llama is served by shm and tcp at once, qwen2 by tcp in blocks of 32, qwen3 by shm with a small decode pool.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.mesh.conftest import BLOCK_BYTES, CHUNK, Served, assert_right, serve
from tests.support.asking import random_prompt
from tests.support.models import tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="session")

TOKENS = 24
BLOCK_SIZE = {"llama": 16, "qwen2": 32, "qwen3": 16}
TRANSPORTS = {"llama": {"shm", "tcp"}, "qwen2": {"tcp"}, "qwen3": {"shm"}}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def qwen2() -> AsyncIterator[Served]:
    options = {"kv_tokens": 8192, "max_batch_tokens": CHUNK, "block_size": 32, "transfer_backend": "tcp"}
    async with serve(tiny_model("qwen2"), options=options) as served:
        yield served


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def qwen3() -> AsyncIterator[Served]:
    options = {"kv_tokens": 8192, "max_batch_tokens": CHUNK}
    async with serve(tiny_model("qwen3"), options=options, overrides={"decode": {"kv_tokens": 512}}) as served:
        yield served


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def arch(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest, arch: str) -> Served:
    made: Served = request.getfixturevalue(arch)
    return made


def boundaries(block_size: int) -> list[int]:
    """Prompt lengths at, before and after the ends of blocks and of chunks."""
    ends = {block_size, 2 * block_size, 3 * block_size, CHUNK, 2 * CHUNK}
    return sorted({1, 2, 100, *(end + d for end in ends for d in (-1, 0, 1))})


async def test_alone(served: Served, arch: str) -> None:
    lengths = boundaries(BLOCK_SIZE[arch])
    before = await served.pushed()
    answers = [await served.asker.generate(random_prompt(n, n), max_tokens=TOKENS) for n in lengths]
    assert_right(served, answers)
    for answer in answers:
        claim = answer.claim()
        same = claim.output == served.oracle.greedy(claim.prompt, TOKENS)
        assert same or not served.oracle.verify([claim])[0].exact, answer

    moved = await served.pushed(before, len(lengths))
    blocks = sum(-(-n // BLOCK_SIZE[arch]) for n in lengths)
    assert moved.bytes == blocks * BLOCK_BYTES * BLOCK_SIZE[arch] // 16
    assert moved.transports == {answer.transport for answer in answers} == TRANSPORTS[arch]


@pytest.mark.parametrize("stream", [False, True])
async def test_all_at_once(served: Served, arch: str, *, stream: bool) -> None:
    lengths = boundaries(BLOCK_SIZE[arch])
    asked = (served.asker.generate(random_prompt(n, 1000 + n), max_tokens=TOKENS, stream=stream) for n in lengths)
    assert_right(served, await asyncio.gather(*asked))


async def test_preempted_requests_are_recomputed(served: Served, arch: str) -> None:
    """The pool of qwen3's decode worker holds less than half of these at their full length; the others' hold all."""
    before = (await served.asker.counters("decode-0")).get("preemptions", 0)
    prompts = [random_prompt(20 + 5 * i, 2000 + i) for i in range(10)]
    options = {"max_tokens": 100, "ignore_eos": True, "stream": True}
    answers = await asyncio.gather(*(served.asker.generate(p, **options) for p in prompts))
    assert_right(served, answers)
    assert all(len(answer.ids) == 100 for answer in answers)
    await served.mesh.quiet()
    preempted = (await served.asker.counters("decode-0")).get("preemptions", 0) - before
    assert (preempted > 0) == (arch == "qwen3")
