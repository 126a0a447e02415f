"""Masks, bans, biases and penalties: the native sampler against the definition, and the definition by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_core.execution.batch import DrawRow
from engine_core.execution.native_sampler import NativeSampler
from engine_core.execution.sampler import Drawn, Mask, ReferenceSampler, Sampler
from engine_core.execution.token_counts import IDLE_STEPS
from engine_core.platforms.cpu.kernels import Kernels
from engine_core.types.errors import InternalError
from engine_core.types.ids import SessionId
from engine_core.types.sampling import SamplingParams

SAMPLERS = [ReferenceSampler(), NativeSampler(Kernels())]
both = pytest.mark.parametrize("sampler", SAMPLERS, ids=["reference", "native"])
NATIVE = NativeSampler(Kernels())
"""One for all examples: what it keeps between steps must not show."""


def row(
    known: tuple[int, ...] | list[int] = (1, 2), prompt_len: int = 1, *, session: int = 1, **params: Any
) -> DrawRow:
    banned = params.pop("banned", ())
    return DrawRow(SamplingParams(max_tokens=99, **params), len(known), banned, SessionId(session), known, prompt_len)


def mask_of(vocab: int, allowed: set[int]) -> Mask:
    words = np.zeros(-(-vocab // 32), np.uint32)
    for token in allowed:
        words[token // 32] |= np.uint32(1 << token % 32)
    return words


def assert_same(got: Drawn, expected: Drawn) -> None:
    assert (got.tokens, got.problems) == (expected.tokens, expected.problems)
    for mine, theirs in zip(got.logprobs, expected.logprobs, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            assert (mine.token_id, mine.rank) == (theirs.token_id, theirs.rank)
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-5)
            assert [t for t, _ in mine.top] == [t for t, _ in theirs.top]
            assert [p for _, p in mine.top] == pytest.approx([p for _, p in theirs.top], abs=1e-5)


def one_of(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


PARAMS = st.fixed_dictionaries(
    {
        "temperature": one_of(0.0, 0.3, 1.0, 2.5),
        "top_p": one_of(1.0, 0.9, 0.3),
        "top_k": one_of(0, 1, 5, 1000),
        "min_p": one_of(0.0, 0.05, 0.5),
        "seed": st.integers(0, 2**63 - 1),
        "frequency_penalty": one_of(0.0, 0.37, -1.5, 2.0),
        "presence_penalty": one_of(0.0, 0.61, -0.9, 2.0),
        "repetition_penalty": one_of(1.0, 1.17, 0.8, 3.0),
        "logprobs": one_of(None, 0, 1, 5, 20),
    }
)
ROWS = st.tuples(PARAMS, one_of("", "bias", "ban", "bias ban"), one_of("", "mask", "narrow mask"), st.integers(0, 3))


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, list[DrawRow], dict[int, Mask]]:
    """Logits, rows and masks; tokens come out of numpy's generator, which is much faster than hypothesis."""
    vocab, chance = draw(one_of(3, 16, 37, 64, 325)), np.random.default_rng(draw(st.integers(0, 9999)))

    def tokens(most: int) -> list[int]:
        return [int(t) for t in chance.integers(0, vocab, chance.integers(1, most))]

    rows, masks = [], {}
    for i, (params, changes, mask, session) in enumerate(draw(st.lists(ROWS, min_size=1, max_size=6))):
        known = tokens(40)
        if "bias" in changes:
            biases = {t: float(chance.choice([-100.0, -0.7, 1.3, 100.0])) for t in tokens(20)}
            params = {**params, "logit_bias": tuple(biases.items())}
        banned = (-1, vocab, *tokens(2 * vocab)) if "ban" in changes else ()
        rows.append(row(known, int(chance.integers(1, len(known) + 1)), session=session, banned=banned, **params))
        if mask:
            masks[i] = mask_of(vocab, set(tokens(4 if "narrow" in mask else 2 * vocab)))
    logits = torch.from_numpy(chance.normal(0, 3, (len(rows), vocab)).astype(np.float32))
    return logits.round() if draw(st.booleans()) else logits, rows, masks  # with equal ones, and without


@settings(max_examples=120, deadline=None)
@given(batches())
def test_native_draws_what_the_definition_draws(batch: tuple[torch.Tensor, list[DrawRow], dict[int, Mask]]) -> None:
    logits, rows, masks = batch
    assert_same(NATIVE.sample(logits.clone(), rows, masks), ReferenceSampler().sample(logits.clone(), rows, masks))


