"""Signals to `pdmesh serve` itself while requests run: two stages, exit codes, kill -9."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from engine_core.types.errors import UnavailableError
from services.cli import status as status_command
from tests.support.load import Answer, Ask, Load, check_ends, run_all, send
from tests.support.models import tiny_model
from tests.support.serving import LIMIT, Serving, until, until_gone

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """Sockets have short paths."""
    with tempfile.TemporaryDirectory(prefix="pdm-") as folder:
        yield Path(folder)


LONG = [Ask(tuple(range(3 + i, 40 + i)), 2400, stream=i != 2) for i in range(3)]
"""Long enough that a stop always finds them running."""


async def serving_dead(mesh: Serving) -> None:
    """The address is free again: nobody answers there."""
    with pytest.raises(UnavailableError):
        await status_command.collect(mesh.ready["bootstrap"], 2.0)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_the_first_signal_lets_streams_end_and_takes_no_new_ones(number: signal.Signals) -> None:
    async with Serving(tiny_model(), "--drain-timeout", "60", "--kv-tokens", "16384") as mesh:
        calm = await run_all(mesh.url, LONG)
        await mesh.until_quiet()
        async with httpx.AsyncClient(timeout=60.0, trust_env=False) as client:
            load = Load(mesh.url, LONG, width=3)
            async with load:
                await load.until(lambda: load.streaming(20) >= 2 and load.waiting() == 1, "streams run")
                mesh.signal(number)
                await until(lambda: mesh.said("serve", "stopping; once more"), "stopping", LIMIT)
                load.stop()
                refused: list[Answer] = []

                async def refuses() -> bool:
                    refused.append(await send(client, mesh.url, Ask((5, 6, 7), 2)))
                    return not refused[-1].ok

                await until(refuses, "new requests are refused", LIMIT)
                assert load.streaming() >= 1, "the streams ended before a new request was refused"
            assert refused[-1].status in (0, 503), str(refused[-1])
            assert await mesh.ended() == 0
        assert check_ends(load.answers, calm) == []
        assert len(load.answers) == 3
        await serving_dead(mesh)


@pytest.mark.slow
async def test_the_second_signal_ends_at_once(short_folder: Path) -> None:
    left = short_folder / f"pdmesh-serve-{2**31 - 1}-x"
    left.mkdir()
    (left / "kv-1.sock").touch()
    options = ("--drain-timeout", "60", "--kv-tokens", "16384")
    async with Serving(tiny_model(), *options, temporary=str(short_folder)) as mesh:
        assert not left.exists(), "what a killed one left is cleared by the next"
        await mesh.until_quiet()
        load = Load(mesh.url, LONG, width=3)
        async with load:
            await load.until(lambda: load.streaming(5) >= 2, "streams run")
            load.stop()
            mesh.signal(signal.SIGINT)
            await until(lambda: mesh.said("serve", "stopping; once more"), "stopping", LIMIT)
            mesh.signal(signal.SIGINT)
            second = time.monotonic()
            code = await mesh.ended(20.0)
            assert time.monotonic() - second < 10.0
        assert code in (0, 130)  # 130 when the children took so long to die that it was cancelled
        assert mesh.folders() == []
        assert all(a.over and not a.timed_out for a in load.answers)
        await serving_dead(mesh)


async def test_kill_leaves_no_process() -> None:
    async with Serving(tiny_model(), "--kv-tokens", "16384") as mesh:
        pids = await mesh.pids()
        assert sorted(pids) == ["bootstrap", "decode-0", "decode-0/engine", "prefill-0", "prefill-0/engine", "router"]
        load = Load(mesh.url, LONG, width=3)
        async with load:
            await load.until(lambda: load.streaming(5) >= 2, "streams run")
            load.stop()
            os.kill(mesh.pid, signal.SIGKILL)
            assert await mesh.ended() == -signal.SIGKILL
            await until_gone(pids.values())
        assert all(a.over and not a.timed_out for a in load.answers)
        assert any(a.broken for a in load.answers)
        await serving_dead(mesh)
