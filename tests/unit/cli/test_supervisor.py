"""Back-off, exit reasons, and real children: one that can't start, one that is killed."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from pathlib import Path

import pytest

from services.cli.handshake import Reporter, parse
from services.cli.supervisor import Backoff, ChildSpec, Exit, StartFailedError, Supervisor


def test_backoff_doubles_to_its_limit_and_starts_afresh() -> None:
    backoff = Backoff()
    assert [backoff.after(1.0) for _ in range(7)] == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert backoff.after(60.0) == 0.5
    assert backoff.after(59.9) == 1.0


def test_exits_in_words() -> None:
    assert Exit(3).reason == "exit code 3"
    assert Exit(-9).reason == "killed by SIGKILL"
    assert Exit(2, "no such model").reason == "no such model (exit code 2)"


def test_reporter_writes_events_that_parse() -> None:
    read_fd, write_fd = os.pipe()
    reporter = Reporter(write_fd)
    reporter.ready({"endpoint": "127.0.0.1:5", "pid": 7})
    assert reporter.failed("no", 2)
    lines = os.read(read_fd, 4096).splitlines()
    assert [parse(line) for line in lines] == [
        {"event": "ready", "endpoint": "127.0.0.1:5", "pid": 7},
        {"event": "failed", "message": "no", "exit_code": 2},
    ]
    os.close(read_fd)
    assert not reporter.failed("nobody listens", 1)
    os.close(write_fd)
    assert parse(b"not json") is None and parse(b"[1]") is None


async def test_a_child_that_cannot_start_ends_the_start() -> None:
    lines: list[tuple[str, str]] = []
    supervisor = Supervisor(lambda name, line: lines.append((name, line)))
    child = supervisor.add(ChildSpec("prefill-0", ("prefill", "--model", "/no/such/dir"), 1))
    with pytest.raises(StartFailedError) as caught:
        await supervisor.until_ready([child], 60.0)
    assert str(caught.value) == "prefill-0: model directory /no/such/dir does not exist"
    assert caught.value.end.code == 2
    assert lines == []  # the reason came by the handshake
    await supervisor.stop(asyncio.Event(), 5.0)


async def test_a_killed_child_is_reported_and_started_again_and_stop_ends_it() -> None:
    lines: list[tuple[str, str]] = []
    down: list[list[str]] = []
    supervisor = Supervisor(
        lambda name, line: lines.append((name, line)), on_change=lambda: down.append(supervisor.down)
    )
    child = supervisor.add(ChildSpec("bootstrap", ("bootstrap", "--port", "0"), 1))
    await supervisor.until_ready([child], 60.0)
    first = child.pid
    assert child.info["endpoint"].startswith("127.0.0.1:")

    child.signal(signal.SIGKILL)
    async with asyncio.timeout(60.0):
        await child.gone.wait()
        await child.ready.wait()
    assert ("bootstrap", "died: killed by SIGKILL; starts again in 0.5 s") in lines
    assert re.fullmatch(r"is ready again, \d+\.\d s after its end", lines[-1][1])
    assert down == [[], ["bootstrap"], []]
    second = child.pid
    assert second != first

    await supervisor.stop(asyncio.Event(), 20.0)
    assert child.pid == 0 and not Path(f"/proc/{second}").exists()
    assert not any("killed: it did not end in time" in line for _, line in lines)


async def test_a_stopped_child_is_killed() -> None:
    lines: list[tuple[str, str]] = []
    supervisor = Supervisor(lambda name, line: lines.append((name, line)), silence=4.0)
    child = supervisor.add(ChildSpec("bootstrap", ("bootstrap", "--port", "0"), 1))
    await supervisor.until_ready([child], 60.0)
    child.signal(signal.SIGSTOP)
    async with asyncio.timeout(60.0):
        await child.gone.wait()
        await child.ready.wait()
    assert any("no sign of life for 4 s (killed by SIGKILL)" in line for _, line in lines)
    await supervisor.stop(asyncio.Event(), 20.0)


async def test_a_child_that_was_told_to_end_stays_down() -> None:
    lines: list[tuple[str, str]] = []
    supervisor = Supervisor(lambda name, line: lines.append((name, line)))
    child = supervisor.add(ChildSpec("bootstrap", ("bootstrap", "--port", "0"), 1))
    await supervisor.until_ready([child], 60.0)
    child.signal(signal.SIGTERM)
    async with asyncio.timeout(60.0):
        await child.gone.wait()
        while ("bootstrap", "ended as it was told to; it stays down") not in lines:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert not any("starts again" in line for _, line in lines) and child.pid == 0
    await supervisor.stop(asyncio.Event(), 5.0)
