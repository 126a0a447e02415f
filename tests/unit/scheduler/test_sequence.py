"""What is refused before any work, because a step could only end the engine with it."""

from __future__ import annotations

import pytest

from engine_core.scheduler.context import SchedulerContext
from engine_core.scheduler.sequence import new_sequence
from engine_core.types.errors import InvalidRequestError
from engine_core.types.request import GenerateSpec, Role
from engine_core.types.sampling import SamplingParams
from tests.support.builders import layout, scheduler, spec
from tests.support.cores import EOS, DrivenCore


def refused(asked: GenerateSpec, vocab_size: int = 8) -> tuple[str, str]:
    """The field that is blamed, and why."""
    core = DrivenCore(Role.MIXED)
    context = SchedulerContext(
        Role.MIXED, scheduler(2), core.kv, layout(5, 2), frozenset({EOS}), 64, vocab_size=vocab_size
    )
    with pytest.raises(InvalidRequestError) as caught:
        new_sequence(asked, context)
    return caught.value.field, caught.value.message


def test_tokens_outside_the_vocabulary() -> None:
    assert refused(spec((1, 8))) == ("prompt_token_ids", "token 8 is outside the vocabulary of 8")
    assert refused(spec((1, 7), emitted=(9,)))[0] == "emitted_token_ids"


def test_stop_tokens_that_leave_nothing_to_draw() -> None:
    every = SamplingParams(max_tokens=2, min_tokens=1, stop_token_ids=tuple(range(8)))
    assert refused(spec((1, 2), params=every))[0] == "stop_token_ids"
    eos_is_one = SamplingParams(max_tokens=2, min_tokens=1, stop_token_ids=tuple(range(EOS)))
    assert refused(spec((1, 2), params=eos_is_one), EOS + 1)[0] == "stop_token_ids"


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=2, stop_token_ids=tuple(range(8))),
        SamplingParams(max_tokens=2, min_tokens=1, stop_token_ids=tuple(range(7))),
        SamplingParams(max_tokens=2, min_tokens=1, stop_token_ids=tuple(range(1, 20))),
    ],
)
def test_stop_tokens_that_leave_something(params: SamplingParams) -> None:
    core = DrivenCore(Role.MIXED)
    context = SchedulerContext(Role.MIXED, scheduler(2), core.kv, layout(5, 2), frozenset({EOS}), 64, vocab_size=8)
    assert new_sequence(spec((1, 7), params=params), context).limit == 2


def test_biases_outside_the_vocabulary() -> None:
    biased = SamplingParams(max_tokens=2, logit_bias=((0, 1.0), (8, -1.0)))
    assert refused(spec((1, 2), params=biased)) == (
        "logit_bias",
        "logit_bias holds token 8, which is outside the vocabulary of 8",
    )
