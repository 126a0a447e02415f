"""Scheduling on a decode or mixed engine.

The life of a session:

 1. Open refuses what can never fit, before any work, and queues within bounds.
 2. A remote session asks for its prefill leg (OpenLeg) only while the un-ticketed prompts together fit
    the free and evictable blocks; that is a count, no reservation, and one always may.
 3. Blocks are granted in one queue by age: to sessions that prefill has STARTED, to preempted ones and to
    local prompts alike. A remote grant opens the blocks for receiving and sends the ticket, which names
    how many leading tokens the prefix cache already holds.
 4. Token 1 arrives ahead of the transfer's tail and goes out at once; it may already end the request.
 5. DELIVERED is compared with the plan (bytes, blocks, checksum). Only then does the session join the
    batch, and only then do its blocks enter the prefix index.
 6. A session without a block to grow preempts the youngest by age; a preempted one recomputes locally, or is
    given back to the router when that is too much, or when no running one will ever make room for it.
 7. The end may come in any state. Blocks whose writer is not known to be quiet are quarantined: Abort is
    sent on the link, and only the proof of quiet lets them go.
"""

from __future__ import annotations

from collections import Counter

from engine_core.kv.api import Hold
from engine_core.lifecycle.decode_request import DecodeState, decode_request
from engine_core.lifecycle.transfer_session import TransferState, transfer_session
from engine_core.scheduler.budget import cut_blocks, may_open_leg, split_budget
from engine_core.scheduler.context import SchedulerContext
from engine_core.scheduler.decode_session import DecodeSession
from engine_core.scheduler.messages import (
    EndSession,
    Frame,
    LegDelivered,
    LegFailed,
    LegStarted,
    LegToken,
    Open,
    OpenLeg,
    SendTicket,
    error_info,
)
from engine_core.scheduler.sequence import new_sequence
from engine_core.scheduler.step import Computed, ScheduledSequence, SequenceFailure
from engine_core.transfer.base import (
    DropReceive,
    LinkClosed,
    PrepareReceive,
    QuietReceived,
    ReceiveQuiet,
    SendAbort,
    TransferEvent,
    Verified,
    VerifyBlocks,
)
from engine_core.types.errors import (
    DeadlineError,
    FencedError,
    InternalError,
    Leg,
    PdmeshError,
    PeerFailedError,
    QueueFullError,
    UnavailableError,
)
from engine_core.types.ids import SessionId
from engine_core.types.kv import GroupBlocks, ShardCount, ShardTicket, Ticket
from engine_core.types.request import FinishReason, Role
from engine_core.types.sampling import TokenLogprobs

QUARANTINE_GRACE = 1.0
"""Seconds within which a living writer answers an Abort: until then its quarantine says nothing against it."""

_HOLDING = (DecodeState.AWAITING_KV, DecodeState.READY, DecodeState.COMPUTING, DecodeState.DECODING)
_PREEMPTIBLE = (DecodeState.READY, DecodeState.COMPUTING, DecodeState.DECODING)


