"""What `priority` does in the router: whose turn it is, who makes place in a full queue, what the engines are told."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_core.types.errors import QueueFullError
from services.router.routing.admission import Admission, Demand, Room
from services.router.routing.fair_queue import FairQueue
from services.router.routing.priority import MOST_MS, STEP_MS, TURNS_FOR_ONE, PriorityQueue, order_ms
from tests.support.fake_decode import FakeDecode, Harness, Script, error_of, running_router, says, until
from tests.support.models import tiny_model
from tests.unit.router.test_overload import Held, settle, virtual

PRIORITIES = st.sampled_from([-(2**63), -3, 0, 1, 5, 2**63 - 1])


class Item:
    def __init__(self, client: str = "", priority: int = 0, cost: float = 1) -> None:
        self.client, self.priority, self.cost = client, priority, cost


def filled(items: Sequence[Item]) -> PriorityQueue[Item]:
    queue: PriorityQueue[Item] = PriorityQueue()
    for item in items:
        queue.push(item, item.client, item.cost, item.priority)
    return queue


class TestQueue:
    def test_lower_goes_first_whoever_sends_it(self) -> None:
        later, default, urgent = Item("a", 1), Item("a"), Item("crowd", -1)
        queue = filled([later, default, urgent])
        assert [queue.pop() for _ in range(3)] == [urgent, default, later]
        assert (len(queue), queue.peek()) == (0, None)
        with pytest.raises(IndexError):
            queue.pop()

    def test_one_turn_in_eight_is_for_those_behind(self) -> None:
        behind = [Item("a", 9), Item("a", 2), Item("a", 9)]
        queue = filled([*behind, *[Item("b") for _ in range(40)]])
        order = [queue.pop() for _ in range(43)]
        assert [order.index(item) + 1 for item in behind] == [8, 16, 24]  # by how long they have waited

    def test_an_unending_stream_of_urgent_ones_starves_nobody(self) -> None:
        behind = [Item(f"client {i % 3}", 1 + i % 5) for i in range(20)]
        queue, turns, left = filled(behind), 0, set(map(id, behind))
        while left:
            queue.push(Item("stream"), "stream", 1)
            left.discard(id(queue.pop()))
            turns += 1
        assert turns == 20 * TURNS_FOR_ONE

    def test_a_turn_that_is_due_to_those_behind_stays_theirs(self) -> None:
        """A large one at the head waits until it fits; nothing urgent that comes meanwhile goes before it."""
        large = Item("a", 1)
        queue = filled([large, *[Item("b") for _ in range(7)]])
        for _ in range(7):
            queue.pop()
        for _ in range(3):
            urgent = Item("b", -5)
            queue.push(urgent, "b", 1, -5)
            assert queue.peek() is large
        assert queue.pop() is large and queue.pop() is not large

    def test_clients_share_the_turns_of_their_class(self) -> None:
        crowd = [Item("crowd", 1) for _ in range(50)]
        one = Item("one", 1)
        queue = filled([*crowd, one, Item("crowd")])
        assert queue.ahead_of("other", 1) == 3
        assert queue.pop().priority == 0
        assert one in [queue.pop(), queue.pop()]

    def test_how_many_are_ahead(self) -> None:
        queue = filled([Item("a") for _ in range(5)] + [Item("a", 3), Item("b", 3)])
        assert [queue.ahead_of("a", p) for p in (-1, 0, 1, 3, 9)] == [0, 5, 5, 7, 7]
        many = filled([Item("a") for _ in range(500)])
        assert many.ahead_of("a", 1) == TURNS_FOR_ONE - 1  # it needn't wait for all of them

    @given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50)), max_size=40), PRIORITIES)
    def test_with_one_class_it_is_the_fair_queue(self, moves: list[tuple[str, int]], priority: int) -> None:
        fair: FairQueue[Item] = FairQueue()
        items = [Item(client, priority, cost) for client, cost in moves]
        queue = filled(items)
        for item in items:
            fair.push(item, item.client, item.cost)
        assert [queue.pop() for _ in items] == [fair.pop() for _ in items]

    @given(
        st.lists(
            st.one_of(
                st.tuples(st.just("push"), st.sampled_from("abc"), PRIORITIES),
                st.tuples(st.just("pop"), st.just(""), st.just(0)),
                st.tuples(st.just("remove"), st.just(""), st.integers(0, 30)),
            ),
            max_size=150,
        )
    )
    def test_nobody_is_lost_or_served_out_of_turn(self, moves: list[tuple[str, str, int]]) -> None:
        queue: PriorityQueue[Item] = PriorityQueue()
        there: list[Item] = []
        passed = 0
        for move, client, number in [*moves, *[("pop", "", 0)] * 150]:
            if move == "push":
                there.append(Item(client, number))
                queue.push(there[-1], client, 1, number)
                with pytest.raises(ValueError):
                    queue.push(there[-1], client, 1, number)
            elif move == "remove" and number < len(there):
                assert queue.remove(there[number])
                assert not queue.remove(there.pop(number))
            elif move == "pop" and there:
                best, worst = min(i.priority for i in there), max(i.priority for i in there)
                due = passed == TURNS_FOR_ONE - 1 and worst > best
                behind = next((i.priority for i in there if i.priority > best), best)  # who has waited longest
                item = queue.peek()
                assert item is queue.pop() and item is not None
                assert item.priority == (behind if due else best)
                passed = 0 if due or best == worst else passed + 1
                there.remove(item)
            assert len(queue) == len(there)
        assert not there


class TestEngineOrder:
    def test_a_step_counts_like_some_seconds_of_age(self) -> None:
        assert [order_ms(10**12, p) - 10**12 for p in (-(2**63), -2, 0, 1, 10, 11, 2**63 - 1)] == [
            -MOST_MS, -2 * STEP_MS, 0, STEP_MS, MOST_MS, MOST_MS, MOST_MS,
        ]  # fmt: skip
        assert order_ms(5, -1) == 1  # the wire knows no time before 1970

    @given(PRIORITIES, PRIORITIES, st.integers(2 * MOST_MS + 1, 10**6))
    def test_who_comes_much_later_never_goes_before(self, one: int, other: int, later: int) -> None:
        assert order_ms(10**12, one) < order_ms(10**12 + later, other)


def start(
    admission: Admission,
    priority: int,
    client: str = "",
    demand: Demand = Demand(1, 1),  # noqa: B008
    samples: int = 1,
) -> Held:
    """Asks for a slot for one sample of a request that has so many."""
    ticket = admission.admit(samples, client, priority)
    slot, release = ticket.slot(1000, demand), asyncio.Event()

    async def run() -> None:
        try:
            async with slot:
                await release.wait()
        finally:
            ticket.close()

    return Held(ticket, slot, asyncio.get_running_loop().create_task(run()), release)


async def end(*held: Held) -> None:
    await asyncio.gather(*(h.end() for h in held))


async def sent_away(held: Held) -> str:
    with pytest.raises(QueueFullError) as caught:
        await held.task
    assert caught.value.reason == "DISPLACED" and caught.value.retry_after >= 1
    return str(caught.value)


class TestFullQueue:
    async def test_the_newest_of_the_least_urgent_makes_place(self) -> None:
        admission = Admission(1, 4)
        running = start(admission, 9)
        await settle()
        older, newer, mine, urgent = (start(admission, p, "a") for p in (7, 7, 2, 0))
        await settle()
        default = start(admission, 2, "a")  # whoever it is from
        await settle()
        assert await sent_away(newer) == "more urgent ones took this request's place in the full queue; try again later"
        for less in (7, 8):
            with pytest.raises(QueueFullError):
                admission.admit(1, "a", less)
        next_one = start(admission, 1, "a")
        await settle()
        assert "more urgent" in await sent_away(older)
        with pytest.raises(QueueFullError):
            admission.admit(1, "a", 2)
        fair = start(admission, 2, "b")  # in one class, who has less there
        await settle()
        assert "ask for less" in await sent_away(default)
        assert (admission.in_flight, admission.queued) == (1, 4)
        assert not any(h.task.done() for h in (running, mine, urgent, next_one, fair))
        await end(running, mine, urgent, next_one, fair)
        assert (admission.in_flight, admission.queued) == (0, 0)

    async def test_within_the_least_urgent_class_the_heaviest_client_goes_first(self) -> None:
        admission = Admission(1, 4)
        held = [start(admission, 0), *[start(admission, 5, c) for c in ("crowd", "crowd", "crowd", "one")]]
        await settle()
        urgent = start(admission, 0)
        await settle()
        assert "more urgent" in await sent_away(held.pop(3))
        await end(*held, urgent)

    async def test_nobody_is_sent_away_in_vain_or_once_it_has_begun(self) -> None:
        admission = Admission(1, 2)
        held = [start(admission, 9), start(admission, 5), start(admission, 0)]
        await settle()
        with pytest.raises(QueueFullError):  # one place can be had, and two are asked for
            admission.admit(2, "other", 0)
        assert not any(h.task.done() for h in held)
        await end(*held)
        assert (admission.in_flight, admission.queued) == (0, 0)

    async def test_one_that_fits_does_not_wait_behind_a_less_urgent_one_that_does_not(self) -> None:
        admission = Admission(9, 9, room=lambda: Room(decode_tokens=100))
        running, large = start(admission, 0, demand=Demand(50, 0)), start(admission, 1, demand=Demand(80, 0))
        await settle()
        small = start(admission, 0, demand=Demand(20, 0))
        await settle()
        assert [h.runs for h in (running, large, small)] == [True, False, True]
        await end(running, large, small)
        assert (admission.in_flight, admission.queued, admission._decode_tokens) == (0, 0, 0)

    async def test_who_fits_starts_when_the_one_before_it_is_sent_away(self) -> None:
        admission = Admission(2, 3, room=lambda: Room(decode_tokens=100))
        running = start(admission, 0, demand=Demand(50, 0))
        await settle()
        large = start(admission, 5, "a", Demand(80, 0), samples=2)
        await settle()
        small = start(admission, 5, "b", Demand(20, 0))
        await settle()
        assert [h.runs for h in (large, small)] == [False, False]
        urgent = start(admission, 0, "c", samples=2)
        await settle()
        assert "more urgent" in await sent_away(large)
        assert small.runs
        await end(running, small, urgent)
        assert (admission.in_flight, admission.queued, admission._decode_tokens) == (0, 0, 0)

    def test_whom_the_wait_is_too_long_for(self) -> None:
        """Forty wait at a second each: that is too long behind them, and nothing before them."""

        async def ask() -> None:
            admission = Admission(1, 100, max_wait=20.0, clock=asyncio.get_running_loop().time)
            held = [start(admission, 1, "a") for _ in range(50)]
            for h in held[:10]:
                await asyncio.sleep(1)
                await h.end()
            with pytest.raises(QueueFullError) as caught:
                admission.admit(1, "a", 1)
            assert caught.value.reason == "WAIT_TOO_LONG"
            admission.admit(1, "a", 0).close()
            await end(*held[10:])

        virtual(ask())

    def test_under_three_times_the_load_the_urgent_hardly_wait_and_the_others_get_their_eighth(self) -> None:
        """One slot of a second. Each second comes one urgent request, and two that aren't."""

        async def load() -> tuple[float, Counter[str], int]:
            loop = asyncio.get_running_loop()
            admission = Admission(1, 30, clock=loop.time)
            waits, ends, longest = 0.0, Counter[str](), 0

            async def one(name: str, priority: int) -> None:
                nonlocal waits, longest
                asked = loop.time()
                ticket = None
                try:
                    ticket = admission.admit(1, name, priority)
                    async with ticket.slot(1e6):
                        if name == "urgent":
                            waits = max(waits, loop.time() - asked)
                        await asyncio.sleep(1)
                    ends[name] += 1
                except QueueFullError as exc:
                    ends[f"{name} {exc.reason}"] += 1
                finally:
                    if ticket is not None:
                        ticket.close()

            async with asyncio.TaskGroup() as group:
                for i in range(800):
                    if i % 8:  # seven of eight turns are theirs
                        group.create_task(one("urgent", 0))
                    group.create_task(one("later", 5))
                    group.create_task(one("later", 5))
                    await asyncio.sleep(1)
                    longest = max(longest, admission.queued)
            assert (admission.in_flight, admission.queued) == (0, 0)
            return waits, ends, longest

        waits, ends, longest = virtual(load())
        assert ends["urgent"] == 700 and set(ends) <= {"urgent", "later", "later DISPLACED", "later QUEUE_FULL"}
        assert waits <= 2 and longest <= 30
        assert 100 <= ends["later"] <= 135  # an eighth of 800 turns, and the queue that is left in the end


