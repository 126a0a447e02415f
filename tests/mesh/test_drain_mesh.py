"""Drains of a mesh under load: by command and by SIGTERM, of decode and of prefill, and of the last pair."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx
import pytest
import pytest_asyncio

from engine_core.types.request import Role
from tests.support.asking import until_async
from tests.support.churn import assert_whole, changed, drained, some_asks
from tests.support.load import Ask, Load, run_all, send
from tests.support.mesh import Mesh
from tests.support.models import tiny_model

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

ASKS = some_asks(8, 300)


@dataclass
class Bench:
    """Two pairs, and what they give while nothing happens."""

    mesh: Mesh
    calm: dict[Ask, list[int]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench() -> AsyncIterator[Bench]:
    async with Mesh(tiny_model(), prefill=2, decode=2, options={"kv_tokens": 16384}) as mesh:
        yield Bench(mesh, await run_all(mesh.url, ASKS))


async def streams(mesh: Mesh, name: str) -> int:
    return int((await mesh.rank(name))["streams"])


@pytest.mark.parametrize("name", ["decode-0", pytest.param("prefill-0", marks=pytest.mark.slow)])
async def test_a_drain_hands_over_at_its_limit_and_nobody_notices(bench: Bench, name: str) -> None:
    mesh, role = bench.mesh, Role.DECODE if name.startswith("decode") else Role.PREFILL
    before = await mesh.rank(name)
    async with Load(mesh.url, ASKS, width=6) as load:
        await load.until(lambda: load.streaming(2) >= 4, "streams run")
        if role is Role.DECODE:
            await until_async(lambda: _some(mesh, name), 20.0)
        ordered = time.monotonic()
        await drained(mesh, name, limit=0.0)
        rank = await mesh.rank(name)
        assert (rank["state"], rank["table_state"], rank["health"]) == ("DRAINING", "DRAINING", "NOT_SERVING")
        assert (rank["drained"], rank["streams"], rank["sessions"], rank["pid"]) == (True, 0, 0, mesh.pid(name))
        assert rank["kv"]["free"] + rank["kv"]["cached"] == rank["kv"]["total"]
        await load.until(lambda: load.right_since(ordered) >= 4, "others go on")
        opened = (await mesh.rank(name))["counters"]["sessions_opened"]
        assert opened == rank["counters"]["sessions_opened"], "it took a session after it was drained"
        await changed(mesh, name, role)
        back = await mesh.rank(name)
        assert (back["state"], back["health"], back["role"]) == ("READY", "SERVING", role)
        assert back["incarnation"] > before["incarnation"] and back["engine_pid"] != before["engine_pid"]
        assert (back["pid"], back["endpoint"]) == (before["pid"], before["endpoint"])
        await until_async(lambda: _used(mesh, name), 30.0, lambda: f"{name} serves again")
    assert_whole(load.answers, tiny_model(), bench.calm)
    await mesh.quiet()


async def _some(mesh: Mesh, name: str) -> bool:
    return await streams(mesh, name) > 0


async def _used(mesh: Mesh, name: str) -> bool:
    return bool((await mesh.rank(name))["counters"]["sessions_opened"])


@pytest.mark.slow
async def test_sigterm_lets_streams_end_or_hands_them_over(bench: Bench) -> None:
    mesh = bench.mesh
    async with Load(mesh.url, ASKS, width=6) as load:
        await load.until(lambda: load.streaming(2) >= 4, "streams run")
        await until_async(lambda: _some(mesh, "decode-1"), 20.0)
        for name in ("decode-1", "prefill-1"):
            mesh.kill(name, signal.SIGTERM)
        ends = await asyncio.gather(mesh.gone("decode-1"), mesh.gone("prefill-1"))
        assert [end.code for end in ends] == [0, 0]
        ended = time.monotonic()
        assert {rank["instance"] for rank in (await mesh.status())["ranks"]} == {"decode-0", "prefill-0"}
        await load.until(lambda: load.right_since(ended) >= 4, "others go on")
        await asyncio.gather(mesh.start("decode-1"), mesh.start("prefill-1"))
    assert_whole(load.answers, tiny_model(), bench.calm)
    await mesh.quiet()


@pytest.mark.slow
async def test_the_last_pair_waits_for_its_streams_or_is_forced(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    """Forced, its stream waits for somebody who can take it up, and goes on when the worker is back. The engine
    stands still at each look, so that the stream is there."""
    mesh = bench.mesh
    await drained(mesh, "decode-1")
    engine = (await mesh.rank("decode-0"))["engine_pid"]
    ask = Ask(ASKS[0].prompt, 3500)
    async with httpx.AsyncClient(timeout=60.0, trust_env=False) as client:
        told: list[int] = []
        task = asyncio.ensure_future(send(client, mesh.url, ask, on_event=lambda a: told.append(len(a.token_ids))))
        await until_async(lambda: _told(told, 5), 20.0)
        try:
            os.kill(engine, signal.SIGSTOP)
            capsys.readouterr()
            await drained(mesh, "decode-0", limit=0.0, wait=False)
            said = "decode-0: drains 1 sessions\ndecode-0: no other pair of its fingerprint is ready"
            assert said in capsys.readouterr().out
            await until_async(lambda: _waits(mesh), 20.0)
            os.kill(engine, signal.SIGCONT)
            seen = len(told)
            await until_async(lambda: _told(told, seen + 20), 20.0)  # it was not handed over
            os.kill(engine, signal.SIGSTOP)
            await drained(mesh, "decode-0", limit=0.0, force=True, wait=False)
            await until_async(lambda: _none(mesh), 20.0)
        finally:
            os.kill(engine, signal.SIGCONT)
        await drained(mesh, "decode-0", limit=0.0, force=True)
        assert not task.done()
        await changed(mesh, "decode-0", Role.DECODE)
        answer = await asyncio.wait_for(task, 60.0)
    assert_whole([answer], tiny_model())
    await changed(mesh, "decode-1", Role.DECODE)


async def _told(told: list[int], count: int) -> bool:
    return len(told) > count


async def _waits(mesh: Mesh) -> bool:
    note = str((await mesh.rank("decode-0", fresh=False))["drain_note"])
    return note.startswith("waits for 1 streams: no other pair")


async def _none(mesh: Mesh) -> bool:
    return not (await mesh.rank("decode-0", fresh=False))["streams"]


@pytest.mark.slow
async def test_the_commands_themselves(bench: Bench) -> None:
    """As processes: a drain that waits, what status says then, a role that is refused or unknown, the way back."""
    mesh = bench.mesh

    async def pdmesh(*arguments: str) -> tuple[int, str]:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "services.cli.main", *arguments, "--bootstrap", mesh.bootstrap,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        out, _ = await process.communicate()
        assert process.returncode is not None
        return process.returncode, out.decode()

    assert await pdmesh("drain", "prefill-1", "--wait") == (0, "prefill-1: drains 0 sessions\nprefill-1: drained\n")
    (code, status), (unknown, said), (refused, why) = await asyncio.gather(
        pdmesh("status"), pdmesh("drain", "prefill-9"), pdmesh("role", "prefill-0", "decode")
    )
    assert code == 0 and "prefill-1 drains: drained" in status
    assert unknown == 1 and "no instance 'prefill-9' is in the rank table; there are: decode-0, decode-1, " in said
    assert refused == 1 and "prefill-0 is part of the last pair of its fingerprint" in why
    code, said = await pdmesh("role", "prefill-1", "prefill")
    assert code == 0 and said.endswith("prefill-1: serves as PREFILL\n")
