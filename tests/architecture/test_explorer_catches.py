"""Breaking a rule in a copy of the core makes the explorer fail: it would notice if the rule got lost."""

from __future__ import annotations

import re
from typing import Any

import pytest

from engine_core.engine import EngineCore
from engine_core.lifecycle.decode_request import DecodeState
from engine_core.lifecycle.prefill_request import PrefillState
from engine_core.lifecycle.transfer_session import TransferState
from engine_core.scheduler.decode import DecodeDisaggScheduler
from engine_core.scheduler.decode_session import DecodeSession
from engine_core.scheduler.messages import LegDelivered, LegToken, Started
from engine_core.scheduler.prefill import PrefillDisaggScheduler, PrefillSession
from engine_core.scheduler.step import ScheduledSequence
from engine_core.transfer.base import AbortReceived, SendQuiet
from engine_core.types.request import Role
from tests.support.explorer import Failure, run_seed

SEEDS = 4_000


class ReleasesOnEnd(DecodeDisaggScheduler):
    """Blocks go back when the stream ends, without a proof of quiet."""

    def _retire(self, session: DecodeSession, now: float, reason: str) -> None:
        super()._retire(session, now, reason)
        self._quiet(session, now, "assumed")


class ReleasesOnTimeout(DecodeDisaggScheduler):
    """Blocks leave quarantine after a while."""

    def tick(self, now: float) -> None:
        for session in list(self._sessions.values()):
            if session.transfer.state is TransferState.ABORTING and now > session.transfer.since + 3:
                self._quiet(session, now, "waited long enough")
        super().tick(now)


class DecodesBeforeDelivered(DecodeDisaggScheduler):
    """Token 1 is taken for the arrival of the KV."""

    def _leg_token(self, session: DecodeSession, frame: LegToken, now: float) -> None:
        super()._leg_token(session, frame, now)
        if session.request.state is DecodeState.AWAITING_KV:
            self._whole(session, now)

    def _leg_delivered(self, session: DecodeSession, frame: LegDelivered, now: float) -> None:
        if session.request.state is DecodeState.AWAITING_KV:
            super()._leg_delivered(session, frame, now)


class IndexesBeforeDelivered(DecodeDisaggScheduler):
    """Blocks enter the prefix index when they are granted."""

    def _send_ticket(self, session: DecodeSession, cached: int, now: float) -> None:
        super()._send_ticket(session, cached, now)
        self._c.kv.commit(session.id, session.sequence.tokens, len(session.sequence.tokens))


class TrustsTheSender(DecodeDisaggScheduler):
    """DELIVERED is believed whatever its counts say."""

    def _leg_delivered(self, session: DecodeSession, frame: LegDelivered, now: float) -> None:
        if session.plan is not None:
            session.plan = frame.shards[0]
        super()._leg_delivered(session, frame, now)


class PreemptsWhatAwaitsKv(DecodeDisaggScheduler):
    """A session whose blocks are being written gives them to another."""

    def _grow(self, now: float) -> None:
        for session in self._in_state(DecodeState.READY, DecodeState.DECODING):
            if not self._c.kv.grow(session.id, len(session.sequence.tokens)):
                for victim in self._in_state(DecodeState.AWAITING_KV):
                    self._c.kv.release(victim.id)
                    self._c.kv.acquire(victim.id, (1,), 1, "")
        super()._grow(now)


class AllocatesChunkByChunk(PrefillDisaggScheduler):
    """A prompt's blocks are taken as its chunks go."""

    def _reserve(self, session: PrefillSession, now: float) -> bool:
        sequence = session.sequence
        acquired = self._c.kv.acquire(session.id, sequence.tokens, 1, sequence.spec.cache_salt)
        if acquired is None:
            return False
        sequence.computed = acquired.cached_tokens
        session.request.advance(PrefillState.COMPUTING, now)
        if not session.started:
            session.started = True
            self._c.out.frame(Started(session.id, acquired.cached_tokens))
        return True

    can_go_on = False

    def has_work(self) -> bool:
        return self.can_go_on

    def schedule(self, now: float) -> list[ScheduledSequence]:
        parts, budget = [], self._c.config.max_batch_tokens
        for session in self._sessions.values():
            if session.request.state is PrefillState.COMPUTING:
                chunk = min(budget, session.sequence.missing, self._c.block_size)
                if chunk and self._c.kv.grow(session.id, session.sequence.computed + chunk):
                    budget -= chunk
                    blocks = self._c.kv.block_ids(session.id)
                    parts.append(session.sequence.schedule(chunk, blocks, self._c.eos_token_ids))
        self.can_go_on = bool(parts)
        return parts


