"""A row of the rank table.

    JOINING ─▶ READY ─▶ DRAINING ─▶ LEFT
                 │ ▲        │
           lapse ▼ │ lease  ▼
                LOST ─────▶ LEFT

A lease governs placement, never sessions: a lapse ends none.
"""

from __future__ import annotations

import enum

from engine_core.lifecycle.machine import Machine, MoveLog, moves, table
from engine_core.types.ids import SessionId


class MembershipState(enum.StrEnum):
    """States of a row."""

    JOINING = "JOINING"
    READY = "READY"
    DRAINING = "DRAINING"
    LEFT = "LEFT"
    LOST = "LOST"


MEMBERSHIP_TABLE = table(
    MembershipState,
    moves(
        JOINING="READY DRAINING LOST LEFT",
        READY="JOINING DRAINING LOST LEFT",
        DRAINING="LOST LEFT",
        LOST="JOINING READY DRAINING LEFT",
    ),
)


def membership(session: SessionId, log: MoveLog, now: float) -> Machine[MembershipState]:
    """A new row in JOINING."""
    return Machine("membership", MEMBERSHIP_TABLE, MembershipState.JOINING, session, log, now)