# ---- over HTTP --------------------------------------------------------------------------------------------

USER = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "default", "messages": USER, "max_tokens": 4},
    "/v1/completions": {"model": "default", "prompt": "hello", "max_tokens": 4},
    "/generate": {"text": "hello", "max_new_tokens": 4},
    "/v1/responses": {"model": "default", "input": "hello", "max_output_tokens": 4},
    "/v1/messages": {"model": "default", "messages": USER, "max_tokens": 4},
}


def held_until(go: asyncio.Event) -> Script:
    return lambda request: [go, *says([70])(request)]


async def ask(router: Harness, path: str, request_id: str, **more: Any) -> httpx.Response:
    return await router.http.post(path, json={**BODIES[path], **more}, headers={"x-request-id": request_id})


async def queued(router: Harness, count: int) -> None:
    async with asyncio.timeout(10):
        while f"pdmesh_router_queued {count}.0" not in (await router.http.get("/metrics")).text:
            pass


def order_of(fake: FakeDecode) -> list[str]:
    return [request.request.request_id for request in fake.requests]


async def test_every_api_waits_by_its_priority() -> None:
    go = asyncio.Event()
    fake = FakeDecode(held_until(go))
    async with running_router(tiny_model(), fake, max_in_flight=1) as router:
        asked = [asyncio.ensure_future(ask(router, "/generate", "first"))]
        await until(lambda: len(fake.requests) == 1)
        wanted = {"chat": 4, "completions": 3, "generate": None, "responses": 2, "messages": -7}  # the floor is 0
        for i, (path, (name, priority)) in enumerate(zip(BODIES, wanted.items(), strict=True)):
            asked.append(asyncio.ensure_future(ask(router, path, name, priority=priority)))
            await queued(router, i + 1)
        go.set()
        assert [(await r).status_code for r in asked] == [200] * 6
        assert order_of(fake) == ["first", "generate", "messages", "responses", "completions", "chat"]
        explained = (await router.http.get("/explain/responses")).json()["moves"]
        assert [m["reason"] for m in explained if m["to_state"] == "QUEUED"] == ["priority 2"]


