"""What a decode or mixed engine keeps of one session; decode.py tells its life."""

from __future__ import annotations

from dataclasses import dataclass

from engine_core.config import SchedulerConfig
from engine_core.lifecycle.decode_request import DecodeState
from engine_core.lifecycle.machine import Machine
from engine_core.lifecycle.transfer_session import TransferState
from engine_core.scheduler.sequence import Sequence
from engine_core.types.ids import SessionId
from engine_core.types.kv import ShardCount
from engine_core.types.request import Finish, FinishReason, StageTimings


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
        """Order of every queue: arrival at the router, as the priority has moved it; ties by id."""
        return (self.sequence.spec.arrival_ms, self.id)

    def wait_ends(self, config: SchedulerConfig) -> float:
        """When the present wait ends in an error."""
        deadline = self.sequence.spec.deadline
        match self.request.state:
            case DecodeState.QUEUED | DecodeState.AWAITING_START:
                return min(deadline, self.opened_at + config.queue_timeout)
            case DecodeState.AWAITING_KV if self.token_at is not None:
                return min(deadline, self.token_at + config.kv_progress_timeout)
            case _:
                return deadline

    def finish(self, reason: FinishReason, stop_token: int | None, now: float) -> Finish:
        """The end of the output, with where the time went."""
        started = self.awaiting_at or self.computing_at or self.leg_at
        transferring = self.delivered_at - self.awaiting_at if self.delivered_at else 0.0
        computing = self.decoding_at - self.computing_at if self.computing_at and self.decoding_at else 0.0
        return Finish(
            reason=reason,
            stop_token_id=stop_token,
            cached_tokens=self.cached_tokens,
            path="pd" if self.remote else "local",
            transport=self.transport,
            timings=StageTimings(
                max(0.0, started - self.opened_at) if started else 0.0,
                computing,
                transferring,
                now - self.decoding_at if self.decoding_at else 0.0,
                starting=started - self.leg_at if self.leg_at and started else 0.0,
                first_token=self.token_at - self.awaiting_at if self.token_at and self.awaiting_at else 0.0,
            ),
            prefill_timings=self.prefill_timings,
        )
