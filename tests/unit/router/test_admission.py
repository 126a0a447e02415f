"""Slots, the bounded queue, and what happens to those who leave it."""

from __future__ import annotations

import asyncio

import pytest

from engine_core.types.errors import QueueFullError
from services.router.routing.admission import Admission, Ticket


async def hold(ticket: Ticket, entered: list[str], name: str, release: asyncio.Event) -> None:
    async with ticket.slot(10):
        entered.append(name)
        await release.wait()
    ticket.close()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_slots_go_first_come_first_served() -> None:
    admission = Admission(1, 2)
    entered: list[str] = []
    releases = [asyncio.Event() for _ in range(3)]
    async with asyncio.TaskGroup() as group:
        for i, release in enumerate(releases):
            group.create_task(hold(admission.admit(1), entered, f"{i}", release))
        await settle()
        assert (entered, admission.in_flight, admission.queued) == (["0"], 1, 2)
        with pytest.raises(QueueFullError) as caught:
            admission.admit(1)
        assert caught.value.retry_after > 0
        for i, release in enumerate(releases):
            release.set()
            await settle()
            assert entered == ["0", "1", "2"][: i + 2]
    assert (admission.in_flight, admission.queued) == (0, 0)


async def test_a_request_larger_than_all_is_taken_alone() -> None:
    admission = Admission(1, 1)
    ticket = admission.admit(5)
    with pytest.raises(QueueFullError):
        admission.admit(1)
    ticket.close()
    assert admission.queued == 0
    admission.admit(1).close()


async def test_a_cancelled_waiter_leaves_the_queue() -> None:
    admission = Admission(1, 5)
    entered: list[str] = []
    release = asyncio.Event()
    first = asyncio.ensure_future(hold(admission.admit(1), entered, "first", release))
    ticket = admission.admit(1)
    second = asyncio.ensure_future(hold(ticket, entered, "second", release))
    await settle()
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    ticket.close()
    assert admission.queued == 0
    release.set()
    await first
    assert admission.in_flight == 0


async def test_a_slot_that_comes_with_the_cancel_is_passed_on() -> None:
    admission = Admission(1, 5)
    entered: list[str] = []
    releases = [asyncio.Event() for _ in range(3)]
    tickets = [admission.admit(1) for _ in range(3)]
    tasks = [asyncio.ensure_future(hold(t, entered, f"{i}", releases[i])) for i, t in enumerate(tickets)]
    await settle()
    releases[0].set()
    await asyncio.sleep(0)  # the first has left, its slot is on the way to the second
    tasks[1].cancel()
    await settle()
    tickets[1].close()
    assert entered == ["0", "2"]
    releases[2].set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (admission.in_flight, admission.queued) == (0, 0)


async def test_waiting_ends_at_the_limit() -> None:
    admission = Admission(1, 5)
    with pytest.raises(QueueFullError) as caught:
        async with admission.admit(1).slot(10), admission.admit(1).slot(0.01):
            pass
    assert caught.value.reason == "QUEUE_TIMEOUT"
    assert admission.in_flight == 0