async def test_all_samples_of_a_request_have_its_priority() -> None:
    go = asyncio.Event()
    fake = FakeDecode(held_until(go))
    async with running_router(tiny_model(), fake, max_in_flight=1) as router:
        first = asyncio.ensure_future(ask(router, "/generate", "first"))
        await until(lambda: len(fake.requests) == 1)
        many = asyncio.ensure_future(ask(router, "/v1/completions", "many", prompt=["a", "b"], n=2, priority=1))
        await queued(router, 4)
        one = asyncio.ensure_future(ask(router, "/v1/completions", "one"))
        await queued(router, 5)
        go.set()
        replies = [await r for r in (first, many, one)]
        assert [r.status_code for r in replies] == [200] * 3 and len(replies[1].json()["choices"]) == 4
        assert order_of(fake) == ["first", "one", *["many"] * 4]


async def test_the_operator_says_how_urgent_clients_may_be() -> None:
    """The engines order by arrival, which priorities move; one that steps back is sent away for one that doesn't."""
    go = asyncio.Event()
    fake = FakeDecode(held_until(go))
    async with running_router(tiny_model(), fake, max_in_flight=1, max_queued=1, priority_floor=-2) as router:
        first = asyncio.ensure_future(ask(router, "/generate", "first"))
        await until(lambda: len(fake.requests) == 1)
        later = asyncio.ensure_future(ask(router, "/v1/completions", "later", priority=1))
        await queued(router, 1)
        urgent = asyncio.ensure_future(ask(router, "/v1/completions", "urgent", priority=-9))
        refused = await later
        assert (refused.status_code, error_of(refused)["code"]) == (429, "displaced")
        assert int(refused.headers["retry-after"]) >= 1
        go.set()
        assert [(await r).status_code for r in (first, urgent)] == [200] * 2
        arrivals = {r.request.request_id: r.request.arrival_unix_ms for r in fake.requests}
        assert arrivals["first"] <= arrivals["urgent"] + 2 * STEP_MS <= time.time() * 1000
