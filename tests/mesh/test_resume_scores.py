"""Log probabilities, penalties and biases on real workers, from prefill, decode and MIXED engines alike: they are the
model's own, and go on as if nothing had happened where an output breaks off or is preempted.

The router takes turns between a pair and a MIXED worker, so that what breaks on one goes on at the other.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.support.asking import Answer, Asker, random_prompt, until_async
from tests.support.mesh import Mesh
from tests.support.models import tiny_model
from tests.support.oracle import Oracle, oracle_for

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENS = 6
"""Of each output that breaks; one is asked for each index at which it may."""
LENGTHS = [40 + 16 * at for at in range(TOKENS)]
"""Prompt lengths, so far apart that a position belongs to one request alone."""
MARK = 302
"""A token that no other prompt holds: the chunk with it breaks."""
CHUNK = 48
BLOCK = 16
POOL = 16
"""Blocks of the decode and the MIXED worker."""
CLOSE = 2e-3
"""Log probabilities that differ by less are the same but for rounding."""


@dataclass
class Scored:
    """A mesh with a pair and a MIXED worker; what its files name breaks once."""

    mesh: Mesh
    asker: Asker
    oracle: Oracle
    folder: Path

    def arm(self) -> None:
        """Each request breaks once more."""
        for path in self.folder.glob("once-*"):
            path.unlink()
        (self.folder / "on").touch()

    def calm(self) -> None:
        """Nothing breaks, and nothing is slow."""
        for name in ("on", "slow"):
            (self.folder / name).unlink(missing_ok=True)

    def broke(self, what: str) -> bool:
        """Whether it has broken since arm()."""
        return (self.folder / f"once-{what}").exists()

    async def counted(self, name: str) -> float:
        """A counter, summed over all workers, once all is quiet."""
        return sum(float(rank["counters"].get(name, 0)) for rank in await self.mesh.quiet())

    def check(self, answer: Answer) -> None:
        """Tokens are what penalties and biases make of the model's logits, log probabilities what they were before."""
        assert answer.ok, answer
        self.oracle.assert_right([answer.claim()])
        asked = [answer.options.get(name) is not None for name in ("logprobs", "prompt_logprobs")]
        assert len(answer.logprobs) == asked[0] * len(answer.ids)
        assert len(answer.prompt_logprobs) == asked[1] * len(answer.prompt)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scored(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scored]:
    folder = tmp_path_factory.mktemp("scored")
    on = {"action": "fail", "when": str(folder / "on")}
    rules: list[dict[str, Any]] = [
        {"position": n + at, "once": str(folder / f"once-{at}"), **on} for at, n in enumerate(LENGTHS)
    ]
    rules += [{"token": MARK, "phase": "prompt", "once": str(folder / "once-prompt"), **on}]
    rules += [{"action": "slow", "when": str(folder / "slow")}]
    options = {"policy": "round_robin", "max_batch_tokens": CHUNK, "fault_script": json.dumps({"rules": rules})}
    overrides = {
        "prefill": {"kv_tokens": 4096},
        "decode": {"kv_tokens": BLOCK * POOL},
        "router": {"pool_headroom": 0.0},  # more may come than fits
    }
    model = tiny_model("llama")
    async with Mesh(model, mixed=1, options=options, overrides=overrides) as mesh, Asker(mesh) as asker:
        yield Scored(mesh, asker, oracle_for(model), folder)


@pytest.fixture(autouse=True)
def calm_afterwards(scored: Scored) -> Iterator[None]:
    yield
    scored.calm()


ADJUSTED: dict[str, Any] = {
    "ignore_eos": True, "frequency_penalty": 0.7, "presence_penalty": 0.5, "repetition_penalty": 1.25,
    "logit_bias": {"7": 1.5, "11": -3.0}, "logprobs": 3, "prompt_logprobs": 2,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {"temperature": 0.9, "seed": 11}}


async def test_further_samples_compute_the_prompt_no_second_time(scored: Scored) -> None:
    """Two of three samples compute what is left of the prompt behind its whole blocks, at prefill or MIXED."""
    prompt, served = random_prompt(100, 500), set[str]()

    async def computed() -> dict[str, float]:
        names = ("prefill-0", "decode-0", "mixed-0")
        return {name: (await scored.asker.counters(name)).get("prompt_tokens_computed", 0) for name in names}

    for turn in range(4):
        before = await computed()
        reply = await scored.asker.post(
            "/v1/completions",
            {"model": "default", "prompt": list(prompt), "n": 3, "max_tokens": 4, "temperature": 1.0, "seed": turn,
             "ignore_eos": True, "cache_salt": f"samples-{turn}"},
        )  # fmt: skip
        assert len(reply["choices"]) == 3
        new = {name: count - before[name] for name, count in (await computed()).items() if count != before[name]}
        assert list(new.values()) == [100 + 2 * (100 % BLOCK)], new
        served |= set(new)
    assert served == {"prefill-0", "mixed-0"}


