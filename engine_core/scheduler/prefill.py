"""Scheduling on a prefill engine.

The life of a session:

 1. OpenPrefill is checked and queued; everything waits in one order: ticketed first, then by age.
 2. A grant reserves the blocks of the whole prompt at once (chunks that allocate as they go deadlock on
    a full pool) and sends Started. When blocks are short, what comes earlier sets later un-ticketed
    prompts back to QUEUED; their computed blocks stay in the prefix index. A ticketed one takes a place
    in the batch in the same way.
 3. Steps compute chunks under the token budget. Log probabilities of the prompt leave as they are computed.
 4. With the ticket, finished blocks are pushed while the next chunk computes.
 5. The last chunk samples token 1. Once sampled and ticketed, FirstToken leaves at once.
 6. When every push has arrived, Delivered is sent and the blocks are released.
 7. An end in any state cancels the push; the blocks stay pinned until no thread reads them. An Abort on
    the link leaves a tombstone, so that a late ticket of the session is refused, and is answered by
    Quiet only when nothing is or will be written.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from engine_core.kv.api import Hold
from engine_core.lifecycle.machine import Machine
from engine_core.lifecycle.prefill_request import PrefillState, prefill_request
from engine_core.lifecycle.transfer_session import TransferState, transfer_session
from engine_core.scheduler.budget import blocks_ready, cut_blocks, split_budget
from engine_core.scheduler.context import SchedulerContext
from engine_core.scheduler.messages import (
    Delivered,
    EndSession,
    FirstToken,
    Frame,
    OpenPrefill,
    SessionFailed,
    Started,
    TicketArrived,
    error_info,
)
from engine_core.scheduler.sequence import Sequence, new_sequence
from engine_core.scheduler.step import Computed, ScheduledSequence, SequenceFailure
from engine_core.transfer.base import (
    AbortReceived,
    CancelPush,
    LinkClosed,
    Push,
    PushDone,
    PushFailed,
    SendQuiet,
    SourceQuiet,
    TransferEvent,
)
from engine_core.types.errors import (
    CancelledSessionError,
    DeadlineError,
    FencedError,
    InternalError,
    InvalidRequestError,
    Leg,
    PdmeshError,
    PeerFailedError,
    QueueFullError,
)
from engine_core.types.ids import SessionId
from engine_core.types.kv import ShardCount, Ticket
from engine_core.types.request import StageTimings
from engine_core.types.sampling import TokenLogprobs

TOMBSTONE_SECONDS = 1200.0
"""Longer than any session lives, so that no ticket can outlive its tombstone."""

_HOLDING = (PrefillState.COMPUTING, PrefillState.COMPUTED, PrefillState.PUSHING)


@dataclass(slots=True)
class PrefillSession:
    """One session on a prefill engine."""

    sequence: Sequence
    request: Machine[PrefillState]
    transfer: Machine[TransferState]
    link_id: int
    without_transfer: bool
    opened_at: float
    ticket: Ticket | None = None
    started: bool = False
    cached_tokens: int = 0
    token: int | None = None
    logprobs: TokenLogprobs | None = None
    next_push: int = 0
    pushed_to: int = 0
    in_flight: set[int] = field(default_factory=set)
    last_progress: float = 0.0
    sent_bytes: int = 0
    sent_blocks: int = 0
    checksum: int | None = None
    computing_at: float = 0.0
    computed_at: float = 0.0
    pushing_at: float = 0.0
    owes_quiet: bool = False
    ended: bool = False

    @property
    def id(self) -> SessionId:
        """The session's id."""
        return self.sequence.spec.session

    @property
    def order(self) -> tuple[bool, int, SessionId]:
        """Ticketed first, then age."""
        return (self.ticket is None and not self.without_transfer, self.sequence.spec.arrival_ms, self.id)


