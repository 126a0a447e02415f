"""Greedy output equals transformers on every way through the mesh: pairwise here, all combinations in `slow`.

api        /generate, or /v1/completions with return_token_ids
load       alone, or 32 at once
stream     server-sent events, or one body
cache      cold, or the leading 64 tokens are in every worker's prefix index
transport  shm (prefill-0) or tcp (prefill-1); the workers take turns
chunks     what is left to compute is a multiple of the chunk size, or not
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
import pytest_asyncio

from tests.mesh.conftest import BLOCK_BYTES, CHUNK, Served, assert_right, serve, two_paths
from tests.support.asking import Answer, random_prompt
from tests.support.models import tiny_model
from tests.support.pairwise import Row, pairwise, product, row_id

pytestmark = pytest.mark.asyncio(loop_scope="session")

AXES = {
    "api": ("generate", "completions"),
    "load": (1, 32),
    "stream": (False, True),
    "cache": ("cold", "hit"),
    "transport": ("shm", "tcp"),
    "chunks": ("whole", "ragged"),
}
BLOCK_SIZE = 16
PREFIX = 4 * BLOCK_SIZE


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def qwen2() -> AsyncIterator[Served]:
    async with serve(tiny_model("qwen2"), **two_paths()) as served:
        yield served


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def qwen3() -> AsyncIterator[Served]:
    async with serve(tiny_model("qwen3"), **two_paths()) as served:
        yield served


async def take_way(served: Served, row: Row) -> None:
    """Asks as the row says and checks every answer, and that it went that way."""
    salt = served.asker.salt()
    cached = PREFIX if row["cache"] == "hit" else 0
    prefix = random_prompt(cached, product(AXES).index(row))
    if cached:
        await warm(served, prefix, salt)
    rest = 2 * CHUNK if row["chunks"] == "whole" else 2 * CHUNK + 5
    before = await served.pushed()

    async def one(index: int) -> Answer:
        prompt = prefix + random_prompt(rest, 100 * index + rest)
        return await served.asker.ask(
            row["api"], prompt, stream=row["stream"], max_tokens=16, cache_salt=salt if cached else served.asker.salt()
        )

    answers: Sequence[Answer] = await asyncio.gather(*(one(i) for i in range(row["load"])))
    sent = len(answers)
    while not any(answer.transport == row["transport"] for answer in answers):
        assert sent < 3, f"workers do not take turns: {answers}"
        answers = [*answers, await one(sent)]
        sent += 1
    assert_right(served, answers)
    assert all(answer.cached == cached for answer in answers)
    if row["load"] > 1:
        assert {answer.transport for answer in answers} == {"shm", "tcp"}

    moved = await served.pushed(before, sent)
    assert moved.bytes == sent * -(-rest // BLOCK_SIZE) * BLOCK_BYTES
    assert moved.transports == {"shm", "tcp"}


async def warm(served: Served, prefix: Sequence[int], salt: str) -> None:
    """Puts a prefix into the index of both prefill workers and of the decode worker."""
    seen: set[str] = set()
    while len(seen) < 2:
        answer = await served.asker.generate([*prefix, 7], max_tokens=2, cache_salt=salt)
        assert answer.prefill not in seen, "workers do not take turns"
        seen.add(answer.prefill)


@pytest.mark.parametrize("row", pairwise(AXES), ids=row_id)
async def test_pairwise(llama: Served, row: Row) -> None:
    await take_way(llama, row)


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def served(request: pytest.FixtureRequest) -> Served:
    made: Served = request.getfixturevalue(request.param)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("row", product(AXES), ids=row_id)
async def test_all_ways(served: Served, row: Row) -> None:
    await take_way(served, row)


async def test_a_prefix_that_decode_holds_is_not_pushed_again(llama: Served) -> None:
    """What travels is what decode lacks, whatever prefill computes anew."""
    salt, prompt = llama.asker.salt(), random_prompt(6 * BLOCK_SIZE + 4, 1)
    moved = []
    for _ in range(3):
        before = await llama.pushed()
        answer = await llama.asker.generate(prompt, max_tokens=16, ignore_eos=True, cache_salt=salt)
        assert_right(llama, [answer])
        moved.append((await llama.pushed(before, 1)).bytes)
    assert moved == [7 * BLOCK_BYTES, BLOCK_BYTES, BLOCK_BYTES]

    # The decode worker has computed the KV of the output itself, but for the last token: 115 tokens fill 7 blocks.
    longer = (*prompt, *answer.ids[:-1], 5, 6)
    before = await llama.pushed()
    answer = await llama.asker.generate(longer, max_tokens=12, cache_salt=salt)
    assert answer.cached == 6 * BLOCK_SIZE
    assert_right(llama, [answer])
    assert (await llama.pushed(before, 1)).bytes == BLOCK_BYTES


async def test_another_salt_shares_nothing(llama: Served) -> None:
    prompt = random_prompt(6 * BLOCK_SIZE, 2)
    for _ in range(2):
        before = await llama.pushed()
        answer = await llama.asker.generate(prompt, max_tokens=4)
        assert answer.cached == 0
        assert (await llama.pushed(before, 1)).bytes == 6 * BLOCK_BYTES