async def test_they_are_the_models_own_whatever_is_cached(scored: Scored) -> None:
    """Streamed and whole; a prompt that is to be scored is computed, though every block of it is cached."""
    for at, stream in enumerate((True, False, True, False)):
        prompt, salt = random_prompt(120, 600), f"cached-{at // 2}"
        answer = await scored.asker.generate(prompt, stream=stream, max_tokens=TOKENS, cache_salt=salt, **ADJUSTED)
        scored.check(answer)
        plain = await scored.asker.generate(prompt, max_tokens=1, cache_salt=salt)
        assert plain.logprobs == [] and plain.prompt_logprobs == []
        scored.check(plain)


@pytest.mark.parametrize("variant", VARIANTS)
async def test_a_break_at_every_token_is_not_seen(scored: Scored, variant: str) -> None:
    for at, length in enumerate(LENGTHS):
        prompt = random_prompt(length, 700 + at)
        options = {**ADJUSTED, **VARIANTS[variant], "max_tokens": TOKENS}
        scored.calm()
        whole = await scored.asker.generate(prompt, stream=at % 2 == 0, **options)
        scored.check(whole)
        assert whole.attempts == 1
        scored.arm()
        broken = await scored.asker.generate(prompt, stream=at % 2 == 0, **options)
        assert scored.broke(str(at)) and broken.attempts == 2, (at, broken)
        scored.check(broken)
        assert broken.ids == whole.ids
        for one, other in zip(broken.logprobs, whole.logprobs, strict=True):
            assert abs(one["logprob"] - other["logprob"]) < CLOSE


async def test_a_prompt_that_breaks_half_way_is_scored_once(scored: Scored) -> None:
    """Some positions have come when the third chunk fails; each is there once in the end."""
    for turn in range(2):  # at the pair, and at the MIXED worker
        prompt = list(random_prompt(170, 800 + turn))
        prompt[2 * CHUNK + 10] = MARK
        scored.arm()
        answer = await scored.asker.generate(tuple(prompt), max_tokens=TOKENS, **ADJUSTED)
        assert scored.broke("prompt") and answer.attempts == 2, answer
        scored.check(answer)


@pytest.mark.parametrize("variant", VARIANTS)
async def test_a_grammar_goes_on_where_it_was(scored: Scored, variant: str) -> None:
    """Each output breaks at its token, by which the grammar has come so far; it is the same to the end."""
    for at, length in enumerate(LENGTHS):
        options = {**VARIANTS[variant], "max_tokens": 20, "guided_regex": "(ab|cd|x[0-9]){3}-[a-z]{2}", "logprobs": 0}
        prompt = random_prompt(length, 850 + at)
        scored.calm()
        whole = await scored.asker.generate(prompt, **options)
        assert re.fullmatch("(ab|cd|x[0-9]){3}-[a-z]{2}", whole.text) and whole.finish_reason == "stop", whole
        scored.arm()
        broken = await scored.asker.generate(prompt, stream=True, **options)
        assert scored.broke(str(at)) and broken.attempts == 2, (at, broken)
        assert (broken.ids, broken.text, broken.finish_reason) == (whole.ids, whole.text, "stop")
        assert [r["token_id"] for r in broken.logprobs] == broken.ids


async def test_a_preempted_output_goes_on(scored: Scored) -> None:
    (scored.folder / "slow").touch()
    before = await scored.counted("preemptions")
    options = {**ADJUSTED, "max_tokens": 100}
    asked = [
        scored.asker.start(random_prompt(50, 900 + i), **{**options, **VARIANTS["sampled" if i % 2 else "greedy"]})
        for i in range(6)
    ]

    async def preempted() -> bool:
        found = [(await scored.asker.counters(name)).get("preemptions", 0) for name in ("decode-0", "mixed-0")]
        return sum(found) > before or all(one.done for one in asked)

    await until_async(preempted, 60.0)
    scored.calm()
    for one in asked:
        answer = await one.whole()
        assert len(answer.ids) == 100
        scored.check(answer)
    assert await scored.counted("preemptions") > before