class PrefillDisaggScheduler:
    """Schedules a PREFILL engine. Pure: messages and events in, frames and commands out."""

    def __init__(self, context: SchedulerContext) -> None:
        self._c = context
        self._sessions: dict[SessionId, PrefillSession] = {}
        self._tombstones: OrderedDict[SessionId, float] = OrderedDict()
        self._next_push_id = 0

    # ---- messages from the service process ---------------------------------------------------------

    def on_frame(self, frame: Frame, now: float) -> None:
        """Takes one message."""
        match frame:
            case OpenPrefill():
                self._open(frame, now)
            case TicketArrived():
                self._ticket(frame, now)
            case EndSession():
                self._end(frame, now)
            case _:
                raise InternalError(f"{type(frame).__name__} is not for a prefill engine")

    def _open(self, frame: OpenPrefill, now: float) -> None:
        c, spec = self._c, frame.spec
        try:
            if spec.session in self._sessions:
                raise FencedError(f"session {spec.session} is already open", leg=Leg.PREFILL)
            if spec.session in self._tombstones:
                raise FencedError(f"session {spec.session} was aborted", leg=Leg.PREFILL)
            sequence = new_sequence(spec, c)
            if c.kv.blocks_needed(len(sequence.tokens)) > c.kv.usage().total:
                raise InvalidRequestError(
                    f"{len(sequence.tokens)} tokens do not fit prefill's KV cache", leg=Leg.PREFILL, field="prompt"
                )
            if sum(s.request.state is PrefillState.QUEUED for s in self._sessions.values()) >= c.config.max_queued:
                raise QueueFullError("prefill's queue is full", leg=Leg.PREFILL, retry_after=1.0)
            if not frame.without_transfer and not c.links.is_up(frame.link_id):
                raise PeerFailedError(f"link {frame.link_id:x} is not open", leg=Leg.TRANSFER, reason="LINK_DOWN")
        except PdmeshError as exc:
            c.out.frame(SessionFailed(spec.session, error_info(exc)))
            return
        session = PrefillSession(
            sequence, prefill_request(spec.session, c.log_move, now), transfer_session(spec.session, c.log_move, now),
            frame.link_id, frame.without_transfer, now,
        )  # fmt: skip
        self._sessions[spec.session] = session
        if not frame.without_transfer:
            c.links.attach(frame.link_id, spec.session)
        session.request.advance(PrefillState.QUEUED, now, f"{len(sequence.tokens)} tokens")

    def _ticket(self, frame: TicketArrived, now: float) -> None:
        session = self._sessions.get(frame.session)
        if session is None or session.request.final:
            return
        ticket = frame.ticket
        problem = self._ticket_problem(session, ticket)
        if problem:
            self._fail(session, InvalidRequestError(problem, leg=Leg.PREFILL, field="ticket"), now)
            return
        session.ticket = ticket
        session.pushed_to = ticket.first_token // self._c.block_size
        session.last_progress = now
        session.transfer.advance(TransferState.TICKETED, now, f"from token {ticket.first_token}")
        self._push(session, now)
        self._first_token(session, now)

    def _ticket_problem(self, session: PrefillSession, ticket: Ticket) -> str | None:
        """What is wrong with a ticket: it comes from the wire, so everything in it is checked."""
        bs, total = self._c.block_size, len(session.sequence.tokens)
        if session.without_transfer or session.ticket is not None or not session.started:
            return "a ticket is not expected now"
        if session.id in self._tombstones:
            return "the session was aborted"
        if ticket.link_id != session.link_id:
            return f"the ticket names link {ticket.link_id:x}; the session was opened on {session.link_id:x}"
        if not 0 <= ticket.first_token < total or ticket.first_token % bs or ticket.num_tokens != total:
            return f"the ticket covers tokens [{ticket.first_token}, {ticket.num_tokens}) of {total}"
        want = -(-total // bs) - ticket.first_token // bs
        groups = [group.spec.group_id for group in self._c.layout.groups]
        if len(ticket.shards) != 1 or [g.group_id for g in ticket.shards[0].groups] != groups:
            return "the ticket's shards do not match this worker's ranks and cache groups"
        if any(len(g.block_ids) != want or any(b < 1 for b in g.block_ids) for g in ticket.shards[0].groups):
            return f"the ticket needs {want} blocks per cache group"
        return None

    def _end(self, frame: EndSession, now: float) -> None:
        session = self._sessions.get(frame.session)
        if session is None:
            return
        session.ended = True
        if not session.request.final:
            session.request.advance(PrefillState.CANCELLED, now, frame.reason)
            self._retire(session, now, frame.reason)
        self._forget_if_done(session)

    # ---- events from the links ---------------------------------------------------------------------

    def on_transfer(self, event: TransferEvent, now: float) -> None:
        """Takes one transfer event; link events have been recorded in the link book before."""
        match event:
            case PushDone():
                self._push_done(event, now)
            case PushFailed():
                self._push_failed(event, now)
            case SourceQuiet():
                session = self._sessions.get(event.session)
                if session is not None and session.transfer.state is TransferState.ABORTING:
                    session.in_flight.clear()
                    self._quiet(session, now, "no thread pushes")
            case AbortReceived():
                self._abort(event, now)
            case _:
                pass

    def on_link_closed(self, event: LinkClosed, sessions: tuple[SessionId, ...], now: float) -> None:
        """Fails what was to travel on the link. Pushes in flight still report their own end."""
        for session_id in sessions:
            session = self._sessions.get(session_id)
            if session is not None and not session.request.final:
                error = PeerFailedError(f"link closed: {event.reason}", leg=Leg.TRANSFER, reason="LINK_DOWN")
                self._fail(session, error, now)

    def _push_done(self, event: PushDone, now: float) -> None:
        session = self._sessions.get(event.session)
        if session is None or event.push_id not in session.in_flight:
            return
        session.in_flight.discard(event.push_id)
        session.last_progress = now
        session.sent_bytes += event.bytes
        session.sent_blocks += event.blocks
        session.checksum = event.checksum
        self._c.counters["transfer_bytes"] += event.bytes
        self._c.distributions.push(event.bytes, event.seconds)
        if session.request.final:
            return
        self._finish_if_delivered(session, now)

    def _push_failed(self, event: PushFailed, now: float) -> None:
        session = self._sessions.get(event.session)
        if session is None:
            return
        session.in_flight.discard(event.push_id)
        if not session.request.final:
            error = PeerFailedError(f"push failed: {event.reason}", leg=Leg.TRANSFER, reason="PUSH_FAILED")
            self._fail(session, error, now)

    def _abort(self, event: AbortReceived, now: float) -> None:
        session = self._sessions.get(event.session)
        if session is not None and session.link_id != event.link_id:
            # Another peer's session: on this link nothing of that name is written.
            self._c.out.command(SendQuiet(event.link_id, event.session))
            return
        self._tombstones[event.session] = now
        self._tombstones.move_to_end(event.session)
        if session is None:
            self._c.out.command(SendQuiet(event.link_id, event.session))
            return
        session.owes_quiet = True
        if not session.request.final:
            self._fail(session, CancelledSessionError("decode aborted the session", leg=Leg.DECODE), now)
        elif session.transfer.final:
            self._answer_quiet(session)

    # ---- ends --------------------------------------------------------------------------------------

    def _fail(self, session: PrefillSession, error: PdmeshError, now: float) -> None:
        session.request.advance(PrefillState.FAILED, now, error.message)
        self._c.counters["failed"] += 1
        self._c.out.frame(SessionFailed(session.id, error_info(error)))
        self._retire(session, now, error.message)
        self._forget_if_done(session)

    def _retire(self, session: PrefillSession, now: float, reason: str) -> None:
        """Gives the blocks back, at once or when no thread reads them any more."""
        transfer = session.transfer
        if session.in_flight:
            transfer.advance(TransferState.ABORTING, now, reason)
            self._c.kv.mark(session.id, Hold.PINNED)
            self._c.out.command(CancelPush(session.link_id, session.id))
            return
        if transfer.state is TransferState.OPEN:
            transfer.advance(TransferState.RELEASED, now, reason)
        elif transfer.state is TransferState.DELIVERED:
            transfer.advance(TransferState.RELEASED, now, reason)
        else:
            transfer.advance(TransferState.ABORTING, now, reason)
            transfer.advance(TransferState.QUIET, now, "nothing in flight")
        self._let_go(session)

    def _quiet(self, session: PrefillSession, now: float, reason: str) -> None:
        session.transfer.advance(TransferState.QUIET, now, reason)
        self._let_go(session)
        self._forget_if_done(session)

    def _let_go(self, session: PrefillSession) -> None:
        self._c.kv.release(session.id)
        self._c.links.detach(session.link_id, session.id)
        if session.owes_quiet:
            self._answer_quiet(session)

    def _answer_quiet(self, session: PrefillSession) -> None:
        session.owes_quiet = False
        self._c.out.command(SendQuiet(session.link_id, session.id))

    def _forget_if_done(self, session: PrefillSession) -> None:
        if session.ended and session.request.final and session.transfer.final:
            self._sessions.pop(session.id, None)

    # ---- deadlines and grants ----------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Ends what waited too long, then grants blocks in order."""
        while self._tombstones and next(iter(self._tombstones.values())) + TOMBSTONE_SECONDS <= now:
            self._tombstones.popitem(last=False)
        for session in list(self._sessions.values()):
            if not session.request.final:
                self._expire(session, now)
        self._grant(now)

    def _expire(self, session: PrefillSession, now: float) -> None:
        c = self._c.config
        if now >= session.sequence.spec.deadline:
            error: PdmeshError = DeadlineError("the request's deadline passed in prefill", leg=Leg.PREFILL)
            self._fail(session, error, now)
        elif session.order[0] and now >= session.opened_at + c.queue_timeout:
            what = "waited for blocks" if session.request.state is PrefillState.QUEUED else "waited for a ticket"
            error = DeadlineError(
                f"{what} for {c.queue_timeout:g} s in prefill", leg=Leg.PREFILL, reason="QUEUE_TIMEOUT", retryable=True
            )
            self._fail(session, error, now)
        elif session.in_flight and now >= session.last_progress + c.kv_progress_timeout:
            error = PeerFailedError(
                f"no transfer progress for {c.kv_progress_timeout:g} s", leg=Leg.TRANSFER, reason="TRANSFER_STUCK"
            )
            self._fail(session, error, now)

    def next_wakeup(self) -> float | None:
        """Absolute time of the earliest deadline, or None."""
        c, times = self._c.config, []
        for s in self._sessions.values():
            if s.request.final:
                continue
            times.append(s.sequence.spec.deadline)
            if s.order[0]:
                times.append(s.opened_at + c.queue_timeout)
            if s.in_flight:
                times.append(s.last_progress + c.kv_progress_timeout)
        return min(times, default=None)

    def _holding(self) -> list[PrefillSession]:
        return [s for s in self._sessions.values() if s.request.state in _HOLDING]

    def _grant(self, now: float) -> None:
        queued = sorted(
            (s for s in self._sessions.values() if s.request.state is PrefillState.QUEUED), key=lambda s: s.order
        )
        for session in queued:
            if len(self._holding()) >= self._c.config.max_running and not self._free_place(session, now):
                return
            if not self._reserve(session, now):
                return

    def _free_place(self, session: PrefillSession, now: float) -> bool:
        """Sets the last un-ticketed prompt back for a ticketed session: those who hold all places may wait for
        tickets from a decode worker whose blocks this very session holds."""
        if session.order[0]:
            return False
        victim = max((v for v in self._holding() if v.order[0]), key=lambda v: v.order, default=None)
        if victim is not None:
            self._set_back(victim, session, now)
        return victim is not None

    def _reserve(self, session: PrefillSession, now: float) -> bool:
        """Reserves the whole prompt, setting later un-ticketed prompts back when that makes room."""
        kv, sequence = self._c.kv, session.sequence
        salt, most = sequence.spec.cache_salt, sequence.most_cached
        acquired = kv.acquire(session.id, sequence.tokens, len(sequence.tokens), salt, most)
        if acquired is None:
            victims = sorted(
                (v for v in self._holding() if v.order[0] and v.order > session.order), key=lambda v: v.order
            )
            cached = kv.lookup(sequence.tokens, salt, most)
            need = kv.blocks_needed(len(sequence.tokens)) - kv.blocks_needed(cached)
            if kv.available() + sum(len(g) for v in victims for g in kv.block_ids(v.id)) < need:
                return False
            while acquired is None and victims:
                self._set_back(victims.pop(), session, now)
                acquired = kv.acquire(session.id, sequence.tokens, len(sequence.tokens), salt, most)
            if acquired is None:
                return False
        sequence.computed = acquired.cached_tokens
        session.cached_tokens = acquired.cached_tokens
        session.computing_at = now
        session.request.advance(PrefillState.COMPUTING, now, f"{acquired.cached_tokens} tokens cached")
        if not session.started:
            session.started = True
            self._c.out.frame(Started(session.id, acquired.cached_tokens))
        self._push(session, now)
        return True

    def _set_back(self, victim: PrefillSession, winner: PrefillSession, now: float) -> None:
        victim.request.advance(PrefillState.QUEUED, now, f"set back for {winner.id}")
        victim.sequence.reset()
        victim.token = victim.logprobs = None
        self._c.kv.release(victim.id)
        self._c.counters["set_back"] += 1

    # ---- steps -------------------------------------------------------------------------------------

    def schedule(self, now: float) -> list[ScheduledSequence]:
        """Chunks of the prompts that compute, in order, under the token budget."""
        computing = sorted(
            (s for s in self._sessions.values() if s.request.state is PrefillState.COMPUTING), key=lambda s: s.order
        )
        chunks = split_budget((s.sequence.missing for s in computing), self._c.config.max_batch_tokens)
        return [
            s.sequence.schedule(n, self._c.kv.block_ids(s.id), self._c.eos_token_ids)
            for s, n in zip(computing, chunks, strict=True)
            if n
        ]

    def settle(self, part: ScheduledSequence, computed: Computed, now: float) -> None:
        """Applies what a step computed for one sequence."""
        session = self._sessions[part.session]
        sequence = session.sequence
        sequence.settle(part)
        self._c.out.scores(session.id, part.scored[0], computed.scores)
        self._c.kv.commit(session.id, sequence.tokens, sequence.computed)
        self._c.counters["prompt_tokens_computed"] += len(part.token_ids)
        if part.sample:
            session.token, session.logprobs = computed.token, computed.logprobs
            session.computed_at = now
            session.request.advance(PrefillState.COMPUTED, now, "token 1 sampled")
        self._push(session, now)
        self._first_token(session, now)

    def fail(self, part: ScheduledSequence, failure: SequenceFailure, now: float) -> None:
        """Ends a sequence that a step could not compute; what it held is never found by prefix again."""
        session = self._sessions[part.session]
        self._c.kv.disown(session.id)
        self._fail(session, self._c.failure(failure, Leg.PREFILL), now)

    def _push(self, session: PrefillSession, now: float) -> None:
        """Pushes the blocks that are final and not pushed yet, if the ticket is here."""
        ticket, sequence = session.ticket, session.sequence
        if ticket is None or session.request.state not in (PrefillState.COMPUTING, PrefillState.COMPUTED):
            return
        bs = self._c.block_size
        ready = blocks_ready(sequence.computed, len(sequence.tokens), bs)
        if ready <= session.pushed_to:
            return
        if session.transfer.state is TransferState.TICKETED:
            session.transfer.advance(TransferState.PUSHING, now)
            session.pushing_at = now
        first = ticket.first_token // bs
        self._next_push_id += 1
        session.in_flight.add(self._next_push_id)
        session.last_progress = now
        self._c.out.command(
            Push(
                session.link_id,
                session.id,
                self._next_push_id,
                cut_blocks(self._c.kv.block_ids(session.id), session.pushed_to, ready),
                cut_blocks([g.block_ids for g in ticket.shards[0].groups], session.pushed_to - first, ready - first),
            )
        )
        session.pushed_to = ready

    def _first_token(self, session: PrefillSession, now: float) -> None:
        """Token 1 leaves once sampled and ticketed, ahead of the transfer's tail."""
        if session.request.state is not PrefillState.COMPUTED or session.order[0]:
            return
        assert session.token is not None
        timings = self._timings(session, now)
        self._c.out.frame(FirstToken(session.id, session.token, session.cached_tokens, timings, session.logprobs))
        if session.without_transfer:
            session.request.advance(PrefillState.FINISHED, now, "nothing to push")
            self._retire(session, now, "nothing to push")
            self._forget_if_done(session)
            return
        session.request.advance(PrefillState.PUSHING, now)
        self._finish_if_delivered(session, now)

    def _finish_if_delivered(self, session: PrefillSession, now: float) -> None:
        if session.request.state is not PrefillState.PUSHING or session.in_flight:
            return
        session.transfer.advance(TransferState.DELIVERED, now, f"{session.sent_bytes} bytes")
        assert session.ticket is not None
        count = ShardCount(session.ticket.shards[0].coord, session.sent_bytes, session.sent_blocks, session.checksum)
        self._c.out.frame(Delivered(session.id, (count,), self._timings(session, now)))
        session.request.advance(PrefillState.FINISHED, now, "delivered")
        self._c.counters["delivered"] += 1
        self._retire(session, now, "delivered")
        self._forget_if_done(session)

    def _timings(self, session: PrefillSession, now: float) -> StageTimings:
        pushing = now - session.pushing_at if session.pushing_at else 0.0
        return StageTimings(
            session.computing_at - session.opened_at, session.computed_at - session.computing_at, pushing, 0.0
        )

    # ---- figures -----------------------------------------------------------------------------------

    def load(self) -> tuple[int, int, int]:
        """(running, queued, queued tokens)."""
        running = len(self._holding())
        queued = [s for s in self._sessions.values() if s.request.state is PrefillState.QUEUED]
        return running, len(queued), sum(s.sequence.missing for s in self._sessions.values() if not s.request.final)

    def stuck_blocks(self, now: float) -> int:
        """None: nobody writes into prefill's blocks."""
        return 0

    def states(self) -> dict[str, int]:
        """Sessions by machine and state."""
        return Counter(state for s in self._sessions.values() for state in (s.request.label, s.transfer.label))

    def quarantined(self) -> dict[str, int]:
        """None: nobody writes into prefill's blocks."""
        return {}

    def num_sessions(self) -> int:
        """Sessions known, those that await quiet included."""
        return len(self._sessions)

    def has_work(self) -> bool:
        """True when a step could be planned."""
        return any(s.request.state is PrefillState.COMPUTING for s in self._sessions.values())

    def check(self) -> None:
        """Raises InternalError when a session and its blocks disagree."""
        for s in self._sessions.values():
            held, state = self._c.kv.holds(s.id), s.request.state
            expected = state in _HOLDING or s.transfer.state is TransferState.ABORTING
            if held != expected:
                raise InternalError(f"prefill session {s.id} in {state}/{s.transfer.state} holds blocks: {held}")
            if s.in_flight and not (state in _HOLDING or s.transfer.state is TransferState.ABORTING):
                raise InternalError(f"prefill session {s.id} in {state} has pushes in flight")
