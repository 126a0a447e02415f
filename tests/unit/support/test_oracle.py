"""The oracle itself: it must say no to what is wrong, and yes to what only rounding explains."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from engine_core.execution.batch import DrawRow
from engine_core.execution.logprobs import logprobs_of
from engine_core.execution.sampler import draw
from engine_core.types.request import FinishReason
from engine_core.types.sampling import SamplingParams, TokenLogprobs
from tests.support.models import tiny_model
from tests.support.oracle import Claim, Oracle

PROMPT = (5, 17, 40, 3, 99, 200)
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(tiny_model("llama"))


def sampled(prompt: tuple[int, ...], params: SamplingParams) -> tuple[int, ...]:
    """Draws from transformers' logits, one token at a time."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model("llama"), dtype=torch.float32)
    tokens = list(prompt)
    for _ in range(params.max_tokens):
        with torch.inference_mode():
            row = model(torch.tensor([tokens])).logits[0, -1].float().numpy()
        drawn = DrawRow(params, len(tokens), known=tuple(tokens), prompt_len=len(prompt))
        tokens.append(draw(row, drawn))
    return tuple(tokens[len(prompt) :])


def test_greedy_output_is_exact(oracle: Oracle) -> None:
    output = oracle.greedy(PROMPT, 12, ignore_eos=True)
    (verdict,) = oracle.assert_right([Claim(PROMPT, output, GREEDY)])
    assert len(output) == 12
    assert verdict.exact
    assert verdict.margin > 2e-3
    assert max(verdict.gaps) == 0.0


@pytest.mark.parametrize("index", (0, 5, 11))
def test_one_wrong_token_is_found(oracle: Oracle, index: int) -> None:
    output = list(oracle.greedy(PROMPT, 12, ignore_eos=True))
    output[index] = (output[index] + 1) % 200
    (verdict,) = oracle.verify([Claim(PROMPT, tuple(output), GREEDY)])
    assert not verdict.right
    assert verdict.wrong == index
    with pytest.raises(AssertionError, match=f"token {index} is {output[index]}"):
        oracle.assert_right([Claim(PROMPT, tuple(output), GREEDY)])


def test_a_near_tie_may_go_either_way(oracle: Oracle) -> None:
    claim = Claim(PROMPT, oracle.greedy(PROMPT, 1, ignore_eos=True), GREEDY)
    ((_, rows),) = oracle._logits([claim])
    first, second = (int(t) for t in np.argsort(-rows[0])[:2])
    assert claim.output == (first,)
    gap = float(rows[0][first] - rows[0][second])
    other = Claim(PROMPT, (second,), GREEDY)
    (near,) = oracle.verify([other], tolerance=gap * 1.01)
    assert near.right
    assert not near.exact
    assert near.moved == (0,)
    (far,) = oracle.verify([other], tolerance=gap * 0.99)
    assert far.wrong == 0


def test_batches_of_mixed_lengths_agree_with_single_ones(oracle: Oracle) -> None:
    prompts = [tuple(range(3, 3 + n)) for n in (1, 2, 7, 33, 150)]
    claims = [Claim(p, oracle.greedy(p, 6, ignore_eos=True), GREEDY) for p in prompts]
    together = oracle.assert_right(claims)
    alone = [Oracle(tiny_model("llama")).assert_right([claim])[0] for claim in claims[:3]]
    assert all(v.exact for v in together)
    for one, many in zip(alone, together, strict=False):
        assert one.margin == pytest.approx(many.margin, abs=1e-4)


def test_an_output_is_judged_once(oracle: Oracle) -> None:
    claim = Claim((9, 8, 7), oracle.greedy((9, 8, 7), 4, ignore_eos=True), GREEDY)
    oracle.verify([claim, claim])
    before = oracle.forwards
    assert oracle.verify([claim])[0].exact
    assert oracle.forwards == before


@pytest.mark.parametrize(
    "params",
    (
        SamplingParams(max_tokens=8, temperature=1.0, seed=7, ignore_eos=True),
        SamplingParams(max_tokens=8, temperature=0.7, seed=1, top_k=20, top_p=0.9, ignore_eos=True),
        SamplingParams(max_tokens=8, temperature=1.3, seed=2, min_p=0.02, ignore_eos=True),
        SamplingParams(
            max_tokens=8,
            temperature=3.0,
            seed=3,
            ignore_eos=True,
            frequency_penalty=1.0,
            presence_penalty=0.5,
            repetition_penalty=1.2,
            logit_bias=((7, 9.0), (99, -100.0)),
        ),
    ),
)
def test_sampled_draws_replay(oracle: Oracle, params: SamplingParams) -> None:
    output = sampled(PROMPT, params)
    (verdict,) = oracle.assert_right([Claim(PROMPT, output, params)])
    assert verdict.gaps == ()
    wrong = (*output[:3], (output[3] + 1) % 200, *output[4:])
    assert oracle.verify([Claim(PROMPT, wrong, params)])[0].wrong == 3


