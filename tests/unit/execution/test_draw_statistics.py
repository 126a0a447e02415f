"""What a tiny model's draws look like, against a plain reference of its own; and that a seed alone decides.

Seeds are fixed, so that every figure here is the same in each run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from engine_core.scheduler.step import ScheduledSequence, StepPlan
from engine_core.types.ids import SessionId
from engine_core.types.sampling import SamplingParams
from tests.support import hf_reference
from tests.support.models import tiny_model
from tests.support.stepper import Stepper, Stream

PROMPT = (5, 9, 31, 7, 7, 200, 64, 18, 99, 3)
DRAWS, AT_ONCE = 2000, 250
EMITTED = (100, 150, 100, 250, 100, 150)
"""An output so far, with repetitions."""
BASE = {"temperature": 3.0, "logit_bias": ((100, 24.0), (150, 3.0), (250, 22.0), (7, 17.0), (200, 13.0))}
"""Tokens of prompt and output are among the likely ones, so that penalties for them show."""


def probabilities(
    *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0,
    frequency_penalty: float = 0.0, presence_penalty: float = 0.0, repetition_penalty: float = 1.0,
    logit_bias: tuple[tuple[int, float], ...] = (),
) -> dict[int, float]:  # fmt: skip
    """The plain reference: token by token, from the definitions."""
    logits = hf_reference.logits(tiny_model("llama"), (*PROMPT, *EMITTED))[-1].tolist()
    for token, bias in logit_bias:
        logits[token] += bias
    for token in set(PROMPT) | set(EMITTED):
        logits[token] *= repetition_penalty if logits[token] < 0 else 1 / repetition_penalty
    for token in EMITTED:
        logits[token] -= frequency_penalty
    for token in set(EMITTED):
        logits[token] -= presence_penalty
    ranked = sorted(range(len(logits)), key=lambda t: -logits[t])
    highest = max(logits)
    if top_k:
        ranked = ranked[:top_k]
    share = {t: math.exp((logits[t] - highest) / temperature) for t in ranked}
    total, reached, kept = sum(share.values()), 0.0, {}
    for token in ranked:
        if reached >= top_p * total:
            break
        reached += share[token]
        kept[token] = share[token]
    kept = {t: s for t, s in kept.items() if s >= min_p}
    return {t: s / sum(kept.values()) for t, s in kept.items()}


@pytest.fixture(scope="module")
def draw_many() -> Callable[..., Counter[int]]:
    """Draws the token after prompt and output once per seed, in large batches."""
    stepper = Stepper(tiny_model("llama"))
    stream = stepper.stream(PROMPT, 1, emitted=EMITTED)
    stepper.worker.execute(StepPlan(1, (stream.part(len(stream.known) - 1),)))
    last = len(stream.known) - 1

    def many(**params: Any) -> Counter[int]:
        found: Counter[int] = Counter()
        for first in range(0, DRAWS, AT_ONCE):
            sequences = tuple(
                ScheduledSequence(
                    SessionId(seed), stream.known[last:], last, (stream.blocks,), True,
                    SamplingParams(max_tokens=99, seed=seed, **params), known=stream.known, prompt_len=len(PROMPT),
                )
                for seed in range(first, first + AT_ONCE)
            )  # fmt: skip
            found.update(stepper.worker.execute(StepPlan(1, sequences)).sampled)
        return found

    return many


def strangeness(found: Counter[int], expected: dict[int, float]) -> float:
    """Pearson's chi-square over what chance exceeds once in a thousand (Wilson and Hilferty's approximation): right
    draws stay below 1. Tokens that are seldom expected count as one."""
    often = [t for t, p in expected.items() if p * DRAWS >= 8]
    seldom = [t for t in expected if t not in often]
    cells = [(found[t], expected[t] * DRAWS) for t in often]
    rest = sum(expected[t] for t in seldom) * DRAWS
    if seldom and rest >= 8:
        cells.append((sum(found[t] for t in seldom), rest))
    chi_square = sum((n - e) ** 2 / e for n, e in cells)
    freedom = len(cells) - 1
    assert freedom >= 2, "too few tokens to say anything"
    limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3
    return chi_square / limit


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 2.0},
        {"temperature": 8.0},
        BASE,
        {**BASE, "top_k": 7},
        {**BASE, "top_p": 0.6},
        {**BASE, "min_p": 0.2},
        {**BASE, "top_k": 40, "top_p": 0.8, "min_p": 0.05},
        {**BASE, "frequency_penalty": 2.0},
        {**BASE, "frequency_penalty": -2.0},
        {**BASE, "presence_penalty": 3.0},
        {**BASE, "repetition_penalty": 1.6},
        {**BASE, "repetition_penalty": 0.7},
        {
            **BASE, "frequency_penalty": 1.5, "presence_penalty": -1.0, "repetition_penalty": 1.3,
            "top_k": 60, "top_p": 0.95, "min_p": 0.01,
        },
    ],
    ids=str,
)  # fmt: skip
def test_draws_follow_the_probabilities(draw_many: Callable[..., Counter[int]], params: dict[str, Any]) -> None:
    found, expected = draw_many(**params), probabilities(**params)
    assert set(found) <= set(expected)
    assert strangeness(found, expected) < 1.0
    added = params.keys() - BASE.keys() or params.keys()
    if len(added) == 1 or params == BASE:  # the test sees each parameter: without it the same draws are most unlikely
        for name in added:
            without = probabilities(**{n: v for n, v in params.items() if n != name})
            assert strangeness(found, without) > 1.5, name


def prompts(count: int) -> list[list[int]]:
    chance = np.random.default_rng(3)
    return [[int(t) for t in chance.integers(3, 325, 3 + 5 * i % 41)] for i in range(count)]


def request(i: int) -> SamplingParams:
    """One of many kinds."""
    return SamplingParams(
        max_tokens=10, seed=1000 + i, temperature=(0.0, 2.0, 5.0)[i % 3], top_p=(1.0, 0.9)[i % 2],
        top_k=(0, 30, 0, 5)[i % 4], min_p=(0.0, 0.0, 0.02)[i % 3], frequency_penalty=(0.0, 0.8)[i % 2],
        presence_penalty=(0.0, 0.0, 1.1)[i % 3], repetition_penalty=(1.0, 1.2, 1.0, 1.0)[i % 4],
        logit_bias=((), (), ((50, 6.0),))[i % 3], logprobs=(None, 2)[i % 2],
    )  # fmt: skip


def outputs(stepper: Stepper, batch: int, chunk: int, known: Sequence[list[int]]) -> list[list[int]]:
    """Runs all requests, `batch` at a time: as one ends, the next begins."""
    waiting = [(i, stepper.stream(prompt, 10, request(i))) for i, prompt in enumerate(known)]
    running: list[tuple[int, Stream]] = []
    done: dict[int, list[int]] = {}
    while waiting or running:
        while waiting and len(running) < batch:
            running.append(waiting.pop(0))
        running.sort(key=lambda pair: len(pair[1].known) - pair[1].computed > 1)
        stepper.step([(stream, chunk) for _, stream in running])
        done |= {i: stream.output for i, stream in running if len(stream.output) == 10}
        running = [pair for pair in running if pair[0] not in done]
    return [done[i] for i in range(len(known))]


def test_a_seed_decides_whatever_the_batch_and_the_chunks() -> None:
    known = prompts(32)
    alone = outputs(Stepper(tiny_model("llama")), 1, 1 << 30, known)
    assert len({tuple(o) for o in alone}) == 32
    for batch, chunk in ((7, 1 << 30), (32, 1 << 30), (1, 5), (7, 5), (32, 16)):
        assert outputs(Stepper(tiny_model("llama")), batch, chunk, known) == alone, (batch, chunk)


def test_a_resumed_request_goes_on_as_if_nothing_had_happened() -> None:
    stepper, known = Stepper(tiny_model("qwen3")), prompts(12)
    for i, prompt in enumerate(known):
        whole = stepper.run(stepper.stream(prompt, 10, request(i)), 10).output
        for cut in (1, 6):
            resumed = stepper.stream(prompt, 10, request(i), emitted=whole[:cut])
            assert stepper.run(resumed, 10 - cut, chunk=9).output == whole[cut:], (i, cut)
