"""Every lifecycle table: all states are reachable, every live state has a way out, the finals are the known ones."""

from __future__ import annotations

import enum
import importlib
import pkgutil
from collections.abc import Mapping

import pytest

import engine_core.lifecycle
from engine_core.lifecycle.decode_request import DECODE_TABLE, DecodeState
from engine_core.lifecycle.machine import IllegalMoveError, Machine, Move
from engine_core.lifecycle.membership import MEMBERSHIP_TABLE, MembershipState
from engine_core.lifecycle.prefill_request import PREFILL_TABLE, PrefillState
from engine_core.lifecycle.transfer_session import TRANSFER_TABLE, TransferState
from engine_core.types.ids import SessionId

TABLES = {
    "prefill_request": (PREFILL_TABLE, PrefillState.ACCEPTED, {"FINISHED", "CANCELLED", "FAILED"}),
    "decode_request": (DECODE_TABLE, DecodeState.ADMITTED, {"FINISHED", "CANCELLED", "FAILED"}),
    "transfer_session": (TRANSFER_TABLE, TransferState.OPEN, {"RELEASED", "QUIET"}),
    "membership": (MEMBERSHIP_TABLE, MembershipState.JOINING, {"LEFT"}),
}

Table = Mapping[enum.StrEnum, frozenset[enum.StrEnum]]


def reachable(table: Table, start: enum.StrEnum) -> set[enum.StrEnum]:
    seen, todo = {start}, [start]
    while todo:
        for nxt in table[todo.pop()] - seen:
            seen.add(nxt)
            todo.append(nxt)
    return seen


@pytest.fixture(params=sorted(TABLES))
def case(request: pytest.FixtureRequest) -> tuple[str, Table, enum.StrEnum, set[str]]:
    return (request.param, *TABLES[request.param])


def test_every_lifecycle_file_is_looked_at() -> None:
    files = {m.name for m in pkgutil.iter_modules(engine_core.lifecycle.__path__)} - {"machine"}
    assert files == set(TABLES)
    for name in files:
        tables = [k for k in vars(importlib.import_module(f"engine_core.lifecycle.{name}")) if k.endswith("_TABLE")]
        assert len(tables) == 1


def test_every_state_is_in_the_table_and_reachable(case: tuple[str, Table, enum.StrEnum, set[str]]) -> None:
    _, table, start, _ = case
    assert set(table) == set(type(start))
    assert reachable(table, start) == set(type(start))


def test_the_finals_are_the_known_ones(case: tuple[str, Table, enum.StrEnum, set[str]]) -> None:
    _, table, _, finals = case
    assert {s.name for s, nexts in table.items() if not nexts} == finals


def test_every_live_state_can_reach_an_end(case: tuple[str, Table, enum.StrEnum, set[str]]) -> None:
    _, table, _, finals = case
    for state, nexts in table.items():
        if state.name not in finals:
            assert nexts - {state}, f"{state} has no exit"
            assert {s.name for s in reachable(table, state)} & finals


def test_live_requests_can_always_be_cancelled_or_fail() -> None:
    for table in (PREFILL_TABLE, DECODE_TABLE):
        for state, nexts in table.items():
            if nexts:
                assert {"CANCELLED", "FAILED"} <= {n.name for n in nexts}, state


def test_a_decode_request_may_finish_in_any_live_state() -> None:
    assert all(DecodeState.FINISHED in nexts for nexts in DECODE_TABLE.values() if nexts)


def test_blocks_go_only_by_release_or_proof_of_quiet() -> None:
    """No way from a ticket to RELEASED but through DELIVERED, and none out of ABORTING but QUIET."""
    assert TRANSFER_TABLE[TransferState.ABORTING] == {TransferState.QUIET}
    for state in (TransferState.TICKETED, TransferState.PUSHING):
        assert TransferState.RELEASED not in TRANSFER_TABLE[state]
        assert TransferState.QUIET not in TRANSFER_TABLE[state]
    assert all(TransferState.ABORTING in nexts for s, nexts in TRANSFER_TABLE.items() if nexts and s != "ABORTING")


def test_requests_that_await_kv_are_never_preempted() -> None:
    sources = {s for s, nexts in DECODE_TABLE.items() if DecodeState.PREEMPTED in nexts}
    assert sources == {DecodeState.READY, DecodeState.COMPUTING, DecodeState.DECODING}


def test_every_state_not_in_a_row_is_refused_and_changes_nothing(
    case: tuple[str, Table, enum.StrEnum, set[str]],
) -> None:
    name, table, _, _ = case
    for state, nexts in table.items():
        for target in type(state):
            log: list[Move] = []
            machine = Machine(name, table, state, SessionId(7, 1), log.append, 10.0)
            if target in nexts:
                machine.advance(target, 12.5, "why")
                assert log == [Move(name, SessionId(7, 1), state.value, target.value, "why", 10.0 + 2.5, 2.5)]
                assert machine.state is target and machine.since == 12.5
            else:
                with pytest.raises(IllegalMoveError, match="is not a legal move"):
                    machine.advance(target, 12.5)
                assert machine.state is state and log == []
