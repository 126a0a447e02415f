"""The demo model: 64 greedy tokens equal transformers, for prompts of 1 to 1,500 tokens.

Each token is checked against the logits after the output's own prefix; the first tokens that transformers
itself generates are compared beside that. Tolerance of a tie: 2e-3.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
import pytest_asyncio
import transformers

from tests.mesh.conftest import Served, assert_right, serve
from tests.support.asking import random_prompt
from tests.support.models import demo_model

pytestmark = pytest.mark.asyncio(loop_scope="session")

TOKENS = 64
VOCAB = 49152
TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Once upon a time, in a small village by the sea, there lived an old clockmaker who",
    "Les trains à grande vitesse relient",
    "1, 1, 2, 3, 5, 8, 13,",
    "🦜 Ελληνικά, 日本語, \u202eעברית and \t tabs",
    "SELECT name, count(*) FROM users WHERE",
    "Q: Why is the sky blue?\nA:",
)
CHAT = [
    {"role": "system", "content": "You answer in one sentence."},
    {"role": "user", "content": "What is the difference between a lake and a pond?"},
]
LONG = (
    "A mesh of services is easier to reason about when every part owns what it frees. "
    "The router owns the client's connection, the decode worker owns the blocks that it granted, "
    "and the prefill worker owns the blocks that it reads from. "
)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def demo() -> AsyncIterator[Served]:
    async with serve(demo_model(), options={"kv_tokens": 16384, "max_batch_tokens": 256, "threads": 2}) as served:
        yield served


@pytest.fixture(scope="module")
def tokenizer() -> transformers.PreTrainedTokenizerBase:
    return transformers.AutoTokenizer.from_pretrained(str(demo_model()), local_files_only=True)


def long_prompt(tokenizer: transformers.PreTrainedTokenizerBase, length: int) -> list[int]:
    """Text of exactly so many tokens, different for each length."""
    ids = tokenizer(f"Chapter {length}. " + LONG * (1 + length // 20))["input_ids"]
    assert len(ids) >= length
    return list(ids[:length])


async def check(served: Served, prompts: Sequence[Sequence[int]], literal: int) -> None:
    """Asks for all at once, half of them streaming; `literal` tokens of each are compared with generate()."""
    asked = [served.asker.generate(p, max_tokens=TOKENS, stream=bool(i % 2)) for i, p in enumerate(prompts)]
    answers = await asyncio.gather(*asked)
    for answer in answers:  # one by one: padding costs more than it saves
        served.oracle.verify([answer.claim()])
    assert_right(served, answers)
    assert {answer.transport for answer in answers} == {"shm"}
    for answer in answers:
        assert len(answer.ids) == TOKENS or answer.finish_reason == "stop"
        claim = answer.claim()
        same = claim.output[:literal] == served.oracle.greedy(claim.prompt, literal)
        assert same or not served.oracle.verify([claim])[0].exact, answer


async def test_some_prompts(demo: Served, tokenizer: transformers.PreTrainedTokenizerBase) -> None:
    chat = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=True, return_dict=False)
    prompts = [[20], tokenizer(TEXTS[0])["input_ids"], chat, long_prompt(tokenizer, 200)]
    await check(demo, prompts, literal=4)


async def test_text_and_chat_are_tokenised_as_transformers_does(
    demo: Served, tokenizer: transformers.PreTrainedTokenizerBase
) -> None:
    """The prompt's ids come back beside the output's, so that the text on both sides can be compared."""
    body = {"model": "default", "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    reply = await demo.asker.post("/v1/completions", {**body, "prompt": TEXTS[5]})
    choice = reply["choices"][0]
    assert choice["prompt_token_ids"] == tokenizer(TEXTS[5])["input_ids"]
    assert choice["text"] == tokenizer.decode(choice["token_ids"], skip_special_tokens=True)
    reply = await demo.asker.post("/v1/chat/completions", {**body, "messages": CHAT})
    chat = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert reply["prompt_token_ids"] == chat
    content = reply["choices"][0]["message"]["content"]
    assert content == tokenizer.decode(reply["choices"][0]["token_ids"], skip_special_tokens=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_twenty_prompts(demo: Served, tokenizer: transformers.PreTrainedTokenizerBase) -> None:
    chat = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=True, return_dict=False)
    prompts = [[20], [31, 42], *(tokenizer(text)["input_ids"] for text in TEXTS), chat]
    prompts += [list(random_prompt(n, n, VOCAB)) for n in (16, 255)]
    prompts += [long_prompt(tokenizer, n) for n in (17, 64, 256, 257, 512, 1000, 1500)]
    assert len(prompts) == 20
    await check(demo, prompts, literal=TOKENS)
