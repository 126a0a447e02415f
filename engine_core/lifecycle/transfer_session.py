"""One session's KV on a link, at either end.

    OPEN ─▶ TICKETED ─▶ PUSHING ─▶ DELIVERED ─▶ RELEASED
      │         │          │           │            ▲
      └─────────┼──────────┼───────────┼────────────┘ (no ticket was given)
                ▼          ▼           ▼
              ABORTING ─────────────▶ QUIET

Only RELEASED and QUIET let blocks go: before them a transport may still write or read.
"""

from __future__ import annotations

import enum

from engine_core.lifecycle.machine import Machine, MoveLog, moves, table
from engine_core.types.ids import SessionId


class TransferState(enum.StrEnum):
    """States of a transfer session."""

    OPEN = "OPEN"
    TICKETED = "TICKETED"
    PUSHING = "PUSHING"
    DELIVERED = "DELIVERED"
    RELEASED = "RELEASED"
    ABORTING = "ABORTING"
    QUIET = "QUIET"


TRANSFER_TABLE = table(
    TransferState,
    moves(
        OPEN="TICKETED RELEASED ABORTING",
        TICKETED="PUSHING DELIVERED ABORTING",
        PUSHING="DELIVERED ABORTING",
        DELIVERED="RELEASED ABORTING",
        ABORTING="QUIET",
    ),
)


def transfer_session(session: SessionId, log: MoveLog, now: float) -> Machine[TransferState]:
    """A new transfer session in OPEN."""
    return Machine("transfer_session", TRANSFER_TABLE, TransferState.OPEN, session, log, now)
