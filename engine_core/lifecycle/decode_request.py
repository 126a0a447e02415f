"""A request on a decode or mixed engine.

ADMITTED ─▶ QUEUED ─▶ AWAITING_START ─▶ AWAITING_KV ─▶ READY ─▶ DECODING ─▶ FINISHED
              │                                          │         │  ▲
              │ local                                    └────┬────┘  │
              └────────────▶ COMPUTING ─────────────────▶─────┼───────┘
                               ▲   │                          ▼
                               │   └──────────────────▶ PREEMPTED
                               └────────────────────────────┘

any live state ─▶ CANCELLED | FAILED | FINISHED (early)
"""

from __future__ import annotations

import enum

from engine_core.lifecycle.machine import Machine, MoveLog, moves, table
from engine_core.types.ids import SessionId


class DecodeState(enum.StrEnum):
    """States of a decode request."""

    ADMITTED = "ADMITTED"
    QUEUED = "QUEUED"
    AWAITING_START = "AWAITING_START"
    AWAITING_KV = "AWAITING_KV"
    READY = "READY"
    COMPUTING = "COMPUTING"
    DECODING = "DECODING"
    PREEMPTED = "PREEMPTED"
    FINISHED = "FINISHED"
    CANCELLED = "CANCELLED"
    FAILED = "FAILED"


DECODE_TABLE = table(
    DecodeState,
    moves(
        ADMITTED="QUEUED FINISHED CANCELLED FAILED",
        QUEUED="AWAITING_START COMPUTING FINISHED CANCELLED FAILED",
        AWAITING_START="AWAITING_KV FINISHED CANCELLED FAILED",
        AWAITING_KV="READY FINISHED CANCELLED FAILED",
        READY="DECODING PREEMPTED FINISHED CANCELLED FAILED",
        COMPUTING="DECODING PREEMPTED FINISHED CANCELLED FAILED",
        DECODING="PREEMPTED FINISHED CANCELLED FAILED",
        PREEMPTED="COMPUTING FINISHED CANCELLED FAILED",
    ),
)


def decode_request(session: SessionId, log: MoveLog, now: float) -> Machine[DecodeState]:
    """A new request in ADMITTED."""
    return Machine("decode_request", DECODE_TABLE, DecodeState.ADMITTED, session, log, now)
