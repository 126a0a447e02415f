"""How many samples run at once, who goes next, and who is told to come back later.

A request is admitted with all its samples or refused at once (429); each admitted sample then waits its turn
and holds a slot while it runs. A slot is given when
    - fewer than `max_in_flight` samples run, and
    - the workers that are known have room: places in decode's batches, tokens in decode's pools, tokens of
      prompts in prefill's pools (a prompt counts there until its token 1), and
    - about a second of prompts at most waits with the workers for token 1; one sample always may run.
Those that wait stand in a queue by priority, fair between the clients of one (priority.py, fair_queue.py), so the
queue is here, where it is fair, and not in the workers. When the queue is full, a request takes the place of the
newest of those that are the least urgent, and less so than itself; where there are none, a client with less in the
queue takes the place of the newest request of the one with the most. What is more urgent is never sent away.

Nobody waits in vain: where the recent pace says that a turn can't come within the wait allowed, the request is
refused at once. Retry-After is what that pace says; without one it is a second.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from types import TracebackType

import msgspec

from engine_core.lifecycle.membership import MembershipState
from engine_core.types.errors import Leg, QueueFullError
from engine_core.types.request import Role
from services.router.routing.priority import PriorityQueue
from services.wire.bootstrap import InstanceSpec, RankRow

_RETRY_AFTER = 1.0
_RETRY_MOST = 120.0
_PACE_KEPT = 32
"""Turns that the pace is taken from."""
_PACE_LEAST = 8
_SURE = 0.8
"""Part of the wait allowed that an expected wait may take: a pace is no promise."""


class Demand(msgspec.Struct, frozen=True):
    """What one sample needs, in tokens: its prompt, and the output that it may reach."""

    prompt: int = 0
    output: int = 0


class Room(msgspec.Struct, frozen=True):
    """What the workers hold. None: not known, so no limit."""

    requests: int | None = None
    decode_tokens: int | None = None
    prefill_tokens: int | None = None
    prompt_workers: int | None = None
    """Workers that compute prompts."""


NO_LIMIT = Room()


def room_of(rows: Sequence[RankRow], tokenizer_digest: str, headroom: float) -> Room:
    """What the READY leaders of one tokenizer hold together (LOST ones when there are no others, as in placement),
    times `headroom`: somewhat more than fits, so that their batches never wait for a router. No limit while there
    are none, since then requests wait for workers, not for room; nor with a headroom of 0."""
    mine = [r for r in rows if r.is_leader and r.instance.tokenizer_digest == tokenizer_digest]
    ready = [r for r in mine if r.state is MembershipState.READY]
    specs = [r.instance for r in ready or mine if r.state in (MembershipState.READY, MembershipState.LOST)]
    generating = [s for s in specs if s.role is not Role.PREFILL]
    prefills = [s for s in specs if s.role is Role.PREFILL]
    if not generating or not headroom:
        return NO_LIMIT
    places = sum(s.max_running for s in generating) if all(s.max_running for s in generating) else None
    decode = _tokens(generating)
    prefill = _tokens(prefills) if prefills and all(s.role is Role.DECODE for s in generating) else None
    ahead = [None if held is None else math.ceil(held * headroom) for held in (places, decode, prefill)]
    return Room(ahead[0], ahead[1], ahead[2], len(prefills) or len(generating))


def _tokens(specs: Sequence[InstanceSpec]) -> int | None:
    sizes = [s.kv_capacity_tokens for s in specs]
    return sum(sizes) if all(sizes) else None


class Pace:
    """How fast turns come while others wait for theirs: the last ones of one busy time. Pure."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=_PACE_KEPT)

    def turn(self, now: float) -> None:
        """One of those that waited has a slot."""
        self._times.append(now)

    def idle(self) -> None:
        """Nobody waits any more; the next busy time is measured anew."""
        self._times.clear()

    def seconds_for(self, turns: int, now: float) -> float | None:
        """Seconds until that many turns have come; None while too little is known. A pace that has
        stopped counts as slower the longer it stands."""
        if len(self._times) < _PACE_LEAST:
            return None
        count, first, last = len(self._times), self._times[0], self._times[-1]
        return turns * max((last - first) / (count - 1), (now - first) / count)


