"""Admission under pressure: the room of the workers, who is refused or sent away, what they are told, and that
three times the load does not cost goodput. The loop's clock is virtual where time matters."""

from __future__ import annotations

import asyncio
import heapq
import random
from collections import Counter
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

from engine_core.lifecycle.membership import MembershipState
from engine_core.types.errors import QueueFullError
from engine_core.types.ids import RankCoord
from engine_core.types.request import Role
from services.router.routing.admission import NO_LIMIT, Admission, Demand, Pace, Prompts, Room, Slot, Ticket, room_of
from services.wire.bootstrap import InstanceSpec, RankRow

T = TypeVar("T")


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def row(name: str, role: Role, *, kv: int = 1000, running: int = 8, **more: object) -> RankRow:
    spec = InstanceSpec(name, role, "f", tokenizer_digest="t", kv_capacity_tokens=kv, max_running=running)
    state = more.get("state", MembershipState.READY)
    assert isinstance(state, MembershipState)
    return RankRow(spec, RankCoord(), f"{name}:1", 1, state=state)


class TestRoom:
    def test_sums_of_what_is_ready(self) -> None:
        rows = [
            row("p0", Role.PREFILL, kv=500),
            row("p1", Role.PREFILL, kv=500),
            row("d0", Role.DECODE),
            row("d1", Role.DECODE, state=MembershipState.DRAINING),
        ]
        assert room_of(rows, "t", 1.25) == Room(10, 1250, 1250, 2)

    def test_none_is_no_limit(self) -> None:
        assert room_of([], "t", 1.25) == NO_LIMIT
        assert room_of([row("d0", Role.DECODE)], "other", 1.25) == NO_LIMIT
        assert room_of([row("d0", Role.DECODE)], "t", 0) == NO_LIMIT

    def test_lost_rows_count_while_there_are_no_others(self) -> None:
        lost = row("d0", Role.DECODE, state=MembershipState.LOST)
        assert room_of([lost], "t", 1.0) == Room(8, 1000, None, 1)
        assert room_of([lost, row("d1", Role.DECODE, running=3)], "t", 1.0) == Room(3, 1000, None, 1)

    def test_a_worker_that_does_not_say_lifts_the_limit(self) -> None:
        rows = [row("d0", Role.DECODE, running=0), row("p0", Role.PREFILL, kv=0)]
        assert room_of(rows, "t", 1.0) == Room(None, 1000, None, 1)

    def test_mixed_rows_compute_prompts_beside_prefill(self) -> None:
        rows = [row("m0", Role.MIXED), row("d0", Role.DECODE), row("p0", Role.PREFILL, kv=10)]
        assert room_of(rows, "t", 1.0) == Room(16, 2000, None, 1)


@dataclass
class Held:
    ticket: Ticket
    slot: Slot
    task: asyncio.Task[None]
    release: asyncio.Event

    @property
    def runs(self) -> bool:
        return self.ticket.started and not self.task.done()

    async def end(self) -> None:
        self.release.set()
        await self.task


def start(admission: Admission, client: str = "", demand: Demand = Demand(1, 1), timeout: float = 100) -> Held:  # noqa: B008
    ticket = admission.admit(1, client)
    slot, release = ticket.slot(timeout, demand), asyncio.Event()

    async def run() -> None:
        try:
            async with slot:
                await release.wait()
        finally:
            ticket.close()

    return Held(ticket, slot, asyncio.get_running_loop().create_task(run()), release)


async def end(*held: Held) -> None:
    """Whoever has the slot: all may end."""
    await asyncio.gather(*(h.end() for h in held))