def by_hand(sampler: Sampler, logits: list[float], drawn: DrawRow, masks: Mapping[int, Mask] | None = None) -> int:
    result = sampler.sample(torch.tensor([logits]), [drawn], masks or {})
    assert result.problems == {}
    return result.tokens[0]


@both
def test_penalties_by_hand(sampler: Sampler) -> None:
    # Token 0 stands in the prompt, 1 twice in the output, 2 nowhere.
    known = (0, 1, 1)
    for params, logits, best in (
        ({"frequency_penalty": 0.5}, [0.0, 0.9, 0.0], 0),  # 0.9 - 2 * 0.5 < 0
        ({"frequency_penalty": 0.5}, [0.0, 1.1, 0.0], 1),
        ({"presence_penalty": 0.5}, [0.0, 0.6, 0.0], 1),  # once, not twice
        ({"presence_penalty": 0.5}, [0.0, 0.4, 0.0], 0),  # the prompt does not count
        ({"frequency_penalty": -1.0}, [0.0, -1.5, 0.0], 1),
        ({"repetition_penalty": 2.0}, [1.0, 0.5, 0.6], 2),  # the prompt counts: 1.0 / 2
        ({"repetition_penalty": 2.0}, [-1.0, -1.5, -1.9], 2),  # -1 * 2, -1.5 * 2
        ({"repetition_penalty": 2.0, "presence_penalty": 0.4}, [0.0, 1.0, 0.05], 1),  # 1 / 2 - 0.4, not (1 - 0.4) / 2
        ({"repetition_penalty": 2.0, "logit_bias": ((1, 1.0),)}, [0.9, 1.0, 0.9], 1),  # (1 + 1) / 2, not 1 / 2 + 1
        ({"repetition_penalty": 2.0, "logit_bias": ((1, 1.0),)}, [0.9, 1.0, 1.2], 2),
    ):
        assert by_hand(sampler, logits, row(known, 1, **params)) == best, (params, logits)


@both
def test_a_bias_bans_and_forces(sampler: Sampler) -> None:
    logits = [0.0, 3.0, 0.0, 1.0]
    assert by_hand(sampler, logits, row(logit_bias=((1, -100.0),))) == 3
    assert by_hand(sampler, logits, row(logit_bias=((2, 100.0),))) == 2
    assert by_hand(sampler, logits, row(logit_bias=((2, 100.0),), banned=(2,))) == 1
    assert by_hand(sampler, logits, row(logit_bias=((2, 100.0),)), {0: mask_of(4, {0, 1})}) == 1
    for seed in range(20):
        assert by_hand(sampler, logits, row(temperature=1.0, seed=seed, logit_bias=((2, 100.0),))) == 2


@both
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mask_holds_where_a_ban_leaves_nothing(sampler: Sampler, temperature: float) -> None:
    logits = torch.zeros(4, 70)
    logits[:, 5] = 4.0
    rows = [row(banned=banned, temperature=temperature) for banned in ((69,), (69, 5), (), tuple(range(70)))]
    masks = {0: mask_of(70, {69}), 1: mask_of(70, {69, 33}), 2: mask_of(70, set())}
    drawn = sampler.sample(logits, rows, masks)
    assert drawn.tokens == [69, 33, -1, -1]
    assert drawn.problems == {i: "no token may be drawn at position 2" for i in (2, 3)}


@both
def test_numbers_that_are_none_are_found_behind_a_mask(sampler: Sampler) -> None:
    logits = torch.zeros(2, 70)
    logits[0, 40] = logits[1, 69] = float("nan")
    drawn = sampler.sample(logits, [row(), row()], {0: mask_of(70, {3}), 1: mask_of(70, {3})})
    assert drawn.problems == {i: "the logits at position 2 hold NaN" for i in (0, 1)}


@both
def test_a_mask_of_another_vocabulary_is_refused(sampler: Sampler) -> None:
    with pytest.raises(InternalError, match="a mask has shape"):
        sampler.sample(torch.zeros(1, 70), [row()], {0: mask_of(32, {1})})


@both
@pytest.mark.parametrize(
    ("known", "position", "prompt_len", "message"),
    [
        ((1, 2), 3, 1, "knows 2 tokens"),
        ((1, 2), 2, 3, "3 of the prompt"),
        ((1, 70), 2, 1, "outside the vocabulary of 70"),
        ((-1, 7), 2, 1, "outside the vocabulary of 70"),
    ],
)
def test_penalties_need_every_token_before(
    sampler: Sampler, known: tuple[int, ...], position: int, prompt_len: int, message: str
) -> None:
    params = SamplingParams(max_tokens=1, repetition_penalty=1.1)
    with pytest.raises(InternalError, match=message):
        sampler.sample(torch.zeros(1, 70), [DrawRow(params, position, (), SessionId(9), known, prompt_len)])


