"""The engine client against a real process that speaks the frames."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engine_core.host import frames
from engine_core.lifecycle.machine import Move
from engine_core.types.errors import ConfigError, FencedError, InternalError, Leg, UnavailableError
from engine_core.types.ids import Incarnation, SessionId
from engine_core.types.kv import KvLayout
from engine_core.types.request import Finish, FinishReason, GenerateSpec
from engine_core.types.sampling import SamplingParams, TokenLogprobs
from services.worker.engine_client import EngineClient
from services.worker.session_handle import MAX_ITEMS, SessionHandle
from tests.support import fake_engine
from tests.support.worker_pair import until

PROMPT = (11, 12, 13)


def spec(room: int = 1, request_id: str = "", max_tokens: int = 5) -> GenerateSpec:
    return GenerateSpec(
        session=SessionId(room),
        request_id=request_id,
        prompt_token_ids=PROMPT,
        sampling=SamplingParams(max_tokens=max_tokens),
        arrival_ms=1,
        deadline=time.monotonic() + 60,
    )


@asynccontextmanager
async def engine(watchdog: float = 30.0, **script: Any) -> AsyncIterator[EngineClient]:
    moves: list[Move] = []
    client = EngineClient(
        {},
        Incarnation(7),
        "d-0",
        leg=Leg.DECODE,
        command=fake_engine.command(**script),
        watchdog_timeout=watchdog,
        ready_timeout=20.0,
        on_moves=moves.extend,
    )
    client.seen_moves = moves  # type: ignore[attr-defined]
    try:
        await client.start()
        yield client
    finally:
        await client.close()
        assert client.open_sessions == 0
        assert not Path(f"/proc/{client.pid}").exists()


async def collect(handle: SessionHandle) -> tuple[list[int], frames.SessionOutput]:
    tokens: list[int] = []
    async with asyncio.timeout(10):
        while True:
            item = await handle.next()
            assert isinstance(item, frames.SessionOutput)
            assert item.first_index == len(tokens)
            tokens.extend(item.token_ids)
            if item.finish is not None or item.error is not None:
                return tokens, item


async def test_session_runs_and_ends_once(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    async with engine(journal=str(journal)) as client:
        handle = client.open(frames.Open(spec=spec(), remote=False))
        tokens, last = await collect(handle)
        assert tokens == [11, 12, 13, 11, 12]
        assert last.finish is not None and last.finish.reason is FinishReason.LENGTH
        handle.end("finished")
        handle.end("again")
        handle.send(frames.LegStarted(session=SessionId(1)))
        await until(lambda: "EndSession" in journal.read_text())
        await until(lambda: client.stats is not None and client.stats.sessions == 0)
        assert client.seen_moves[0].reason == "opened"  # type: ignore[attr-defined]
        assert client.progressing()
    lines = journal.read_text().splitlines()
    assert [line for line in lines if line.startswith("EndSession")] == [f"EndSession {SessionId(1)} finished"]
    assert not [line for line in lines if line.startswith("LegStarted")]


async def test_same_session_twice_is_fenced() -> None:
    async with engine() as client:
        handle = client.open(frames.Open(spec=spec(request_id="hold:d.open"), remote=False))
        with pytest.raises(FencedError):
            client.open(frames.Open(spec=spec(), remote=False))
        handle.end("done")


async def test_startup_failure_is_one_line_of_config_error() -> None:
    client = EngineClient(
        {}, Incarnation(7), "d-0", leg=Leg.DECODE, command=fake_engine.command(startup_error="no tensor lm_head")
    )
    with pytest.raises(ConfigError, match="^no tensor lm_head$"):
        await client.start()
    assert client.death is not None


async def test_slow_start_is_given_up() -> None:
    client = EngineClient(
        {}, Incarnation(7), "d-0", leg=Leg.DECODE, command=fake_engine.command(ready_delay=60), ready_timeout=0.5
    )
    with pytest.raises(UnavailableError, match="not ready within"):
        await client.start()
    assert not Path(f"/proc/{client.pid}").exists()


async def test_missing_program_is_config_error() -> None:
    client = EngineClient({}, Incarnation(7), "d-0", leg=Leg.DECODE, command=("/nonexistent/python",), ready_timeout=20)
    with pytest.raises(ConfigError, match="could not be started"):
        await client.start()


async def test_killed_engine_fails_every_session_and_waiter_at_once() -> None:
    async with engine() as client:
        handles = [client.open(frames.Open(spec=spec(room, "hold:d.open"), remote=False)) for room in (1, 2, 3)]
        waiter = asyncio.ensure_future(client.wait_link(5, 30))
        readers = [asyncio.ensure_future(handle.next()) for handle in handles]
        await asyncio.sleep(0)
        os.kill(client.pid, signal.SIGKILL)
        async with asyncio.timeout(5):
            results = await asyncio.gather(*readers, waiter, return_exceptions=True)
            await client.dead.wait()
        assert all(isinstance(r, UnavailableError) and r.leg is Leg.DECODE for r in results)
        assert {r.reason for r in results if isinstance(r, UnavailableError)} == {"ENGINE_DIED"}
        with pytest.raises(UnavailableError):
            client.open(frames.Open(spec=spec(9), remote=False))
        assert not client.progressing()
        for handle in handles:
            handle.end("cleanup")


@pytest.mark.parametrize(
    ("number", "reasons"),
    [
        (signal.SIGSEGV, ["ENGINE_CRASHED", "ENGINE_DIED", "ENGINE_CRASHED"]),
        (signal.SIGABRT, ["ENGINE_CRASHED", "ENGINE_DIED", "ENGINE_CRASHED"]),
        (signal.SIGKILL, ["ENGINE_DIED"] * 3),
        (signal.SIGTERM, ["ENGINE_DIED"] * 3),
    ],
)
async def test_a_crash_is_told_to_those_whose_step_it_was(number: signal.Signals, reasons: list[str]) -> None:
    async with engine(in_step=[1, 3]) as client:
        handles = [client.open(frames.Open(spec=spec(room, "hold:d.open"), remote=False)) for room in (1, 2, 3)]
        os.kill(client.pid, number)
        async with asyncio.timeout(10):
            results = await asyncio.gather(*(handle.next() for handle in handles), return_exceptions=True)
        assert [r.reason for r in results if isinstance(r, UnavailableError)] == reasons
        assert client.death == f"engine ended with signal {number.value}"
        for handle in handles:
            handle.end("cleanup")


@pytest.mark.parametrize(("stopped", "reason"), [(False, "ENGINE_CRASHED"), (True, "ENGINE_DIED")])
async def test_a_step_that_never_ends_is_a_crash_and_a_stopped_process_is_none(stopped: bool, reason: str) -> None:
    async with engine(watchdog=0.5, in_step=[1]) as client:
        handle = client.open(frames.Open(spec=spec(request_id="mute:d.open"), remote=False))
        if stopped:
            os.kill(client.pid, signal.SIGSTOP)
        with pytest.raises(UnavailableError, match="no frame for 0.5 s") as caught:
            async with asyncio.timeout(10):
                await handle.next()
        assert caught.value.reason == reason
        handle.end("cleanup")


async def test_silent_engine_is_killed_by_the_watchdog() -> None:
    async with engine(watchdog=0.5) as client:
        handle = client.open(frames.Open(spec=spec(request_id="mute:d.open"), remote=False))
        with pytest.raises(UnavailableError, match="no frame for 0.5 s"):
            async with asyncio.timeout(10):
                await handle.next()
        await until(lambda: not Path(f"/proc/{client.pid}/exe").exists())
        handle.end("cleanup")


async def test_stopped_engine_that_ignores_shutdown_is_killed() -> None:
    async with engine(ignore_shutdown=True) as client:
        await client.close(grace=0.1)
    assert client.death == "engine closed"


async def test_slow_reader_costs_one_item() -> None:
    async with engine() as client:
        handle = client.open(frames.Open(spec=spec(request_id="burst:d.decoding", max_tokens=500), remote=False))
        await until(lambda: handle.merged >= 499)
        async with asyncio.timeout(5):
            item = await handle.next()
        assert isinstance(item, frames.SessionOutput)
        assert item.token_ids == tuple(fake_engine.echo(PROMPT, i) for i in range(500))
        assert item.finish is not None
        handle.end("finished")


async def test_link_errors_name_the_transfer_leg() -> None:
    async with engine(link_error="no such thing") as client:
        seen: list[frames.LinkUp | frames.LinkDown] = []
        client.add_link_listener(seen.append)
        frame = frames.ConnectLink(5, Incarnation(9), "d-1", KvLayout((), 0), ())
        with pytest.raises(UnavailableError, match="no such thing") as caught:
            await client.connect_link(frame, 10)
        assert caught.value.leg is Leg.TRANSFER
        assert [type(frame) for frame in seen] == [frames.LinkDown]
        with pytest.raises(UnavailableError, match="was not up within"):
            await client.wait_link(6, 0.01)


def _handle() -> tuple[SessionHandle, list[frames.ToEngine], list[str]]:
    sent: list[frames.ToEngine] = []
    ends: list[str] = []
    return SessionHandle(SessionId(1), Leg.DECODE, sent.append, lambda _, reason: ends.append(reason)), sent, ends


def _out(first: int, *tokens: int, **more: Any) -> frames.SessionOutput:
    return frames.SessionOutput(SessionId(1), first, tokens, **more)


async def test_outputs_with_a_gap_are_not_merged() -> None:
    handle, _, _ = _handle()
    handle.give(_out(0, 5))
    handle.give(_out(1, 6))
    handle.give(_out(3, 7))
    assert await handle.next() == _out(0, 5, 6)
    assert await handle.next() == _out(3, 7)


async def test_failure_keeps_tokens_and_drops_control() -> None:
    handle, _, _ = _handle()
    handle.give(frames.OpenLeg(session=SessionId(1)))
    handle.give(_out(0, 5))
    handle.give(_out(1, 6))
    handle.fail(UnavailableError("gone"))
    handle.give(_out(2, 7))
    assert await handle.next() == _out(0, 5, 6)
    with pytest.raises(UnavailableError):
        await handle.next()


def _scores(first: int, count: int = 1) -> frames.PromptLogprobs:
    return frames.PromptLogprobs(
        SessionId(1), first, tuple(TokenLogprobs(i, -1.0, 1) for i in range(first, first + count))
    )


async def test_many_prompt_positions_wait_as_one_item() -> None:
    handle, _, _ = _handle()
    handle.give(frames.Started(session=SessionId(1)))
    for first in range(1, 50 * MAX_ITEMS):
        handle.give(_scores(first))
    assert handle.merged == 50 * MAX_ITEMS - 2
    assert isinstance(await handle.next(), frames.Started)
    handle.give(_scores(50 * MAX_ITEMS))
    assert await handle.next() == _scores(1, 50 * MAX_ITEMS)
    handle.give(_scores(50 * MAX_ITEMS + 1, 2))
    handle.give(frames.OpenLeg(session=SessionId(1)))
    handle.give(_scores(50 * MAX_ITEMS + 3))
    assert await handle.next() == _scores(50 * MAX_ITEMS + 1, 2)
    assert isinstance(await handle.next(), frames.OpenLeg)
    assert await handle.next() == _scores(50 * MAX_ITEMS + 3)


async def test_positions_with_a_gap_are_not_merged_and_are_bounded() -> None:
    handle, _, _ = _handle()
    handle.give(_scores(1))
    handle.give(_scores(3))
    assert await handle.next() == _scores(1)
    for first in range(5, 5 + 2 * MAX_ITEMS + 2, 2):
        handle.give(_scores(first))
    for first in (3, *range(5, 3 + 2 * MAX_ITEMS, 2)):
        assert await handle.next() == _scores(first)
    with pytest.raises(InternalError):
        await handle.next()


async def test_merged_tokens_keep_what_belongs_to_them() -> None:
    handle, _, _ = _handle()
    each = [TokenLogprobs(i, -1.0, 1) for i in range(4)]
    for i in range(3):
        handle.give(_out(i, i, logprobs=(each[i],)))
    handle.give(_out(3, 3, logprobs=(each[3],), finish=Finish(FinishReason.LENGTH)))
    assert await handle.next() == _out(0, 0, 1, 2, 3, logprobs=tuple(each), finish=Finish(FinishReason.LENGTH))


async def test_failure_keeps_positions_before_the_tokens_that_it_keeps() -> None:
    handle, _, _ = _handle()
    handle.give(_scores(1))
    handle.give(_scores(2))
    handle.give(frames.Started(session=SessionId(1)))
    handle.give(_out(0, 5))
    handle.fail(UnavailableError("gone"))
    assert await handle.next() == _scores(1, 2)
    assert await handle.next() == _out(0, 5)
    with pytest.raises(UnavailableError):
        await handle.next()


async def test_queue_is_bounded() -> None:
    handle, _, _ = _handle()
    for _ in range(MAX_ITEMS + 1):
        handle.give(frames.Started(session=SessionId(1)))
    with pytest.raises(InternalError):
        await handle.next()