class TestPools:
    async def test_decode_tokens_bound_what_runs(self) -> None:
        admission = Admission(100, 100, room=lambda: Room(decode_tokens=100))
        a, b, c = (start(admission, demand=Demand(30, 20)) for _ in range(3))
        await settle()
        assert [h.runs for h in (a, b, c)] == [True, True, False]
        await a.end()
        await settle()
        assert c.runs
        await b.end()
        await c.end()
        assert (admission.in_flight, admission.queued) == (0, 0)

    async def test_prompts_count_in_prefill_until_token_1(self) -> None:
        admission = Admission(100, 100, room=lambda: Room(prefill_tokens=100))
        a, b = start(admission, demand=Demand(80, 1)), start(admission, demand=Demand(80, 1))
        await settle()
        assert (a.runs, b.runs) == (True, False)
        a.slot.first_token()
        a.slot.first_token()
        await settle()
        assert a.runs and b.runs
        await a.end()
        await b.end()
        assert admission._prompts.tokens == admission._prompts.waiting == admission._decode_tokens == 0

    async def test_one_larger_than_all_runs_alone(self) -> None:
        admission = Admission(100, 100, room=lambda: Room(1, 100, 100))
        huge, next_one = start(admission, demand=Demand(500, 500)), start(admission)
        await settle()
        assert (huge.runs, next_one.runs) == (True, False)
        await huge.end()
        await settle()
        assert next_one.runs
        await next_one.end()

    async def test_new_workers_let_more_in(self) -> None:
        room = Room(requests=1)
        admission = Admission(100, 100, room=lambda: room)
        held = [start(admission) for _ in range(3)]
        await settle()
        assert [h.runs for h in held] == [True, False, False]
        room = Room(requests=3)
        admission.pump()
        await settle()
        assert all(h.runs for h in held)
        await end(*held)


class TestPrompts:
    def test_a_few_for_each_worker_until_the_pace_is_known(self) -> None:
        prompts = Prompts()
        for count in range(8):
            assert prompts.fits(100, 2, 1.0, 0.0) == (count < 8)
            prompts.begin(100)
        assert not prompts.fits(100, 2, 1.0, 0.0)
        for i in range(4):
            assert prompts.pace(0.0) is None
            prompts.end(100, 1.0 + i, first_token=True)
        assert (prompts.waiting, prompts.tokens, prompts.pace(4.0)) == (4, 400, 100.0)
        assert not prompts.fits(1, 2, 4.0, 4.0) and prompts.fits(1, 2, 4.01, 4.0)  # four seconds of work are out
        assert prompts.fits(1, 3, 0.0, 4.0)  # two of each worker may always

    def test_a_pace_sinks_while_nothing_comes_and_is_forgotten_after_a_pause(self) -> None:
        prompts = Prompts()
        for _ in range(6):
            prompts.begin(10)
        for i in range(5):
            prompts.end(10, float(i), first_token=True)
        assert (prompts.pace(4.0), prompts.pace(40.0)) == (10.0, 1.0)
        prompts.end(10, 50.0, first_token=False)
        prompts.begin(10)
        assert prompts.pace(60.0) is None

    async def test_what_waits_for_token_1_waits_here(self) -> None:
        now = 0.0
        room = Room(prompt_workers=1)
        admission = Admission(100, 100, room=lambda: room, prompts_ahead=1.0, clock=lambda: now)
        held = [start(admission, demand=Demand(100, 1)) for _ in range(12)]
        await settle()
        assert [h.runs for h in held] == [True] * 4 + [False] * 8
        for i in range(6):
            now += 1.0
            held[i].slot.first_token()
            await settle()
        # 100 tokens a second: one second of them, and never less than two prompts.
        assert [h.runs for h in held] == [True] * 8 + [False] * 4
        await end(*held)
        assert (admission.in_flight, admission.queued, admission._prompts.waiting) == (0, 0, 0)


