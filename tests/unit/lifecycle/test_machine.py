"""Only legal moves happen, each is logged with its duration, an illegal one changes nothing."""

import pytest

from engine_core.lifecycle.decode_request import DECODE_TABLE, DecodeState, decode_request
from engine_core.lifecycle.machine import IllegalMoveError, Move, moves, table
from engine_core.types.ids import SessionId, mint_incarnation


def test_a_move_is_logged_with_the_time_spent() -> None:
    log: list[Move] = []
    machine = decode_request(SessionId(5, 1), log.append, 10.0)
    machine.advance(DecodeState.QUEUED, 12.5, "hello")
    assert log == [Move("decode_request", SessionId(5, 1), "ADMITTED", "QUEUED", "hello", 12.5, 2.5)]
    assert machine.state is DecodeState.QUEUED
    assert machine.since == 12.5


def test_an_illegal_move_raises_and_changes_nothing() -> None:
    log: list[Move] = []
    machine = decode_request(SessionId(5), log.append, 0.0)
    with pytest.raises(IllegalMoveError, match="ADMITTED -> READY"):
        machine.advance(DecodeState.READY, 1.0)
    assert machine.state is DecodeState.ADMITTED
    assert log == []


def test_final_states_have_no_exit() -> None:
    finals = {s for s, nexts in DECODE_TABLE.items() if not nexts}
    assert finals == {DecodeState.FINISHED, DecodeState.CANCELLED, DecodeState.FAILED}


def test_a_table_with_an_unknown_state_is_refused() -> None:
    with pytest.raises(KeyError, match="NOWHERE"):
        table(DecodeState, moves(NOWHERE="QUEUED"))


def test_incarnations_are_ordered_by_time_and_can_be_minted_above_a_holder() -> None:
    assert mint_incarnation(1000) < mint_incarnation(1001)
    holder = mint_incarnation(5000)
    assert mint_incarnation(1000, above=holder) == holder + 1
    assert mint_incarnation() >> 63 == 0
