"""PositionLogprobs <-> TokenLogprobs, and the order in which a prompt's positions come."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_core.types.errors import InternalError, Leg
from engine_core.types.sampling import TokenLogprobs
from pdmesh.common.v1 import generation_pb2
from services.wire.logprobs import LOWEST, PromptPositions, logprobs_from_proto, logprobs_to_proto, pieces

ids = st.integers(0, 2**31 - 1)
logarithms = st.floats(-5000, 0, width=32)
positions = st.builds(
    TokenLogprobs,
    ids,
    logarithms,
    st.integers(1, 2**31 - 1),
    st.lists(st.tuples(ids, logarithms), max_size=20).map(tuple),
)


def through_the_wire(position: TokenLogprobs, most: int = 20) -> TokenLogprobs:
    data = logprobs_to_proto(position).SerializeToString()
    return logprobs_from_proto(generation_pb2.PositionLogprobs.FromString(data), most, Leg.DECODE)


@given(positions)
def test_round_trip(position: TokenLogprobs) -> None:
    assert through_the_wire(position) == position


def test_ranks_of_the_best_are_their_places() -> None:
    message = logprobs_to_proto(TokenLogprobs(7, -3.0, 9, ((4, -0.5), (2, -1.0))))
    assert [(best.token_id, best.rank) for best in message.top] == [(4, 1), (2, 2)]
    assert (message.chosen.token_id, message.chosen.rank) == (7, 9)


def test_what_has_no_probability_has_a_finite_logarithm() -> None:
    position = through_the_wire(TokenLogprobs(7, -math.inf, 300, ((4, 0.0), (2, -math.inf))))
    assert position == TokenLogprobs(7, LOWEST, 300, ((4, 0.0), (2, LOWEST)))
    assert through_the_wire(TokenLogprobs(7, 1e-6, 1)).logprob == 0.0


@pytest.mark.parametrize(
    "position",
    [
        TokenLogprobs(7, math.nan, 1),
        TokenLogprobs(7, math.inf, 1),
        TokenLogprobs(7, 0.5, 1),
        TokenLogprobs(7, -1.0, 0),
        TokenLogprobs(-7, -1.0, 1),
        TokenLogprobs(7, -1.0, 1, ((1, math.nan),)),
        TokenLogprobs(7, -1.0, 1, ((-1, -2.0),)),
        TokenLogprobs(7, -1.0, 1, ((1, -2.0), (2, -3.0), (3, -4.0))),
    ],
)
def test_nonsense_is_the_workers_fault(position: TokenLogprobs) -> None:
    message = logprobs_to_proto(position)
    with pytest.raises(InternalError) as caught:
        logprobs_from_proto(message, 2, Leg.PREFILL)
    assert (caught.value.leg, caught.value.reason) == (Leg.PREFILL, "LOGPROBS")


def test_pieces() -> None:
    all_of_them = [TokenLogprobs(i, -1.0, 1) for i in range(7)]
    assert [(first, [p.token_id for p in part]) for first, part in pieces(1, all_of_them, 3)] == [
        (1, [0, 1, 2]),
        (4, [3, 4, 5]),
        (7, [6]),
    ]
    assert list(pieces(1, [])) == []


def test_positions_come_in_order_and_before_the_first_token() -> None:
    come = PromptPositions(6, Leg.PREFILL, asked=True)
    with pytest.raises(InternalError, match=r"before prompt positions \[1, 6\)"):
        come.tokens_begin()
    come.take(1, 2)
    for first, count in ((1, 1), (2, 2), (4, 1), (3, 4), (3, 0), (0, 3)):
        with pytest.raises(InternalError):
            come.take(first, count)
    assert not come.complete
    come.take(3, 3)
    assert come.complete
    come.tokens_begin()
    with pytest.raises(InternalError):
        come.take(6, 1)


@pytest.mark.parametrize(("prompt", "asked"), [(1, True), (9, False)])
def test_where_none_are_due_none_may_come(prompt: int, asked: bool) -> None:  # noqa: FBT001
    come = PromptPositions(prompt, Leg.DECODE, asked=asked)
    assert come.complete
    come.tokens_begin()
    with pytest.raises(InternalError):
        come.take(1, 1)