class TestFairness:
    async def test_one_waits_for_one_turn_and_not_for_a_crowd(self) -> None:
        admission = Admission(1, 100)
        crowd = [start(admission, "crowd") for _ in range(20)]
        await settle()
        one = start(admission, "one")
        await crowd[0].end()
        await settle()
        await crowd[1].end()  # its turn had come before "one" asked
        await settle()
        assert one.runs
        await end(one, *crowd[2:])

    async def test_the_newest_of_the_heaviest_makes_place(self) -> None:
        admission = Admission(1, 4)
        crowd = [start(admission, "crowd") for _ in range(5)]
        await settle()
        one = start(admission, "one")
        await settle()
        with pytest.raises(QueueFullError) as caught:
            await crowd[-1].task
        assert caught.value.reason == "DISPLACED" and caught.value.retry_after >= 1
        assert (admission.in_flight, admission.queued) == (1, 4)
        with pytest.raises(QueueFullError):  # the crowd itself may not
            admission.admit(1, "crowd")
        await end(*crowd[:-1], one)
        assert (admission.in_flight, admission.queued) == (0, 0)

    async def test_what_runs_is_never_sent_away(self) -> None:
        admission = Admission(2, 0)
        crowd = [start(admission, "crowd") for _ in range(2)]
        await settle()
        with pytest.raises(QueueFullError):
            admission.admit(1, "one")
        await end(*crowd)

    async def test_nobody_is_sent_away_in_vain(self) -> None:
        """A place for two would have to be taken from a client that then had no more in the queue than they."""
        admission = Admission(1, 3)
        crowd = [start(admission, "crowd") for _ in range(4)]
        await settle()
        with pytest.raises(QueueFullError):
            admission.admit(2, "two")
        assert not any(h.task.done() for h in crowd)
        await end(*crowd)

    async def test_who_just_got_a_slot_is_not_sent_away(self) -> None:
        """Its task has not run yet, but its place in the queue is free already."""
        admission = Admission(1, 3)
        first, *crowd = [start(admission, "crowd") for _ in range(4)]
        await settle()
        first.release.set()
        while not first.task.done():  # noqa: ASYNC110  (no later than that)
            await asyncio.sleep(0)
        granted = next(h for h in crowd if h.slot.waiter is not None and h.slot.waiter.done())
        assert granted is crowd[0] and (admission.in_flight, admission.queued) == (1, 2)
        one = start(admission, "one")  # takes the free place
        two = start(admission, "two")  # takes the newest's
        await settle()
        assert granted.runs and crowd[1].task.done() is False and crowd[2].task.done()
        with pytest.raises(QueueFullError):
            await crowd[2].task
        await end(*crowd[:2], one, two)
        assert (admission.in_flight, admission.queued) == (0, 0)


class TestManySamples:
    async def run(self, admission: Admission, samples: int, seconds: float, longest: float) -> float:
        """Runs a request's samples, each of `seconds`, with ten seconds in the queue; returns when all were done."""
        ticket = admission.admit(samples)

        async def one() -> None:
            async with ticket.slot(10.0, Demand(1, 1), longest=longest):
                await asyncio.sleep(seconds)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(samples):
                    group.create_task(one())
        finally:
            ticket.close()
        assert (admission.in_flight, admission.queued) == (0, 0)
        return asyncio.get_running_loop().time()

    def test_a_request_that_has_begun_waits_for_all_its_samples(self) -> None:
        assert virtual(self.run(Admission(2, 100), 20, 4.0, longest=600.0)) == pytest.approx(40.0)

    def test_until_its_deadline(self) -> None:
        with pytest.raises(ExceptionGroup) as caught:
            virtual(self.run(Admission(2, 100), 20, 4.0, longest=30.0))
        (failure, *_) = caught.value.exceptions
        assert isinstance(failure, QueueFullError) and failure.reason == "QUEUE_TIMEOUT"

    def test_one_that_has_not_begun_waits_as_long_as_any(self) -> None:
        async def behind() -> None:
            admission = Admission(1, 100)
            other = start(admission)
            await settle()
            with pytest.raises(ExceptionGroup) as caught:
                await self.run_beside(admission)
            assert asyncio.get_running_loop().time() == pytest.approx(10.0)
            assert all("within 10 s" in str(failure) for failure in caught.value.exceptions)
            await other.end()

        virtual(behind())

    async def run_beside(self, admission: Admission) -> None:
        ticket = admission.admit(3)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(3):
                    group.create_task(ticket.slot(10.0, Demand(1, 1), longest=600.0).__aenter__())
        finally:
            ticket.close()