PENALTIES = {"frequency_penalty": 0.4, "presence_penalty": 0.3, "repetition_penalty": 1.2}


def test_counts_follow_sessions_through_many_steps() -> None:
    """Sessions come, go, pause, are given other lists and reuse ids; every step equals the definition's."""
    generator, vocab = torch.Generator().manual_seed(5), 50
    native, reference = NativeSampler(Kernels()), ReferenceSampler()
    chance = np.random.default_rng(1)
    params = [SamplingParams(max_tokens=1, temperature=1.0, seed=i, logprobs=2, **PENALTIES) for i in range(8)]
    params[3] = SamplingParams(max_tokens=1, frequency_penalty=1.0)
    params[4] = SamplingParams(max_tokens=1, temperature=0.5)
    known = {i: [int(t) for t in chance.integers(0, vocab, 5 + i)] for i in range(8)}
    for step in range(100):
        running = [i for i in range(8) if (step // 10 + i) % 3]
        if step % 17 == 3:
            known[running[0]] = list(known[running[0]])  # resumed elsewhere: equal tokens in another list
        if step % 31 == 7:
            known[running[1]] = [int(t) for t in chance.integers(0, vocab, 5)]  # the id of another session
        if step % 5 == 2:
            known[running[2]] += [7, 8]  # moved on without a draw here
        draws = [DrawRow(params[i], len(known[i]), (), SessionId(i), known[i], 5) for i in running]
        logits = torch.randn(len(draws), vocab, generator=generator)
        got = native.sample(logits.clone(), draws)
        assert_same(got, reference.sample(logits.clone(), draws))
        for i, token in zip(running, got.tokens, strict=True):
            known[i].append(token)


def test_two_rows_may_share_a_session_id() -> None:
    draws = [row([1, 2, 2], 1, **PENALTIES), row([3, 4, 4, 4], 1, **PENALTIES), row([1, 2, 2], 1, **PENALTIES)]
    logits = torch.zeros(3, 9)
    logits[:, 2] = logits[:, 4] = 1.0
    for _ in range(3):
        assert NATIVE.sample(logits.clone(), draws).tokens == [4, 2, 4]


def test_a_session_that_draws_no_more_is_forgotten() -> None:
    native = NativeSampler(Kernels())
    for session in range(300):
        native.sample(torch.zeros(1, 9), [row([1, 2], 1, session=session, **PENALTIES)])
        assert len(native.counts) <= 2 * IDLE_STEPS
    for _ in range(2 * IDLE_STEPS):
        native.sample(torch.zeros(1, 9), [row()])
    assert len(native.counts) == 0


def test_a_list_that_shrinks_is_counted_anew() -> None:
    native, known = NativeSampler(Kernels()), [1, 2, 2, 2]
    logits = torch.zeros(1, 9)
    logits[0, 2] = 1.0
    assert native.sample(logits.clone(), [row(known, 1, presence_penalty=1.5)]).tokens == [0]
    del known[1:]
    assert native.sample(logits.clone(), [row(known, 1, presence_penalty=1.5)]).tokens == [2]


@both
def test_the_order_of_a_batch_may_change_while_its_parameters_stay(sampler: Sampler) -> None:
    first = row(logit_bias=((1, 5.0),), session=1)
    second = row(logit_bias=((2, 5.0),), session=2)
    third = row(logit_bias=((3, 5.0),), session=3)
    for order in ((first, second), (second, first), (second,), (third, second, first), (first,), (first, third)):
        wanted = [drawn.params.logit_bias[0][0] for drawn in order]
        assert sampler.sample(torch.zeros(len(order), 9), order).tokens == wanted


def test_rows_may_share_their_parameters() -> None:
    """What the rows point to stays in memory, whatever else takes memory meanwhile."""
    params = SamplingParams(max_tokens=9, logit_bias=tuple((t, float(t % 7)) for t in range(300)), **PENALTIES)
    native, known = NativeSampler(Kernels()), [[i, i + 1] for i in range(16)]
    for _ in range(5):
        draws = [DrawRow(params, len(k), (), SessionId(i), k, 1) for i, k in enumerate(known)]
        logits = torch.randn(16, 325, generator=torch.Generator().manual_seed(1))
        got = native.sample(logits.clone(), draws)
        assert_same(got, ReferenceSampler().sample(logits, draws))
        for k, token in zip(known, got.tokens, strict=True):
            k.append(token)
        taken = [np.full(300, 1e9) for _ in range(50)]
        assert len(taken) == 50