def test_tokens_that_may_not_be_drawn_yet_are_passed_over(oracle: Oracle) -> None:
    first, *_ = oracle.greedy(PROMPT, 1, ignore_eos=True)
    params = SamplingParams(max_tokens=4, min_tokens=2, stop_token_ids=(first,), ignore_eos=True)
    verdict = oracle.verify([Claim(PROMPT, (first,), params)])[0]
    assert verdict.wrong == 0
    assert verdict.gaps == (float("inf"),)


def test_penalties_and_biases_move_the_best(oracle: Oracle) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True, frequency_penalty=4.0, logit_bias=((33, 12.0),))
    output = sampled(PROMPT, params)
    assert oracle.assert_right([Claim(PROMPT, output, params)])[0].exact
    for other in (
        SamplingParams(max_tokens=12, ignore_eos=True, logit_bias=((33, 12.0),)),
        SamplingParams(max_tokens=12, ignore_eos=True, frequency_penalty=4.0),
    ):
        assert not oracle.verify([Claim(PROMPT, output, other)])[0].right


def test_log_probabilities_are_checked(oracle: Oracle) -> None:
    params = SamplingParams(max_tokens=4, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    output = oracle.greedy(PROMPT, 4, ignore_eos=True)
    with torch.inference_mode():
        rows = oracle._model(torch.tensor([[*PROMPT, *output]])).logits[0].float().numpy()
    before = len(PROMPT) - 1
    of_prompt = tuple(logprobs_of(rows[i], PROMPT[i + 1], 0, 1) for i in range(before))
    of_output = tuple(logprobs_of(rows[before + i], token, 0, 2) for i, token in enumerate(output))
    right = Claim(PROMPT, output, params, of_output, of_prompt)
    assert oracle.assert_right([right])[0].exact
    first, *rest = of_output
    ((best, p), (second, q)) = first.top
    for wrong in (
        TokenLogprobs(first.token_id, first.logprob - 0.01, first.rank, first.top),
        TokenLogprobs(first.token_id, first.logprob, first.rank + 1, first.top),
        TokenLogprobs(first.token_id + 1, first.logprob, first.rank, first.top),
        TokenLogprobs(first.token_id, first.logprob, first.rank, first.top[:1]),
        TokenLogprobs(first.token_id, first.logprob, first.rank, ((best, p), (best, p))),
        TokenLogprobs(first.token_id, first.logprob, first.rank, ((best, p), (second + 1, q))),
        TokenLogprobs(first.token_id, first.logprob, first.rank, ((second, q), (best, p))),
    ):
        assert not oracle.verify([Claim(PROMPT, output, params, (wrong, *rest), of_prompt)])[0].right, wrong
    assert not oracle.verify([Claim(PROMPT, output, params, of_output, of_prompt[1:])])[0].right
    assert not oracle.verify([Claim(PROMPT, output, params, of_output[:3], of_prompt)])[0].right
    off = (TokenLogprobs(PROMPT[1], of_prompt[0].logprob + 0.01, of_prompt[0].rank, of_prompt[0].top), *of_prompt[1:])
    assert not oracle.verify([Claim(PROMPT, output, params, of_output, off)])[0].right


def test_ends(oracle: Oracle) -> None:
    params = SamplingParams(max_tokens=3, stop_token_ids=(7,), min_tokens=1, ignore_eos=True)
    assert oracle.finish(Claim((1,), (4, 7), params)) is FinishReason.STOP
    assert oracle.finish(Claim((1,), (7, 7), params)) is FinishReason.STOP
    assert oracle.finish(Claim((1,), (4, 5, 6), params)) is FinishReason.LENGTH
    assert oracle.finish(Claim((1,), (4, 5), params)) is None
    assert oracle.finish(Claim((1,), (4, 7, 6), params)) is None


def test_a_prompt_is_needed(oracle: Oracle) -> None:
    with pytest.raises(ValueError, match="prompt"):
        oracle.verify([Claim((), (1,), GREEDY)])