class ScoresAnew(PrefillDisaggScheduler):
    """A prompt that is set back reports its log probabilities from the beginning."""

    def _set_back(self, victim: PrefillSession, winner: PrefillSession, now: float) -> None:
        super()._set_back(victim, winner, now)
        victim.sequence.scored_to = 1


class ScoresWhatPrefillHas(DecodeDisaggScheduler):
    """A preempted session reports its prompt's log probabilities, which its leg has brought already."""

    def _preempt(self, victim: DecodeSession, winner: DecodeSession, now: float) -> None:
        super()._preempt(victim, winner, now)
        victim.sequence.scored_to = 1


class UnpinsOnEnd(PrefillDisaggScheduler):
    """Source blocks go back while a thread may still read them."""

    def _retire(self, session: PrefillSession, now: float, reason: str) -> None:
        super()._retire(session, now, reason)
        if session.transfer.state is TransferState.ABORTING:
            session.in_flight.clear()
            self._quiet(session, now, "assumed")


class AnswersQuietAtOnce(PrefillDisaggScheduler):
    """QUIET is the answer to an Abort even while a push runs."""

    def _abort(self, event: AbortReceived, now: float) -> None:
        self._c.out.command(SendQuiet(event.link_id, event.session))
        super()._abort(event, now)


class LosesTheEnd(DecodeDisaggScheduler):
    """A session that failed is not forgotten when its stream ends."""

    def _forget_if_done(self, session: DecodeSession) -> None:
        if session.request.state is not DecodeState.CANCELLED:
            super()._forget_if_done(session)


def broken(scheduler: type[DecodeDisaggScheduler] | type[PrefillDisaggScheduler]) -> Any:
    """EngineCore with one role's scheduler exchanged."""

    class BrokenCore(EngineCore):
        def __init__(self, role: Role, *args: Any, **kwargs: Any) -> None:
            super().__init__(role, *args, **kwargs)
            if (role is Role.PREFILL) == issubclass(scheduler, PrefillDisaggScheduler):
                self._scheduler = scheduler(self._context)

    return BrokenCore


def first_failure(scheduler: type[Any], says: str) -> Failure | None:
    """The first failure of the kind; a broken rule may also show in others, which come and go with the seeds."""
    for seed in range(SEEDS):
        failure = run_seed(seed, make_core=broken(scheduler))
        if failure is not None and re.search(says, failure.message):
            return failure
    return None


@pytest.mark.parametrize(
    ("scheduler", "says"),
    [
        (ReleasesOnEnd, r"writes block \d+, which it does not hold at the destination"),
        (ReleasesOnTimeout, r"writes block \d+, which it does not hold at the destination"),
        (DecodesBeforeDelivered, r"reads .* right is"),
        (IndexesBeforeDelivered, r"reads .* right is|another session shares|another shares"),
        (TrustsTheSender, r"reads .* right is"),
        (PreemptsWhatAwaitsKv, r"which it does not hold at the destination|reads .* right is"),
        (AllocatesChunkByChunk, r"without a fault"),
        (ScoresAnew, r"prompt positions from 1 on"),
        (ScoresWhatPrefillHas, r"prompt positions from 1 on"),
        (UnpinsOnEnd, r"reads block \d+, which it does not hold at the source"),
        (AnswersQuietAtOnce, r"QUIET of .* while a push runs"),
        (LosesTheEnd, r"a state without an exit"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_broken_rule_is_noticed(scheduler: type[Any], says: str) -> None:
    failure = first_failure(scheduler, says)
    assert failure is not None
    assert f"replay: run_seed({failure.seed}, trace=True)" in str(failure)
    assert run_seed(failure.seed) is None
