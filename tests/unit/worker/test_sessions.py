"""Attempts, superseding, draining."""

from __future__ import annotations

import asyncio

import pytest

from engine_core.types.errors import FencedError, Leg, PdmeshError, UnavailableError
from engine_core.types.ids import SessionId
from services.worker import sessions as sessions_module
from services.worker.sessions import SessionTable


def table() -> SessionTable:
    return SessionTable(Leg.DECODE, 77)


async def stay(made: SessionTable, session: SessionId, log: list[str]) -> None:
    with made.enter(session):
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            log.append(str(session))


async def test_lower_and_equal_attempts_are_refused_after_the_end_too() -> None:
    made = table()
    with made.enter(SessionId(1, 3)):
        assert len(made) == 1
    for attempt in (0, 3):
        with pytest.raises(FencedError) as caught:
            made.enter(SessionId(1, attempt))
        assert (caught.value.reason, caught.value.peer_incarnation) == ("STALE_ATTEMPT", 77)
    with made.enter(SessionId(1, 4)), made.enter(SessionId(2)):
        assert len(made) == 2
    assert (len(made), made.opened, made.fenced) == (0, 3, 2)


async def test_higher_attempt_ends_the_lower_with_an_error() -> None:
    made, log = table(), []  # type: ignore[var-annotated]
    lower = asyncio.ensure_future(stay(made, SessionId(1, 0), log))
    await asyncio.sleep(0)
    with made.enter(SessionId(1, 1)):
        assert len(made) == 2  # the lower one is still cleaning up
        with pytest.raises(FencedError) as caught:
            await lower
        assert caught.value.reason == "SUPERSEDED"
        assert not lower.cancelled()
        assert len(made) == 1
    assert log == [str(SessionId(1, 0))]


async def test_cancel_from_elsewhere_stays_a_cancel() -> None:
    made, log = table(), []  # type: ignore[var-annotated]
    task = asyncio.ensure_future(stay(made, SessionId(1), log))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(made) == 0


async def test_drain_refuses_and_waits_and_cut_ends() -> None:
    made, log = table(), []  # type: ignore[var-annotated]
    task = asyncio.ensure_future(stay(made, SessionId(1), log))
    await asyncio.sleep(0)
    made.drain("prefill-0 is draining")
    with pytest.raises(UnavailableError) as caught:
        made.enter(SessionId(2))
    assert (caught.value.reason, caught.value.retryable, made.refused) == ("DRAINING", True, 1)
    assert not await made.wait_idle(0.01)
    made.cut("gone", "HANDOVER")
    with pytest.raises(UnavailableError, match="gone"):
        await task
    assert await made.wait_idle(1.0)


async def test_abort_in_the_same_tick_as_the_end_leaves_no_cancel_behind() -> None:
    made, last = table(), asyncio.get_running_loop().create_future()
    scopes = []

    async def run() -> str:
        current = asyncio.current_task()
        assert current is not None
        try:
            with made.enter(SessionId(1)) as scope:
                scopes.append(scope)
                await last
        except PdmeshError as exc:
            await asyncio.sleep(0)
            return f"{exc}, {current.cancelling()} cancels left"
        return "ended"

    task = asyncio.ensure_future(run())
    await asyncio.sleep(0)
    last.set_result(None)
    scopes[0].abort(PdmeshError("too late"))
    assert await task == "too late, 0 cancels left"


async def test_remembered_rooms_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "ROOMS_KEPT", 2)
    made = table()
    with made.enter(SessionId(1, 5)):
        for room in (2, 3, 4):
            with made.enter(SessionId(room)):
                pass
        with pytest.raises(FencedError):  # forgotten, but still running
            made.enter(SessionId(1, 5))
    with made.enter(SessionId(2)):
        pass
