"""Log probabilities equal transformers', of outputs and of prompts, whatever the chunks and the batch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_core.execution import model_worker
from engine_core.execution.native_sampler import NativeSampler
from engine_core.execution.sampler import ReferenceSampler, Sampler
from engine_core.platforms.cpu.kernels import Kernels
from engine_core.scheduler.step import ScheduledSequence, StepPlan
from engine_core.types.errors import InternalError
from engine_core.types.ids import SessionId
from engine_core.types.sampling import SamplingParams, TokenLogprobs
from tests.support import hf_reference
from tests.support.models import demo_model, tiny_model
from tests.support.stepper import Stepper, Stream

PROMPT = [5, 9, 31, 7, 7, 200, 64, 18, 99, 3, 41, 42, 43, 300, 12, 11, 10, 8, 77, 78, 79, 80, 81]
SAMPLERS = [ReferenceSampler(), NativeSampler(Kernels())]
both = pytest.mark.parametrize("sampler", SAMPLERS, ids=["reference", "native"])


def assert_equal(reports: Sequence[TokenLogprobs], logits: torch.Tensor, tokens: Sequence[int], top: int) -> None:
    """Reports against log_softmax of logits [T, V], in float64."""
    table = logits.double().log_softmax(-1)
    assert [r.token_id for r in reports] == list(tokens)
    for report, row in zip(reports, table, strict=True):
        assert report.logprob == pytest.approx(float(row[report.token_id]), abs=1e-4)
        above = int((row > row[report.token_id] + 1e-4).sum())
        assert above < report.rank <= int((row >= row[report.token_id] - 1e-4).sum())
        assert len(report.top) == top
        assert [p for _, p in report.top] == pytest.approx(row.topk(top).values.tolist(), abs=1e-4)
        assert [p for _, p in report.top] == pytest.approx([float(row[t]) for t, _ in report.top], abs=1e-4)
        if report.rank <= top:
            assert report.top[report.rank - 1] == (report.token_id, report.logprob)


def check(model: Path, stream: Stream, prompt: list[int]) -> None:
    logits = hf_reference.logits(model, stream.known[:-1])
    first = len(prompt) - 1
    assert_equal(stream.logprobs, logits[first:], stream.output, stream.sampling.logprobs or 0)
    assert_equal(stream.prompt_logprobs, logits[:first], prompt[1:], stream.sampling.prompt_logprobs or 0)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_a_tiny_model_reports_what_transformers_computes(arch: Any) -> None:
    model = tiny_model(arch)
    stepper = Stepper(model)
    changed = {"frequency_penalty": 1.0, "repetition_penalty": 1.3, "logit_bias": ((17, 3.0),), "top_p": 0.9}
    for chunk, params in (
        (1 << 30, {"logprobs": 5, "prompt_logprobs": 3}),
        (7, {"logprobs": 0, "prompt_logprobs": 0}),
        (1, {"logprobs": 20, "prompt_logprobs": 20, "temperature": 1.3, "seed": 4, **changed}),
        (16, {"logprobs": 1, "prompt_logprobs": 1, "temperature": 0.7, "seed": 5, **changed}),
    ):
        sampling = SamplingParams(max_tokens=8, **params)  # type: ignore[arg-type]
        check(model, stepper.run(stepper.stream(PROMPT, 8, sampling), 8, chunk=chunk), PROMPT)


def test_the_demo_model_reports_what_transformers_computes() -> None:
    model = demo_model()
    stepper = Stepper(model, kv_tokens=256, max_model_len=256)
    sampling = SamplingParams(max_tokens=3, logprobs=5, prompt_logprobs=5)
    check(model, stepper.run(stepper.stream(PROMPT, 3, sampling), 3, chunk=9), PROMPT)


def test_chunks_and_slices_leave_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    stepper = Stepper(tiny_model("llama"))
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=2)
    whole = stepper.run(stepper.stream(PROMPT, 1, sampling), 1).prompt_logprobs
    assert [r.token_id for r in whole] == PROMPT[1:]
    for chunk in (1, 2, 5, 22, 23):
        stream = stepper.run(stepper.stream(PROMPT, 1, sampling), 1, chunk=chunk)
        assert [(r.token_id, r.rank) for r in stream.prompt_logprobs] == [(r.token_id, r.rank) for r in whole]
        assert [r.logprob for r in stream.prompt_logprobs] == pytest.approx([r.logprob for r in whole], abs=1e-4)
    monkeypatch.setattr(model_worker, "_SCORE_BYTES", 3 * 4 * stepper.info.vocab_size)  # slices of three rows
    sliced = stepper.run(stepper.stream(PROMPT, 1, sampling), 1).prompt_logprobs
    assert [(r.token_id, r.rank) for r in sliced] == [(r.token_id, r.rank) for r in whole]
    assert [r.logprob for r in sliced] == pytest.approx([r.logprob for r in whole], abs=1e-4)


def test_a_resumed_stream_reports_its_prompt_alone() -> None:
    stepper = Stepper(tiny_model("qwen2"))
    sampling = SamplingParams(max_tokens=9, logprobs=1, prompt_logprobs=1)
    whole = stepper.run(stepper.stream(PROMPT, 9, sampling), 9)
    resumed = stepper.run(stepper.stream(PROMPT, 9, sampling, emitted=whole.output[:5]), 4, chunk=6)
    assert [r.token_id for r in resumed.prompt_logprobs] == PROMPT[1:]
    assert [r.token_id for r in resumed.logprobs] == whole.output[5:]


def test_a_mixed_step_reports_to_each_what_it_asked_for() -> None:
    model = tiny_model("llama")
    stepper = Stepper(model)
    wanted = [
        SamplingParams(max_tokens=6),
        SamplingParams(max_tokens=6, logprobs=3),
        SamplingParams(max_tokens=6, prompt_logprobs=2),
        SamplingParams(max_tokens=6, logprobs=0, prompt_logprobs=20, temperature=1.0, seed=1),
        SamplingParams(max_tokens=6, logprobs=7, presence_penalty=1.5),
    ]
    prompts = [PROMPT[: 4 + 4 * i] for i in range(5)]
    streams = [stepper.stream(p, 6, s) for p, s in zip(prompts, wanted, strict=True)]
    while live := [s for s in streams if len(s.output) < 6]:
        live.sort(key=lambda s: len(s.known) - s.computed > 1)
        stepper.step([(s, 3) for s in live])
    for stream, prompt in zip(streams, prompts, strict=True):
        logits = hf_reference.logits(model, stream.known[:-1])
        asked = stream.sampling
        if asked.logprobs is not None:
            assert_equal(stream.logprobs, logits[len(prompt) - 1 :], stream.output, asked.logprobs)
        if asked.prompt_logprobs is not None:
            assert_equal(stream.prompt_logprobs, logits[: len(prompt) - 1], prompt[1:], asked.prompt_logprobs)
    assert streams[0].logprobs == streams[2].logprobs == streams[0].prompt_logprobs == []


@both
def test_equal_logits_rank_by_id(sampler: Sampler) -> None:
    logits = torch.zeros(3, 100)
    logits[:, [20, 70]] = 1.0
    reports = sampler.score(logits, [70, 0, 99], 1, 4)
    assert [r.rank for r in reports] == [2, 3, 100]
    assert all([t for t, _ in r.top] == [20, 70, 0, 1] for r in reports)


@both
def test_more_than_there_is_reports_all(sampler: Sampler) -> None:
    (report,) = sampler.score(torch.tensor([[0.0, 2.0, 1.0]]), [1], 1, 20)
    assert [t for t, _ in report.top] == [1, 2, 0]
    assert sum(torch.tensor([p for _, p in report.top]).exp()) == pytest.approx(1.0)


@both
def test_a_score_without_numbers_is_an_error(sampler: Sampler) -> None:
    logits = torch.zeros(3, 40)
    logits[1, 39] = float("nan")
    with pytest.raises(InternalError, match="the logits at position 6 hold NaN"):
        sampler.score(logits, [1, 2, 3], 5, 0)


def test_scores_that_are_no_numbers_fail_their_sequence_alone() -> None:
    stepper = Stepper(tiny_model("llama"))
    stepper.worker._model._embedding[9] = float("nan")
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=1)
    streams = [stepper.stream(prompt, 1, sampling) for prompt in ([5, 6, 7], [5, 6, 9, 7], [5, 6])]
    result = stepper.worker.execute(StepPlan(1, tuple(s.part(9) for s in streams)))
    ((index, message),) = [(f.index, f.message) for f in result.failures]
    assert index == 1
    assert re.fullmatch("the logits at position [1-4] hold NaN", message)
    assert [len(reports) for reports in result.prompt_logprobs] == [2, 0, 1]
    assert [token >= 0 for token in result.sampled] == [True, False, True]


@pytest.mark.parametrize(
    ("scored", "start"), [((0, 2), 0), ((1, 6), 0), ((1, 3), 1), ((2, 6), 1), ((4, 7), 2)], ids=str
)
def test_a_plan_that_scores_what_it_does_not_compute_is_refused(scored: tuple[int, int], start: int) -> None:
    stepper = Stepper(tiny_model("llama"))
    sequence = ScheduledSequence(
        SessionId(1), PROMPT[start : start + 3], start, ([1],), False, SamplingParams(max_tokens=1, prompt_logprobs=0),
        known=PROMPT, prompt_len=5, scored=scored,
    )  # fmt: skip
    with pytest.raises(InternalError, match="which its chunk does not reach"):
        stepper.worker.execute(StepPlan(1, (sequence,)))
