"""Tasks have owners; a process stops in two stages."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal

import pytest

from engine_core.lifecycle.machine import Move
from engine_core.types.ids import SessionId
from services.runtime.tasks import Stop, TaskOwner, run, run_until_signalled
from services.runtime.telemetry import JsonFormatter, LoopLagMonitor, MoveRing, TextFormatter


async def test_tasks_remove_themselves_and_failures_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    failed: list[tuple[str, str]] = []
    owner = TaskOwner("o", on_error=lambda name, exc: failed.append((name, str(exc))))

    async def fine() -> int:
        return 7

    async def bad() -> None:
        raise ValueError("no")

    task = owner.spawn(fine(), "fine")
    owner.spawn(bad(), "bad")
    assert owner.count == 2
    assert await owner.join(5)
    assert (task.result(), owner.count, failed) == (7, 0, [("o/bad", "no")])
    assert [record.levelname for record in caplog.records if "o/bad" in record.getMessage()] == ["ERROR"]
    await owner.close()


async def test_close_cancels_and_waits() -> None:
    owner = TaskOwner("o")
    order: list[str] = []

    async def stays() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            order.append("ended")

    owner.spawn(stays(), "stays")
    await asyncio.sleep(0)
    assert not await owner.join(0)
    await owner.close()
    order.append("closed")
    assert order == ["ended", "closed"]
    assert owner.count == 0
    late = stays()
    with pytest.raises(RuntimeError, match="closed"):
        owner.spawn(late, "late")


async def test_two_signals_two_stages() -> None:
    seen: list[str] = []

    async def main(stop: Stop) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(stop.draining.wait(), 5)
        seen.append(f"draining now={stop.now.is_set()}")
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.wait_for(stop.now.wait(), 5)
        seen.append("now")
        return 3

    assert await run_until_signalled(main) == 3
    assert seen == ["draining now=False", "now"]


def test_run_returns_what_main_returns_and_uses_uvloop() -> None:
    async def main(stop: Stop) -> str:
        return type(asyncio.get_running_loop()).__module__

    assert run(main) == "uvloop"


def test_logs_carry_the_fields_that_were_given() -> None:
    record = logging.LogRecord("a.b", logging.INFO, "f", 1, "hello %s", ("you",), None)
    record.room, record.attempt = 5, 0
    parsed = json.loads(JsonFormatter("decode").format(record))
    assert {key: parsed[key] for key in ("level", "process", "logger", "message", "room", "attempt")} == {
        "level": "info", "process": "decode", "logger": "a.b", "message": "hello you", "room": 5, "attempt": 0,
    }  # fmt: skip
    assert "request_id" not in parsed
    assert TextFormatter("decode").format(record).endswith("I decode a.b: hello you room=5 attempt=0")


def test_lag_percentile_forgets_old_samples() -> None:
    monitor = LoopLagMonitor()
    assert monitor.p99() == 0.0
    for sample in range(2_000):
        monitor.record(sample)
    assert monitor.p99() == 1_989  # of 1,000 … 1,999


def test_ring_is_bounded_and_read_by_room() -> None:
    ring = MoveRing(size=4)
    moves = [
        Move("m", SessionId(room, 0), "A", "B", f"r{at}", float(at), 0.0) for at, room in enumerate([1, 2, 1, 3, 1])
    ]
    ring.extend(moves[:3])
    ring.log(moves[4])
    ring.log(moves[3])
    assert len(ring) == 4
    assert [entry.move.reason for entry in ring.find([1, 3])] == ["r2", "r3", "r4"]
    first, last = ring.find([1])
    assert last.unix_seconds - first.unix_seconds == pytest.approx(2.0, abs=1e-3)
