"""The machine that every lifecycle file instantiates.

A table maps each state to the states that may follow. `advance` is the only way to move; an illegal
move raises IllegalMoveError and changes nothing; every move is reported to the log with its duration.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

import msgspec

from engine_core.types.errors import InternalError
from engine_core.types.ids import SessionId

S = TypeVar("S", bound=enum.StrEnum)


class Move(msgspec.Struct, frozen=True, array_like=True):
    """One state change. `at` is on the caller's clock, `seconds` the time spent in `source`."""

    machine: str
    session: SessionId
    source: str
    target: str
    reason: str
    at: float
    seconds: float


MoveLog = Callable[[Move], None]


class IllegalMoveError(InternalError):
    """A move that the table does not allow."""

    reason = "ILLEGAL_MOVE"


class Machine(Generic[S]):
    """One session's state under a transition table."""

    __slots__ = ("_log", "_name", "_session", "_since", "_state", "_table")

    def __init__(
        self, name: str, table: Mapping[S, frozenset[S]], start: S, session: SessionId, log: MoveLog, now: float
    ) -> None:
        self._name, self._table, self._state = name, table, start
        self._session, self._log, self._since = session, log, now

    @property
    def state(self) -> S:
        """The state now."""
        return self._state

    @property
    def label(self) -> str:
        """The machine's name and its state, with a dot between."""
        return f"{self._name}.{self._state}"

    @property
    def since(self) -> float:
        """When the state was entered."""
        return self._since

    @property
    def final(self) -> bool:
        """True when no state can follow."""
        return not self._table[self._state]

    def advance(self, target: S, now: float, reason: str = "") -> None:
        """Moves to `target`. Raises IllegalMoveError, and stays, when the table forbids it."""
        if target not in self._table[self._state]:
            raise IllegalMoveError(f"{self._name} {self._session}: {self._state} -> {target} is not a legal move")
        move = Move(self._name, self._session, self._state.value, target.value, reason, now, now - self._since)
        self._state, self._since = target, now
        self._log(move)


def moves(**rows: str) -> dict[str, tuple[str, ...]]:
    """Reads a table written as STATE="NEXT NEXT"."""
    return {state: tuple(nexts.split()) for state, nexts in rows.items()}


def table(states: type[S], rows: Mapping[str, tuple[str, ...]]) -> dict[S, frozenset[S]]:
    """Builds a full table; a state without a row is final. Raises KeyError on unknown names."""
    unknown = set(rows) - set(states.__members__)
    if unknown:
        raise KeyError(f"not states of {states.__name__}: {sorted(unknown)}")
    return {s: frozenset(states[n] for n in rows.get(s.name, ())) for s in states}