class DecodeDisaggScheduler:
    """Schedules a DECODE or MIXED engine. Pure: messages and events in, frames and commands out."""

    def __init__(self, context: SchedulerContext) -> None:
        self._c = context
        self._sessions: dict[SessionId, DecodeSession] = {}

    # ---- messages from the service process ---------------------------------------------------------

    def on_frame(self, frame: Frame, now: float) -> None:
        """Takes one message."""
        if isinstance(frame, Open):
            self._open(frame, now)
            return
        if not isinstance(frame, LegStarted | LegToken | LegDelivered | LegFailed | EndSession):
            raise InternalError(f"{type(frame).__name__} is not for a decode engine")
        session = self._sessions.get(frame.session)
        if session is None:
            return
        if isinstance(frame, EndSession):
            self._end(session, frame, now)
        elif not session.request.final:
            match frame:
                case LegStarted():
                    session.started = True
                case LegToken():
                    self._leg_token(session, frame, now)
                case LegDelivered():
                    self._leg_delivered(session, frame, now)
                case LegFailed():
                    self._leg_failed(session, frame, now)

    def _open(self, frame: Open, now: float) -> None:
        c, spec = self._c, frame.spec
        try:
            if spec.session in self._sessions:
                raise FencedError(f"session {spec.session} is already open", leg=Leg.DECODE)
            sequence = new_sequence(spec, c)
            if sum(s.request.state is DecodeState.QUEUED for s in self._sessions.values()) >= c.config.max_queued:
                raise QueueFullError("decode's queue is full", leg=Leg.DECODE, retry_after=1.0)
            if frame.remote and not frame.without_transfer:
                self._check_link(frame.link_id, now)
        except PdmeshError as exc:
            c.out.output(spec.session, len(spec.emitted_token_ids), (), error=error_info(exc))
            return
        if frame.remote:
            sequence.scored_elsewhere()
        session = DecodeSession(
            sequence, decode_request(spec.session, c.log_move, now), transfer_session(spec.session, c.log_move, now),
            frame.remote, frame.link_id, frame.without_transfer, now,
        )  # fmt: skip
        self._sessions[spec.session] = session
        if frame.remote and not frame.without_transfer:
            c.links.attach(frame.link_id, spec.session)
        session.request.advance(DecodeState.QUEUED, now, f"{len(sequence.tokens)} tokens known")

    def _check_link(self, link_id: int, now: float) -> None:
        link = self._c.links.get(link_id)
        if link is None or not link.up:
            raise PeerFailedError(f"link {link_id:x} is not open", leg=Leg.TRANSFER, reason="LINK_DOWN")
        usage = self._c.kv.usage()
        share = self.stuck_by_peer(now)[link.peer_incarnation] / usage.total
        if share > self._c.config.quarantine_refuse_share:
            raise UnavailableError(
                f"{share:.0%} of the KV cache is quarantined by {link.peer_instance}",
                leg=Leg.TRANSFER, reason="QUARANTINE", peer_incarnation=link.peer_incarnation,
            )  # fmt: skip

    def _leg_token(self, session: DecodeSession, frame: LegToken, now: float) -> None:
        expected = DecodeState.AWAITING_START if session.without_transfer else DecodeState.AWAITING_KV
        if session.request.state is not expected or session.token_at is not None:
            self._fail(session, InternalError("prefill sent a token out of turn", leg=Leg.PREFILL), now)
            return
        if self._c.vocab_size and not 0 <= frame.token_id < self._c.vocab_size:
            why = f"prefill sent token {frame.token_id}, which is outside the vocabulary of {self._c.vocab_size}"
            self._fail(session, InternalError(why, leg=Leg.PREFILL), now)
            return
        session.token_at = now
        session.cached_tokens = frame.cached_tokens
        session.prefill_timings = frame.timings
        finished = self._emit(session, frame.token_id, frame.logprobs, now)
        if session.without_transfer and not finished:
            self._fail(session, InternalError("a request without transfer did not end with token 1"), now)

    def _leg_delivered(self, session: DecodeSession, frame: LegDelivered, now: float) -> None:
        if session.request.state is not DecodeState.AWAITING_KV or session.token_at is None or session.delivered:
            self._fail(session, InternalError("prefill sent DELIVERED out of turn", leg=Leg.PREFILL), now)
            return
        plan, counts = session.plan, frame.shards
        assert plan is not None
        if len(counts) != 1 or (counts[0].coord, counts[0].bytes, counts[0].blocks) != (
            plan.coord, plan.bytes, plan.blocks,
        ):  # fmt: skip
            got = ", ".join(f"{s.bytes} bytes in {s.blocks} blocks" for s in counts) or "nothing"
            error = PeerFailedError(
                f"KV is not whole: {got} arrived, {plan.bytes} bytes in {plan.blocks} blocks were due",
                leg=Leg.TRANSFER, reason="KV_INCOMPLETE",
            )  # fmt: skip
            self._fail(session, error, now)
            return
        session.delivered = counts[0]
        session.delivered_at = now
        session.prefill_timings = frame.timings
        if self._c.verify_kv and counts[0].checksum is not None:
            first = session.first_block
            blocks = cut_blocks(self._c.kv.block_ids(session.id), first, first + plan.blocks)
            self._c.out.command(VerifyBlocks(session.link_id, session.id, blocks))
            return
        self._whole(session, now)

    def _verified(self, event: Verified, now: float) -> None:
        session = self._sessions.get(event.session)
        if session is None or session.request.state is not DecodeState.AWAITING_KV or session.delivered is None:
            return
        if event.checksum != session.delivered.checksum:
            error = PeerFailedError("the checksum of the received KV differs", leg=Leg.TRANSFER, reason="KV_CORRUPT")
            self._fail(session, error, now)
            return
        self._whole(session, now)

    def _whole(self, session: DecodeSession, now: float) -> None:
        """The KV of every known token but token 1 is here: join the batch, enter the prefix index."""
        sequence = session.sequence
        session.transfer.advance(TransferState.DELIVERED, now)
        session.transfer.advance(TransferState.RELEASED, now)
        self._c.out.command(DropReceive(session.link_id, session.id))
        self._c.links.detach(session.link_id, session.id)
        sequence.computed = len(sequence.tokens) - 1
        self._c.kv.commit(session.id, sequence.tokens, sequence.computed)
        session.request.advance(DecodeState.READY, now, "delivered")
        self._c.counters["received"] += 1

    def _leg_failed(self, session: DecodeSession, frame: LegFailed, now: float) -> None:
        if session.request.state not in (DecodeState.AWAITING_START, DecodeState.AWAITING_KV):
            return
        session.request.advance(DecodeState.FAILED, now, frame.error.message)
        self._c.counters["failed"] += 1
        self._c.out.output(session.id, session.sequence.output_len, (), error=frame.error)
        self._retire(session, now, frame.error.message)

    def _end(self, session: DecodeSession, frame: EndSession, now: float) -> None:
        session.ended = True
        if not session.request.final:
            session.request.advance(DecodeState.CANCELLED, now, frame.reason)
            self._c.counters["cancelled"] += 1
            self._retire(session, now, frame.reason)
        self._forget_if_done(session)

    # ---- events from the links ---------------------------------------------------------------------

    def on_transfer(self, event: TransferEvent, now: float) -> None:
        """Takes one transfer event; link events have been recorded in the link book before."""
        match event:
            case QuietReceived() | ReceiveQuiet():
                session = self._sessions.get(event.session)
                if session is not None and session.link_id == event.link_id:
                    proof = "writer answered" if isinstance(event, QuietReceived) else "reader dropped it"
                    self._quiet(session, now, proof)
            case Verified():
                self._verified(event, now)
            case _:
                pass

    def on_link_closed(self, event: LinkClosed, sessions: tuple[SessionId, ...], now: float) -> None:
        """Fails what was to arrive on the link; a proof of quiet frees what it quarantined."""
        for session_id in sessions:
            session = self._sessions.get(session_id)
            if session is None:
                continue
            if not session.request.final and session.request.state in (
                DecodeState.QUEUED, DecodeState.AWAITING_START, DecodeState.AWAITING_KV,
            ):  # fmt: skip
                error = PeerFailedError(
                    f"link closed: {event.reason}", leg=Leg.TRANSFER, reason="LINK_DOWN",
                    peer_incarnation=event.peer_incarnation,
                )  # fmt: skip
                self._fail(session, error, now)
            if event.quiet_proved:
                self._quiet(session, now, f"link closed: {event.reason}")

    def _quiet(self, session: DecodeSession, now: float, reason: str) -> None:
        if session.transfer.state is not TransferState.ABORTING:
            return
        session.transfer.advance(TransferState.QUIET, now, reason)
        self._c.kv.release(session.id)
        self._c.links.detach(session.link_id, session.id)
        self._forget_if_done(session)

    # ---- ends --------------------------------------------------------------------------------------

    def _emit(self, session: DecodeSession, token_id: int, logprobs: TokenLogprobs | None, now: float) -> bool:
        """Gives a token to the client; ends the session when it is the last one."""
        scores = () if logprobs is None else (logprobs,)
        sequence = session.sequence
        index = sequence.output_len
        cached = session.cached_tokens if index == len(sequence.spec.emitted_token_ids) else None
        end = sequence.append(token_id, self._c.eos_token_ids)
        self._c.counters["output_tokens"] += 1
        if end is None:
            self._c.out.output(session.id, index, (token_id,), cached_tokens=cached, logprobs=scores)
            return False
        reason, stop_token = end
        session.request.advance(DecodeState.FINISHED, now, reason.value)
        finish = session.finish(reason, stop_token, now)
        self._c.out.output(session.id, index, (token_id,), finish=finish, cached_tokens=cached, logprobs=scores)
        self._c.counters["finished"] += 1
        self._retire(session, now, reason.value)
        return True

    def _fail(self, session: DecodeSession, error: PdmeshError, now: float) -> None:
        session.request.advance(DecodeState.FAILED, now, error.message)
        self._c.counters["failed"] += 1
        self._c.out.output(session.id, session.sequence.output_len, (), error=error_info(error))
        self._retire(session, now, error.message)

    def _retire(self, session: DecodeSession, now: float, reason: str) -> None:
        """Gives the blocks back, at once or by quiet where a writer may still be at work."""
        transfer = session.transfer
        if transfer.state in (TransferState.TICKETED, TransferState.PUSHING):
            transfer.advance(TransferState.ABORTING, now, reason)
            self._c.kv.mark(session.id, Hold.QUARANTINED)
            self._c.counters["quarantined"] += 1
            link = self._c.links.get(session.link_id)
            if link is None or (link.closed and link.quiet_proved):
                self._quiet(session, now, "the link is gone")
            else:
                self._c.out.command(DropReceive(session.link_id, session.id))
                self._c.out.command(SendAbort(session.link_id, session.id))
            return
        if transfer.state is TransferState.OPEN:
            transfer.advance(TransferState.RELEASED, now, reason)
        self._c.kv.release(session.id)
        self._c.links.detach(session.link_id, session.id)
        self._forget_if_done(session)

    def _forget_if_done(self, session: DecodeSession) -> None:
        if session.ended and session.request.final and session.transfer.final:
            self._sessions.pop(session.id, None)

    # ---- deadlines and grants ----------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Ends what waited too long, then opens legs and grants blocks in order of age."""
        for session in list(self._sessions.values()):
            if not session.request.final:
                self._expire(session, now)
        self._open_legs(now)
        self._grant(now)

    def _expire(self, session: DecodeSession, now: float) -> None:
        if now < session.wait_ends(self._c.config):
            return
        state = session.request.state
        if now >= session.sequence.spec.deadline:
            error: PdmeshError = DeadlineError("the request's deadline passed in decode", leg=Leg.DECODE)
        elif state is DecodeState.AWAITING_KV:
            error = PeerFailedError(
                f"KV did not arrive within {self._c.config.kv_progress_timeout:g} s of token 1",
                leg=Leg.TRANSFER, reason="TRANSFER_STUCK",
            )  # fmt: skip
        else:
            # Who never starts a prompt is to blame for it, and not decode: the next attempt goes elsewhere.
            unanswered = state is DecodeState.AWAITING_START and not session.started
            error = DeadlineError(
                f"waited {self._c.config.queue_timeout:g} s in {state.value}",
                leg=Leg.PREFILL if unanswered else Leg.DECODE, reason="QUEUE_TIMEOUT", retryable=True,
            )  # fmt: skip
        self._fail(session, error, now)

    def next_wakeup(self) -> float | None:
        """Absolute time of the earliest deadline, or None."""
        return min((s.wait_ends(self._c.config) for s in self._sessions.values() if not s.request.final), default=None)

    def _in_state(self, *states: DecodeState) -> list[DecodeSession]:
        return sorted((s for s in self._sessions.values() if s.request.state in states), key=lambda s: s.age)

    def _open_legs(self, now: float) -> None:
        kv = self._c.kv
        waiting = [s for s in self._in_state(DecodeState.AWAITING_START) if not s.without_transfer]
        waiting_blocks = sum(kv.blocks_needed(len(s.sequence.tokens)) for s in waiting)
        for session in self._in_state(DecodeState.QUEUED):
            if not session.remote:
                continue
            if not session.without_transfer:
                want = kv.blocks_needed(len(session.sequence.tokens))
                if not may_open_leg(waiting_blocks, want, kv.available()):
                    return
                waiting_blocks += want
            session.leg_at = now
            session.request.advance(DecodeState.AWAITING_START, now, "leg opened")
            self._c.out.frame(OpenLeg(session.id))

    def _grant(self, now: float) -> None:
        """One queue by age; the head waits for blocks rather than be overtaken."""
        candidates = [
            s
            for s in self._in_state(DecodeState.QUEUED, DecodeState.AWAITING_START, DecodeState.PREEMPTED)
            if not s.without_transfer
            and (
                s.request.state is DecodeState.PREEMPTED
                or (s.request.state is DecodeState.AWAITING_START and s.started)
                or (s.request.state is DecodeState.QUEUED and not s.remote)
            )
        ]
        holding = len(self._in_state(*_HOLDING))
        for session in candidates:
            if self._recomputes_too_much(session):
                self._give_back(session, now, "too much to compute anew here")
            elif holding < self._c.config.max_running and self._reserve(session, now):
                holding += 1
            elif not holding and self._waits_for_nobody(session, now):
                self._give_back(session, now, "nobody runs whose end would make room")
            else:
                return

    def _recomputes_too_much(self, session: DecodeSession) -> bool:
        if session.request.state is not DecodeState.PREEMPTED or not session.remote:
            return False
        sequence, limit = session.sequence, self._c.config.max_local_recompute
        tokens, salt = sequence.tokens, sequence.spec.cache_salt
        return len(tokens) > limit and len(tokens) - self._c.kv.lookup(tokens, salt, sequence.most_cached) > limit

    def _waits_for_nobody(self, session: DecodeSession, now: float) -> bool:
        """True for a preempted session whose blocks are all quarantined, for longer than a living writer needs."""
        preempted = session.request.state is DecodeState.PREEMPTED and session.remote
        return preempted and now >= session.request.since + QUARANTINE_GRACE

    def _give_back(self, session: DecodeSession, now: float, why: str) -> None:
        """Ends the attempt without an end of the output: the router resumes it, here or elsewhere."""
        session.request.advance(DecodeState.FINISHED, now, f"given back: {why}")
        finish = session.finish(FinishReason.PREEMPTED, None, now)
        self._c.out.output(session.id, session.sequence.output_len, (), finish=finish)
        self._c.counters["given_back"] += 1
        self._retire(session, now, why)

    def _reserve(self, session: DecodeSession, now: float) -> bool:
        sequence, kv = session.sequence, self._c.kv
        want = min(len(sequence.tokens) + self._c.config.num_reserved_decode_tokens, sequence.max_kv_tokens)
        tokens, salt, most = sequence.tokens, sequence.spec.cache_salt, sequence.most_cached
        acquired = kv.acquire(session.id, tokens, want, salt, most)
        if acquired is None and not self._in_state(*_HOLDING):
            # Nobody will give blocks back by running: do without the reserve for growth.
            acquired = kv.acquire(session.id, tokens, len(tokens), salt, most)
        if acquired is None:
            return False
        if session.request.state is DecodeState.AWAITING_START:
            self._send_ticket(session, acquired.cached_tokens, now)
            return True
        sequence.computed = acquired.cached_tokens
        if session.request.state is DecodeState.QUEUED:
            session.cached_tokens = acquired.cached_tokens
            session.computing_at = now
        session.request.advance(DecodeState.COMPUTING, now, f"{acquired.cached_tokens} tokens cached")
        return True

    def _send_ticket(self, session: DecodeSession, cached: int, now: float) -> None:
        c, known = self._c, len(session.sequence.tokens)
        session.first_block, end = cached // c.block_size, -(-known // c.block_size)
        count = end - session.first_block
        session.plan = ShardCount((0, 0, 0), sum(g.block_bytes for g in c.layout.groups) * count, count)
        blocks = cut_blocks(c.kv.block_ids(session.id), session.first_block, end)
        groups = tuple(GroupBlocks(g.spec.group_id, ids) for g, ids in zip(c.layout.groups, blocks, strict=True))
        link = c.links.get(session.link_id)
        session.transport = link.transport if link is not None else ""
        session.transfer.advance(TransferState.TICKETED, now, f"{count} blocks, {cached} tokens held")
        session.awaiting_at = now
        session.request.advance(DecodeState.AWAITING_KV, now, "ticket sent")
        c.out.command(PrepareReceive(session.link_id, session.id, blocks, session.plan.bytes))
        ticket = Ticket(session.link_id, cached, known, (ShardTicket((0, 0, 0), groups),))
        c.out.frame(SendTicket(session.id, ticket))

    # ---- steps -------------------------------------------------------------------------------------

    def schedule(self, now: float) -> list[ScheduledSequence]:
        """Running sequences first, one token each, then chunks of local prompts under the budget."""
        self._grow(now)
        config, kv, eos = self._c.config, self._c.kv, self._c.eos_token_ids
        running = self._in_state(DecodeState.READY, DecodeState.DECODING)[: config.max_batch_tokens]
        for session in running:
            if session.request.state is DecodeState.READY:
                session.request.advance(DecodeState.DECODING, now)
                session.decoding_at = session.decoding_at or now
        parts = [s.sequence.schedule(1, kv.block_ids(s.id), eos) for s in running]
        computing = self._in_state(DecodeState.COMPUTING)
        budget = config.max_batch_tokens - len(parts)
        if self._c.role is Role.DECODE:
            budget = min(budget, config.max_local_tokens)
        budget = self._c.pacer.chunk_budget(len(parts), budget)
        chunks = split_budget((s.sequence.missing for s in computing), budget)
        parts += [s.sequence.schedule(n, kv.block_ids(s.id), eos) for s, n in zip(computing, chunks, strict=True) if n]
        return parts

    def _grow(self, now: float) -> None:
        """Makes room for the token that each running sequence computes next, oldest first."""
        for session in self._in_state(DecodeState.READY, DecodeState.DECODING):
            if session.request.state not in (DecodeState.READY, DecodeState.DECODING):
                continue  # preempted meanwhile, for an older one
            while not self._c.kv.grow(session.id, len(session.sequence.tokens)):
                victim = self._in_state(*_PREEMPTIBLE)[-1]
                self._preempt(victim, session, now)
                if victim is session:
                    break

    def _preempt(self, victim: DecodeSession, winner: DecodeSession, now: float) -> None:
        reason = "no block to grow" if victim is winner else f"blocks went to {winner.id}"
        victim.request.advance(DecodeState.PREEMPTED, now, reason)
        victim.sequence.reset()
        self._c.kv.release(victim.id)
        self._c.counters["preemptions"] += 1

    def settle(self, part: ScheduledSequence, computed: Computed, now: float) -> None:
        """Applies what a step computed for one sequence."""
        session = self._sessions[part.session]
        sequence, bs = session.sequence, self._c.block_size
        before = sequence.computed // bs
        sequence.settle(part)
        self._c.out.scores(session.id, part.scored[0], computed.scores)
        if sequence.computed // bs != before:
            self._c.kv.commit(session.id, sequence.tokens, sequence.computed)
        if session.request.state is DecodeState.COMPUTING:
            self._c.counters["prompt_tokens_computed"] += len(part.token_ids)
            if part.sample:
                session.request.advance(DecodeState.DECODING, now)
                session.decoding_at = session.decoding_at or now
        if part.sample:
            self._emit(session, computed.token, computed.logprobs, now)

    def fail(self, part: ScheduledSequence, failure: SequenceFailure, now: float) -> None:
        """Ends a sequence that a step could not compute; what it held is never found by prefix again."""
        session = self._sessions[part.session]
        self._c.kv.disown(session.id)
        self._fail(session, self._c.failure(failure, Leg.DECODE), now)

    # ---- figures -----------------------------------------------------------------------------------

    def stuck_by_peer(self, now: float) -> Counter[int]:
        """Blocks quarantined for longer than QUARANTINE_GRACE, by the incarnation that may still write them."""
        counts: Counter[int] = Counter()
        for s in self._sessions.values():
            if s.transfer.state is TransferState.ABORTING and now >= s.transfer.since + QUARANTINE_GRACE:
                link = self._c.links.get(s.link_id)
                peer = link.peer_incarnation if link is not None else 0
                counts[peer] += sum(len(g) for g in self._c.kv.block_ids(s.id))
        return counts

    def stuck_blocks(self, now: float) -> int:
        """Blocks quarantined for longer than QUARANTINE_GRACE."""
        return sum(self.stuck_by_peer(now).values())

    def load(self) -> tuple[int, int, int]:
        """(running, queued, queued tokens)."""
        queued = self._in_state(
            DecodeState.ADMITTED, DecodeState.QUEUED, DecodeState.AWAITING_START, DecodeState.PREEMPTED
        )
        return len(self._in_state(*_HOLDING)), len(queued), sum(s.sequence.missing for s in queued)

    def states(self) -> dict[str, int]:
        """Sessions by machine and state."""
        return Counter(state for s in self._sessions.values() for state in (s.request.label, s.transfer.label))

    def quarantined(self) -> dict[str, int]:
        """Quarantined blocks by the instance that may still write them."""
        counts: Counter[str] = Counter()
        for s in self._sessions.values():
            if s.transfer.state is TransferState.ABORTING:
                link = self._c.links.get(s.link_id)
                name = link.peer_instance if link is not None else ""
                counts[name] += sum(len(g) for g in self._c.kv.block_ids(s.id))
        return counts

    def num_sessions(self) -> int:
        """Sessions known, those that await quiet included."""
        return len(self._sessions)

    def has_work(self) -> bool:
        """True when a step could be planned."""
        return any(s.request.state in _PREEMPTIBLE for s in self._sessions.values())

    def check(self) -> None:
        """Raises InternalError when a session and its blocks disagree."""
        for s in self._sessions.values():
            held, state = self._c.kv.holds(s.id), s.request.state
            if held != (state in _HOLDING or s.transfer.state is TransferState.ABORTING):
                raise InternalError(f"decode session {s.id} in {state}/{s.transfer.state} holds blocks: {held}")