class TestRetryAfter:
    def test_pace(self) -> None:
        pace = Pace()
        for i in range(7):
            pace.turn(float(i))
        assert pace.seconds_for(10, 7.0) is None
        pace.turn(7.0)
        assert pace.seconds_for(10, 8.0) == 10.0
        assert pace.seconds_for(10, 80.0) == 100.0  # nothing has left for long
        pace.idle()
        assert pace.seconds_for(10, 80.0) is None

    async def test_says_what_the_pace_says(self) -> None:
        now = 0.0
        admission = Admission(1, 12, clock=lambda: now)
        held = [start(admission) for _ in range(13)]
        await settle()
        for h in held[:10]:  # one each four seconds
            now += 4.0
            await h.end()
            await settle()
        more = [start(admission) for _ in range(10)]
        await settle()
        with pytest.raises(QueueFullError) as caught:
            admission.admit(1)
        assert admission.queued == 12
        assert caught.value.retry_after == pytest.approx(12 * 36 / 9, abs=1)
        await end(*held[10:], *more)

    async def test_a_wait_that_would_be_in_vain_is_refused_at_once(self) -> None:
        now = 0.0
        admission = Admission(1, 100, max_wait=20.0, clock=lambda: now)
        held = [start(admission) for _ in range(30)]
        await settle()
        for h in held[:10]:
            now += 2.0
            await h.end()
            await settle()
        with pytest.raises(QueueFullError) as caught:
            admission.admit(1)
        assert caught.value.reason == "WAIT_TOO_LONG"
        assert caught.value.retry_after == pytest.approx(20 * 2 - 16, abs=1)
        other = start(admission, "other")  # whose turn comes soon
        await settle()
        await end(*held[10:], other)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time passes only when nothing else is to do, and then at once."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self._now = max(self._now, self._scheduled[0].when())  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


def virtual(work: Coroutine[Any, Any, T]) -> T:
    """Runs it in virtual time."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()


@dataclass
class Offered:
    at: float
    client: str


def poisson(rate: float, seconds: float, client: str, seed: int) -> list[Offered]:
    rng, at, out = random.Random(seed), 0.0, []
    while (at := at + rng.expovariate(rate)) < seconds:
        out.append(Offered(at, client))
    return out


SERVICE = 2.0
PLACES = 8
CAPACITY = PLACES / SERVICE
PATIENCE = 10.0
"""Seconds from asking to the first token within which an answer is of use."""


async def offered(load: Iterable[Offered]) -> dict[str, Counter[str]]:
    """Serves a load with eight places of two seconds each; counts per client what became of it."""
    loop = asyncio.get_running_loop()
    admission = Admission(1000, 1000, room=lambda: Room(requests=PLACES), max_wait=8.0, clock=loop.time)
    ends: dict[str, Counter[str]] = {}

    async def one(asked: Offered) -> None:
        in_time = asked.at > 30  # the pace is known by then
        await asyncio.sleep(asked.at - loop.time())
        count = ends.setdefault(asked.client, Counter())
        ticket = None
        try:
            ticket = admission.admit(1, asked.client)
            async with ticket.slot(8.0, Demand(1, 1)):
                waited = loop.time() - asked.at
                await asyncio.sleep(SERVICE)
            count["good" if waited <= PATIENCE else "late"] += 1
        except QueueFullError as exc:
            count[exc.reason] += in_time
        finally:
            if ticket is not None:
                ticket.close()

    async with asyncio.TaskGroup() as group:
        for asked in heapq.merge(load, key=lambda a: a.at):
            group.create_task(one(asked))
    assert (admission.in_flight, admission.queued) == (0, 0)
    return ends


def serve(load: list[Offered]) -> dict[str, Counter[str]]:
    return virtual(offered(sorted(load, key=lambda a: a.at)))


@pytest.mark.parametrize("times", [1.5, 3.0, 10.0])
def test_goodput_stays_at_its_peak(times: float) -> None:
    seconds = 300.0
    peak = serve(poisson(CAPACITY, seconds, "", 1))[""]["good"]
    ends = serve(poisson(times * CAPACITY, seconds, "", 2))[""]
    assert ends["good"] >= 0.9 * max(peak, CAPACITY * seconds)
    assert not ends["late"]
    assert ends["QUEUE_TIMEOUT"] <= 0.01 * ends["good"]  # hardly anybody waited in vain


def test_a_modest_client_does_not_notice_a_flood() -> None:
    modest = poisson(0.2 * CAPACITY, 300.0, "modest", 3)
    ends = serve([*poisson(5 * CAPACITY, 300.0, "flood", 4), *modest])
    assert ends["modest"]["good"] >= 0.97 * len(modest)
    assert ends["flood"]["good"] >= 0.7 * CAPACITY * 300.0
