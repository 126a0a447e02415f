"""What a decode or mixed engine keeps of one session; decode.py tells its life."""

from __future__ import annotations

from dataclasses import dataclass

from engine_core.lifecycle.decode_request import DecodeState
from engine_core.lifecycle.machine import Machine
from engine_core.lifecycle.transfer_session import TransferState
from engine_core.scheduler.sequence import Sequence
from engine_core.types.ids import SessionId
from engine_core.types.kv import ShardCount
from engine_core.types.request import StageTimings


@dataclass(slots=True)
class DecodeSession:
    """One session on a decode or mixed engine."""

    sequence: Sequence
    request: Machine[DecodeState]
    transfer: Machine[TransferState]
    remote: bool
    link_id: int
    without_transfer: bool
    opened_at: float
    started: bool = False
    token_at: float | None = None
    transport: str = ""
    first_block: int = 0
    plan: ShardCount | None = None
    delivered: ShardCount | None = None
    cached_tokens: int = 0
    prefill_timings: StageTimings = StageTimings()
    computing_at: float = 0.0
    leg_at: float = 0.0
    awaiting_at: float = 0.0
    delivered_at: float = 0.0
    decoding_at: float = 0.0
    ended: bool = False

    @property
    def id(self) -> SessionId:
        """The session's id."""
        return self.sequence.spec.session

    @property
    def age(self) -> tuple[int, SessionId]:
        """Order of every queue: arrival at the router, ties by id."""
        return (self.sequence.spec.arrival_ms, self.id)
