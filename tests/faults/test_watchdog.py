"""What stands still behind an open port is found, reported, killed and replaced; and nobody's health hangs on
somebody else.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdmesh.common.v1 import worker_pb2, worker_pb2_grpc
from services.runtime.channels import ChannelPool
from tests.support.asking import until_async
from tests.support.churn import assert_whole, some_asks
from tests.support.load import Ask, Load, run_all
from tests.support.mesh import Mesh
from tests.support.models import tiny_model
from tests.support.serving import Serving, running, until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

WATCHDOG, HEARTBEAT = 6.0, 12.0
OPTIONS = (
    f"--prefill 2 --decode 2 --kv-tokens 8192 --watchdog-timeout {WATCHDOG:g} --heartbeat-timeout {HEARTBEAT:g} "
    "--lease-ttl 3 --lease-renewal 0.5"
).split()
ASKS = some_asks(8, 400)
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


class Bench:
    """A supervised mesh, and what it gives while nothing happens."""

    def __init__(self, mesh: Serving, calm: dict[Ask, list[int]]) -> None:
        self.mesh, self.calm = mesh, calm


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench() -> AsyncIterator[Bench]:
    async with Serving(tiny_model(), *OPTIONS) as mesh:
        yield Bench(mesh, await run_all(mesh.url, ASKS))


async def health(pool: ChannelPool, endpoint: str) -> int:
    """What a worker says of its own health; -1 when it does not answer."""
    try:
        stub = health_pb2_grpc.HealthStub(pool.get(endpoint))
        return int((await stub.Check(health_pb2.HealthCheckRequest(), timeout=2.0)).status)
    except grpc.aio.AioRpcError:
        return -1


@pytest.mark.slow
async def test_a_stuck_engine_is_reported_killed_and_replaced_and_its_streams_go_on(bench: Bench) -> None:
    mesh, line, pool = bench.mesh, len(bench.mesh.lines), ChannelPool()
    before = (await mesh.ranks())["decode-0"]
    stub = worker_pb2_grpc.WorkerServiceStub(pool.get(before["endpoint"]))
    seen: list[tuple[float, int]] = []

    async def reported() -> bool:
        """Its service process answers, and says that the engine stands still."""
        stats = await stub.GetStats(worker_pb2.GetStatsRequest(), timeout=5.0)
        seen.append((stats.stalled_seconds, await health(pool, before["endpoint"])))
        return seen[-1][0] > 0 and seen[-1][1] == NOT_SERVING

    async with Load(mesh.url, ASKS, width=6) as load:
        await load.until(lambda: load.streaming(2) >= 4, "streams run")
        await until_async(lambda: _streams(mesh, "decode-0"), 20.0)
        stopped = time.monotonic()
        os.kill(before["engine_pid"], signal.SIGSTOP)
        await until(reported, "reported before it is killed", WATCHDOG + 5.0)
        assert seen[-1][0] <= WATCHDOG
        assert mesh.said("decode-0", "has made no progress for", line), "\n".join(mesh.lines)
        await until(lambda: not running(before["engine_pid"]), "killed", WATCHDOG + 20.0)
        assert time.monotonic() - stopped >= WATCHDOG / 2
        await until(lambda: mesh.said("decode-0", "died: engine sent no frame for 6 s", line), "reported", 20.0)
        back = await mesh.until_back("decode-0", before["incarnation"])
        now = time.monotonic()
        await load.until(lambda: load.right_since(now) >= 4, "it goes on")
    await pool.close()
    assert_whole(load.answers, tiny_model(), bench.calm)
    assert back["engine_pid"] != before["engine_pid"] and back["health"] == "SERVING"
    await mesh.until_quiet()


async def _streams(mesh: Serving, name: str) -> bool:
    return bool((await mesh.ranks())[name]["streams"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["decode-1", "prefill-1"])
async def test_a_stuck_service_process_is_killed_by_its_silence(bench: Bench, name: str) -> None:
    mesh, line = bench.mesh, len(bench.mesh.lines)
    before = (await mesh.ranks())[name]
    async with Load(mesh.url, ASKS, width=6) as load:
        await load.until(lambda: load.streaming(2) >= 4, "streams run")
        os.kill(before["pid"], signal.SIGSTOP)
        why = f"died: no sign of life for {HEARTBEAT:g} s (killed by SIGKILL)"
        await until(lambda: mesh.said(name, why, line), "killed", HEARTBEAT + 40.0)
        await mesh.until_back(name, before["incarnation"])
        now = time.monotonic()
        await load.until(lambda: load.right_since(now) >= 4, "it goes on")
    assert not running(before["engine_pid"])
    assert_whole(load.answers, tiny_model(), bench.calm)
    await mesh.until_quiet()


@pytest.mark.slow
async def test_health_hangs_on_nobody_else() -> None:
    """With Bootstrap and the only prefill worker dead, decode still is what it was: alive, and ready to serve."""
    pool = ChannelPool()
    async with Mesh(tiny_model(), options={"lease_ttl": 1.0, "lease_renewal": 0.2}) as mesh:
        decode, prefill = mesh.endpoint("decode-0"), mesh.endpoint("prefill-0")
        mesh.kill("bootstrap")
        mesh.kill("prefill-0")
        await asyncio.gather(mesh.gone("bootstrap"), mesh.gone("prefill-0"))
        assert await health(pool, prefill) == -1
        watch = health_pb2_grpc.HealthStub(pool.get(decode)).Watch(health_pb2.HealthCheckRequest(), timeout=60.0)
        assert (await watch.read()).status == SERVING
        with pytest.raises(TimeoutError):  # more than a lease: whatever depended on a peer would have shown
            async with asyncio.timeout(3.0):
                await watch.read()
        watch.cancel()
        assert await health(pool, decode) == SERVING
        await mesh.start("bootstrap")
        await mesh.start("prefill-0")
        await mesh.until_ready()
    await pool.close()
