"""Closed and open loops against a server that answers by script."""

from __future__ import annotations

import asyncio
from typing import Any

from services.bench.arrivals import Arrival
from services.bench.client import Client, Connection
from services.bench.lengths import parse_lengths
from services.bench.outcome import Objectives
from services.bench.plan import RunOptions
from services.bench.report import Level
from services.bench.runner import Runner
from services.bench.tally import Tally
from services.bench.workload import Calibration, Shape
from services.runtime.tasks import Stop
from tests.support.scripted_http import Exchange, ScriptedServer

SHAPE = Shape(parse_lengths("6", "p"), parse_lengths("2", "o"), seed=4)


async def two_tokens(exchange: Exchange) -> None:
    await exchange.start()
    await exchange.text("one")
    await exchange.text(" two", finish_reason="length")
    await exchange.done(6, 2)


class Busy:
    """Answers after a pause, and counts who is there at once."""

    def __init__(self, pause: float = 0.02) -> None:
        self.pause, self.now, self.most = pause, 0, 0

    async def __call__(self, exchange: Exchange) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(self.pause)
        self.now -= 1
        await two_tokens(exchange)


async def levels_of(
    server: ScriptedServer, stop: Stop | None = None, tally: Tally | None = None, **given: Any
) -> list[Level]:
    options = RunOptions(**{"shape": SHAPE, "warmup": 0, "timeout": 20.0, "rows": True, **given})
    async with Client(Connection(server.url, "m", timeout=20.0)) as client:
        return await Runner(client, options, Calibration(), tally or Tally(), "run", stop or Stop()).run()


async def test_a_closed_loop_keeps_its_number_in_flight_and_sends_each_request_once() -> None:
    busy = Busy()
    async with ScriptedServer(busy) as server:
        first, second = await levels_of(server, concurrency=(1, 3), requests=9, warmup=2)
    assert (first.name, first.completed, first.in_flight_max) == ("1 in flight", 9, 1)
    assert (second.name, second.completed, second.in_flight_max) == ("3 in flight", 9, 3)
    assert busy.most == 3
    assert (first.tokens.prompt_exact, first.tokens.output_exact) == (9, 9)
    prompts = [request.body["prompt"] for request in server.requests]
    assert len(prompts) == 2 * (9 + 2) == len(set(prompts))
    ids = [request.header("x-request-id") for request in server.requests]
    assert ids[:3] == ["run-w0-0", "run-w0-1", "run-0-0"] and len(set(ids)) == len(ids)
    assert [slow.request_id in ids for slow in second.slowest] == [True] * 5


async def test_a_closed_loop_by_time_ends_though_its_requests_never_do() -> None:
    async with ScriptedServer(Busy()) as server:
        (level,) = await levels_of(server, concurrency=(2,), duration=0.5)
    assert level.completed == level.requests == len(server.requests) >= 1
    assert level.timeline


async def test_an_open_loop_does_not_wait_for_answers() -> None:
    """All requests arrive though none is answered before the last one is there."""
    there = asyncio.Event()

    async def answer(exchange: Exchange) -> None:
        if exchange.number == 7:
            there.set()
        await there.wait()
        await two_tokens(exchange)

    async with ScriptedServer(answer) as server:
        (level,) = await levels_of(server, rates=(200.0,), arrival=Arrival.CONSTANT, requests=8)
    assert (level.completed, level.in_flight_max) == (8, 8)
    assert [row.due_s for row in level.rows] == [round(i / 200, 5) for i in range(8)]
    assert all(row.sent_s >= row.due_s for row in level.rows)


async def test_the_wait_of_a_request_that_could_not_be_sent_counts() -> None:
    """One at a time, due all at once: each is sent when the one before it has ended, and is that late."""
    async with ScriptedServer(Busy()) as server:
        (level,) = await levels_of(
            server, rates=(100.0,), arrival=Arrival.BURSTS, burst_size=4, requests=4, max_in_flight=1,
            objectives=Objectives(e2e_ms=1e6),
        )  # fmt: skip
    rows = sorted(level.rows, key=lambda row: row.sent_s)
    assert len({row.due_s for row in rows}) == 1 and level.in_flight_max == 4
    ends = [row.due_s + row.latency_ms / 1e3 for row in rows]
    for before, row in zip(ends, rows[1:], strict=False):
        assert row.sent_s >= before - 1e-4 and row.ttft_ms is not None
        assert row.ttft_ms >= (row.sent_s - row.due_s) * 1e3 - 0.1 >= (before - row.due_s) * 1e3 - 0.3
    assert level.send_lag_ms.max is not None and level.send_lag_ms.max >= 3 * 20 - 5


async def test_429_is_no_error_and_is_sent_again_if_so_asked() -> None:
    async def answer(exchange: Exchange) -> None:
        if exchange.number % 2 == 0:
            await exchange.reply(429, {"error": {"message": "full"}}, retry_after="0")
        else:
            await two_tokens(exchange)

    async with ScriptedServer(answer) as server:
        (level,) = await levels_of(server, concurrency=(1,), requests=4)
        assert (level.completed, level.errors) == (2, 0)
        assert (level.rejections.answers, level.rejections.requests, level.rejections.retry_after_max_s) == (2, 2, 0.0)
    async with ScriptedServer(answer) as server:
        (level,) = await levels_of(server, concurrency=(1,), requests=4, retry_429=True)
        assert (level.completed, level.errors, len(server.requests)) == (4, 0, 8)
        assert (level.rejections.answers, level.rejections.requests) == (4, 0)
        assert [r.body for r in server.requests[::2]] == [r.body for r in server.requests[1::2]]


async def test_errors_do_not_end_a_level() -> None:
    async def answer(exchange: Exchange) -> None:
        await (exchange.reply(503, {"error": {"message": "no pair"}}) if exchange.number % 3 else two_tokens(exchange))

    tally = Tally()
    async with ScriptedServer(answer) as server:
        (level,) = await levels_of(server, tally=tally, concurrency=(2,), requests=9)
    assert (level.completed, level.errors) == (3, 6)
    assert level.error_kinds == {"server_error_503": 6} and level.error_examples == {
        "server_error_503": "HTTP 503: no pair"
    }
    assert (tally.completed, tally.errors, tally.over, tally.in_flight, tally.chunks) == (3, 6, 9, 0, 6)
    assert tally.finished == [level] and tally.phase == "done" and tally.last_error == "HTTP 503: no pair"


async def test_a_stop_keeps_what_has_ended_and_starts_nothing_more() -> None:
    stop = Stop()

    async def answer(exchange: Exchange) -> None:
        if exchange.number < 3:
            await two_tokens(exchange)
            return
        stop.request()
        await asyncio.sleep(20.0)

    async with ScriptedServer(answer) as server:
        found = await levels_of(server, stop=stop, concurrency=(1, 2), requests=50)
        assert len(server.requests) == 4
    (level,) = found
    assert (level.completed, level.errors, level.interrupted) == (3, 0, 1)
