"""A request on a prefill engine.

ACCEPTED ─▶ QUEUED ─▶ COMPUTING ─▶ COMPUTED ─▶ PUSHING ─▶ FINISHED
              ▲           │            │ └───────────────────▲
              └─ set back ┴────────────┘   nothing to push

any live state ─▶ CANCELLED | FAILED
"""

from __future__ import annotations

import enum

from engine_core.lifecycle.machine import Machine, MoveLog, moves, table
from engine_core.types.ids import SessionId


class PrefillState(enum.StrEnum):
    """States of a prefill request."""

    ACCEPTED = "ACCEPTED"
    QUEUED = "QUEUED"
    COMPUTING = "COMPUTING"
    COMPUTED = "COMPUTED"
    PUSHING = "PUSHING"
    FINISHED = "FINISHED"
    CANCELLED = "CANCELLED"
    FAILED = "FAILED"


PREFILL_TABLE = table(
    PrefillState,
    moves(
        ACCEPTED="QUEUED CANCELLED FAILED",
        QUEUED="COMPUTING CANCELLED FAILED",
        COMPUTING="COMPUTED QUEUED CANCELLED FAILED",
        COMPUTED="PUSHING QUEUED FINISHED CANCELLED FAILED",
        PUSHING="FINISHED CANCELLED FAILED",
    ),
)


def prefill_request(session: SessionId, log: MoveLog, now: float) -> Machine[PrefillState]:
    """A new request in ACCEPTED."""
    return Machine("prefill_request", PREFILL_TABLE, PrefillState.ACCEPTED, session, log, now)