class Prompts:
    """Prompts that are with the workers, and how fast these bring first tokens while they have any. Pure.

    What a worker has beyond its next second of work waits there as it would here, but in no fair queue, and its
    wait is nobody's to refuse. So prompts go out for about `seconds` of work at the pace that is seen, and for a
    few of each worker until one is.
    """

    _FEW, _AT_FIRST, _LEAST = 2, 4, 4

    def __init__(self) -> None:
        self.waiting = self.tokens = 0
        self._done: deque[tuple[float, int]] = deque(maxlen=_PACE_KEPT)

    def begin(self, tokens: int) -> None:
        """One goes out."""
        if not self.waiting:
            self._done.clear()  # a pace with pauses in it is none
        self.waiting += 1
        self.tokens += tokens

    def end(self, tokens: int, now: float, *, first_token: bool) -> None:
        """It has its first token, or was given up."""
        self.waiting -= 1
        self.tokens -= tokens
        if first_token:
            self._done.append((now, tokens))

    def fits(self, tokens: int, workers: int, seconds: float, now: float) -> bool:
        """True when one more prompt may go out."""
        if self.waiting < self._FEW * workers:
            return True
        pace = self.pace(now)
        if pace is None:
            return self.waiting < self._AT_FIRST * workers
        return self.tokens + tokens <= pace * seconds

    def pace(self, now: float) -> float | None:
        """Prompt tokens a second; None while too little is known. It sinks while nothing comes."""
        if len(self._done) < self._LEAST:
            return None
        return sum(tokens for _, tokens in list(self._done)[1:]) / max(now - self._done[0][0], 1e-6)


