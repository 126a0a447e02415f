"""Log probabilities of a sample over its attempts: what is asked, what is taken, what is refused."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine_core.types.errors import InternalError, Leg
from engine_core.types.sampling import TokenLogprobs
from pdmesh.common.v1 import generation_pb2
from services.router.scores import Scores
from services.wire.logprobs import logprobs_to_proto

PROMPT = (5, 6, 7, 8, 9)
VOCAB = 50


def of(token_id: int, best: int = 0, shade: float = 0.0) -> TokenLogprobs:
    return TokenLogprobs(token_id, -1.0 - shade, 1, tuple((t, -2.0) for t in range(best)))


def wire(token_ids: Sequence[int], best: int = 0, shade: float = 0.0) -> list[generation_pb2.PositionLogprobs]:
    return [logprobs_to_proto(of(token, best, shade)) for token in token_ids]


def scores(best: int | None = None, prompt_best: int | None = None, prompt: Sequence[int] = PROMPT) -> Scores:
    return Scores(prompt, best, prompt_best, VOCAB)


def test_nothing_is_asked_and_nothing_may_come() -> None:
    made = scores()
    assert made.begin_attempt() is None
    assert made.read((1, 2), []) == [] and made.show_prompt() == []
    with pytest.raises(InternalError):
        made.take_prompt(1, wire(PROMPT[1:2]))
    with pytest.raises(InternalError):
        made.read((1, 2), wire((1, 2)))


def test_one_per_token_and_what_a_stop_cuts_away_is_not_kept() -> None:
    made = scores(best=2)
    made.begin_attempt()
    found = made.read((11, 12, 13), wire((11, 12, 13), 2))
    made.keep(found[:2])
    assert made.output == [of(11, 2), of(12, 2)]


@pytest.mark.parametrize(
    "positions",
    [
        [],
        wire((11,), 2),
        wire((11, 12, 13), 2),
        wire((11, 13), 2),
        wire((12, 11), 2),
        wire((11, 12), 1),
        wire((11, 12), 3),
        [*wire((11,), 2), generation_pb2.PositionLogprobs()],
    ],
)
def test_those_of_other_tokens_are_refused(positions: list[generation_pb2.PositionLogprobs]) -> None:
    made = scores(best=2)
    made.begin_attempt()
    with pytest.raises(InternalError) as caught:
        made.read((11, 12), positions)
    assert (caught.value.leg, caught.value.reason, caught.value.retryable) == (Leg.DECODE, "LOGPROBS", False)


def test_a_small_vocabulary_has_fewer_best_tokens() -> None:
    made = Scores(PROMPT, 20, None, 12)
    made.begin_attempt()
    assert len(made.read((3,), wire((3,), 12))[0].top) == 12
    with pytest.raises(InternalError):
        made.read((3,), wire((3,), 11))


def test_the_prompts_are_shown_once_with_the_first_token() -> None:
    made = scores(prompt_best=1)
    assert made.begin_attempt() == 1
    made.take_prompt(1, wire(PROMPT[1:3], 1))
    with pytest.raises(InternalError, match=r"\[3, 5\)"):
        made.read((11,), [])
    made.take_prompt(3, wire(PROMPT[3:], 1))
    assert made.read((11,), []) == []
    assert made.show_prompt() == [of(token, 1) for token in PROMPT[1:]]
    assert made.show_prompt() == []
    assert made.begin_attempt() is None, "a resumed attempt does not ask again"
    assert made.read((12,), []) == []


@pytest.mark.parametrize("come", range(1, len(PROMPT)))
def test_each_position_once_over_all_attempts(come: int) -> None:
    """Attempt 0 brought some; of attempt 1, which computes all anew, only the others count."""
    made = scores(best=0, prompt_best=0)
    assert made.begin_attempt() == 0
    made.take_prompt(1, wire(PROMPT[1 : 1 + come]))
    again = made.begin_attempt()
    assert again == (0 if come < 4 else None)
    if again is None:
        with pytest.raises(InternalError):
            made.take_prompt(1, wire(PROMPT[1:2], shade=0.5))
    else:
        for at in range(1, 5):
            made.take_prompt(at, wire(PROMPT[at : at + 1], shade=0.5))
    assert made.prompt == [of(token, shade=0.0 if at <= come else 0.5) for at, token in enumerate(PROMPT) if at]
    made.read((11,), wire((11,)))


@pytest.mark.parametrize(
    ("first", "token_ids"),
    [(0, PROMPT[:1]), (2, PROMPT[2:3]), (1, PROMPT), (1, (6, 8)), (1, (77,)), (-1, PROMPT[1:2])],
)
def test_positions_of_another_prompt_are_refused(first: int, token_ids: tuple[int, ...]) -> None:
    made = scores(prompt_best=0)
    made.begin_attempt()
    with pytest.raises(InternalError):
        made.take_prompt(first, wire(token_ids))


def test_a_prompt_of_one_token_has_none() -> None:
    made = scores(prompt_best=3, prompt=(5,))
    assert made.begin_attempt() is None
    assert made.read((11,), []) == [] and made.show_prompt() == []