class Admission:
    """Slots and a bounded, fair queue. Used on one event loop only."""

    def __init__(
        self,
        max_in_flight: int,
        max_queued: int,
        *,
        room: Callable[[], Room] = lambda: NO_LIMIT,
        max_wait: float = math.inf,
        prompts_ahead: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_in_flight, self._max_queued, self._max_wait = max_in_flight, max_queued, max_wait
        self._room, self._prompts_ahead, self._clock = room, prompts_ahead, clock
        self._queue: PriorityQueue[Slot] = PriorityQueue()
        self._tickets: dict[int, Ticket] = {}
        self._pace = Pace()
        self._in_flight = self._pending = 0
        self._decode_tokens = 0
        self._prompts = Prompts()

    @property
    def in_flight(self) -> int:
        """Samples that hold a slot."""
        return self._in_flight

    @property
    def queued(self) -> int:
        """Samples that are admitted and hold no slot yet."""
        return self._pending

    def admit(self, samples: int, client: str = "", priority: int = 0) -> Ticket:
        """Admits a request; a lower `priority` is more urgent. Raises QueueFullError when slots and queue can't take
        all its samples, or its turn can't come in time; a request that is larger than both is taken while nothing
        else is there."""
        self._check_wait(client, priority)
        busy = self._in_flight + self._pending
        over = busy + samples - self._max_in_flight - self._max_queued
        ticket = Ticket(self, samples, client, priority)
        if busy and over > 0:
            victims = self._victims(ticket, over)
            if not victims:
                raise QueueFullError(
                    f"{self._in_flight} requests are served and {self._pending} wait; try again later",
                    leg=Leg.ROUTER,
                    retry_after=self._retry_after(self._pending),
                )
            for victim, ahead in victims:
                victim.displace(self._retry_after(ahead), more_urgent=victim.priority > priority)
            self.pump()  # they may have stood before one that fits
        self._pending += samples
        self._tickets[id(ticket)] = ticket
        return ticket

    def _check_wait(self, client: str, priority: int) -> None:
        ahead = self._queue.ahead_of(client, priority)
        if not ahead:
            return
        wait = self._pace.seconds_for(ahead + 1, self._clock())
        if wait is not None and wait > _SURE * self._max_wait:
            raise QueueFullError(
                f"{ahead} requests wait before this one, which is {wait:.0f} s at the present pace; "
                f"a request may wait {self._max_wait:.0f} s",
                leg=Leg.ROUTER,
                reason="WAIT_TOO_LONG",
                retry_after=_bounded(wait - _SURE * self._max_wait),
            )

    def _victims(self, newcomer: Ticket, places: int) -> list[tuple[Ticket, int]]:
        """Whom to send away for so many places, each with what will be before it when it comes again: of the least
        urgent class the newest waiting requests of those with the most in it. Of the newcomer's own class only for
        a client with less there; nobody when that is not enough."""
        waiting: Counter[tuple[int, str]] = Counter()
        for ticket in self._tickets.values():
            waiting[ticket.priority, ticket.client] += ticket.left
        newest = [ticket for ticket in reversed(self._tickets.values()) if not ticket.started]
        found: list[tuple[Ticket, int]] = []
        own = newcomer.priority
        while places > 0:
            least = max((ticket.priority for ticket in newest), default=own)
            if least < own:
                return []
            there = [t.client for t in (newest if least > own else self._tickets.values()) if t.priority == least]
            heaviest = max(there, key=lambda c: waiting[least, c], default=newcomer.client)
            victim = next((t for t in newest if (t.priority, t.client) == (least, heaviest)), None)
            weight = waiting[least, heaviest]
            if victim is None or (least == own and weight <= waiting[own, newcomer.client] + newcomer.left):
                return []
            found.append((victim, weight if least == own else self._pending))
            newest.remove(victim)
            waiting[least, heaviest] -= victim.left
            places -= victim.left
        return found

    def _retry_after(self, ahead: int) -> float:
        seconds = self._pace.seconds_for(max(ahead, 1), self._clock())
        return _RETRY_AFTER if seconds is None else _bounded(seconds)

    # ---- slots ------------------------------------------------------------------------------------

    def _fits(self, demand: Demand) -> bool:
        if not self._in_flight:
            return True
        room = self._room()
        return (
            self._in_flight < self._max_in_flight
            and (room.requests is None or self._in_flight < room.requests)
            and (
                room.decode_tokens is None or self._decode_tokens + demand.prompt + demand.output <= room.decode_tokens
            )
            and (
                room.prefill_tokens is None
                or not self._prompts.tokens
                or self._prompts.tokens + demand.prompt <= room.prefill_tokens
            )
            and (
                room.prompt_workers is None
                or self._prompts.fits(demand.prompt, room.prompt_workers, self._prompts_ahead, self._clock())
            )
        )

    def _start(self, slot: Slot) -> None:
        self._in_flight += 1
        self._decode_tokens += slot.demand.prompt + slot.demand.output
        self._prompts.begin(slot.demand.prompt)
        slot.ticket.begin()

    def _leave(self, slot: Slot) -> None:
        self._in_flight -= 1
        self._decode_tokens -= slot.demand.prompt + slot.demand.output
        self._prompt_done(slot, first_token=False)

    def _prompt_done(self, slot: Slot, *, first_token: bool) -> None:
        if slot.in_prefill:
            slot.in_prefill = False
            self._prompts.end(slot.demand.prompt, self._clock(), first_token=first_token)
        self.pump()

    def pump(self) -> None:
        """Gives slots to those whose turn it is, while they fit. Call it when workers have come."""
        while (slot := self._queue.peek()) is not None and self._fits(slot.demand):
            self._queue.pop()
            assert slot.waiter is not None
            if not slot.waiter.done():
                self._pace.turn(self._clock())
                self._start(slot)
                slot.waiter.set_result(None)
        if not len(self._queue):
            self._pace.idle()


class Ticket:
    """One admitted request. Close it when the request ends, whatever became of its samples."""

    def __init__(self, admission: Admission, samples: int, client: str, priority: int) -> None:
        self._admission, self.left, self.client, self.priority = admission, samples, client, priority
        self.started = False
        self._waiting: list[Slot] = []
        self._displaced: QueueFullError | None = None

    def slot(self, timeout: float, demand: Demand = Demand(), longest: float = 0.0) -> Slot:  # noqa: B008  # immutable
        """A context that holds a slot for one sample. Entering it raises QueueFullError after `timeout` seconds
        of waiting, or when another request takes the place. Once one of the request's samples has run,
        giving up would waste that: then the others wait for `longest` seconds, if that is more."""
        return Slot(self._admission, self, timeout, demand, max(timeout, longest))

    def begin(self) -> None:
        """One of its samples has a slot."""
        self._take(1)
        if not self.started:
            self.started = True
            for slot in self._waiting:
                slot.wait_longer()

    def close(self) -> None:
        """Gives back the places of samples that never ran."""
        self._take(self.left)
        self._admission._tickets.pop(id(self), None)

    def displace(self, retry_after: float, *, more_urgent: bool) -> None:
        """Ends the wait of all its samples with a 429."""
        others = "more urgent ones" if more_urgent else "others that ask for less"
        self._displaced = QueueFullError(
            f"{others} took this request's place in the full queue; try again later",
            leg=Leg.ROUTER,
            reason="DISPLACED",
            retry_after=retry_after,
        )
        self.close()
        for slot in self._waiting:
            self._admission._queue.remove(slot)
            if slot.waiter is not None and not slot.waiter.done():
                slot.waiter.set_exception(self._displaced)

    def check(self) -> None:
        """Raises what displaced it."""
        if self._displaced is not None:
            raise self._displaced

    def _take(self, samples: int) -> None:
        samples = min(samples, self.left)
        self.left -= samples
        self._admission._pending -= samples


class Slot:
    """One sample's turn."""

    def __init__(self, admission: Admission, ticket: Ticket, timeout: float, demand: Demand, longest: float) -> None:
        self._admission, self.ticket, self.demand = admission, ticket, demand
        self._timeout, self._longest = timeout, longest
        self.waiter: asyncio.Future[None] | None = None
        self._since = 0.0
        self._limit: asyncio.Timeout | None = None
        self.in_prefill = True

    def first_token(self) -> None:
        """Its prompt has left prefill's pool."""
        if self.in_prefill:
            self._admission._prompt_done(self, first_token=True)

    def wait_longer(self) -> None:
        """A sibling has run."""
        self._timeout = self._longest
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(self._since + self._timeout)

    async def __aenter__(self) -> None:
        admission = self._admission
        self.ticket.check()
        if not len(admission._queue) and admission._fits(self.demand):
            admission._start(self)
        else:
            await self._wait()

    async def _wait(self) -> None:
        admission, ticket, loop = self._admission, self.ticket, asyncio.get_running_loop()
        self.waiter = loop.create_future()
        admission._queue.push(self, ticket.client, self.demand.prompt + self.demand.output or 1, ticket.priority)
        ticket._waiting.append(self)
        self._since = loop.time()
        if ticket.started:
            self.wait_longer()
        if admission._queue.peek() is self:
            admission.pump()  # it may fit where the one before it does not
        try:
            async with asyncio.timeout_at(self._since + self._timeout) as self._limit:
                await self.waiter
        except BaseException as exc:
            if admission._queue.remove(self):
                admission.pump()  # it may have stood before one that fits
            elif self.waiter.done() and not self.waiter.cancelled() and self.waiter.exception() is None:
                admission._leave(self)  # the slot came and the wait was given up in the same moment
            if isinstance(exc, TimeoutError):
                raise QueueFullError(
                    f"no slot became free within {self._timeout:.0f} s",
                    leg=Leg.ROUTER,
                    reason="QUEUE_TIMEOUT",
                    retry_after=admission._retry_after(admission._pending),
                ) from None
            raise
        finally:
            self._limit = None
            ticket._waiting.remove(self)

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._admission._leave(self)


def _bounded(seconds: float) -> float:
    return min(max(math.ceil(seconds), _RETRY_AFTER), _RETRY_MOST)
