"""Whole service processes' mains against a real Bootstrap, over fake engines."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engine_core.types.errors import ConfigError, FencedError, Leg, UnavailableError
from engine_core.types.request import Role
from pdmesh.bootstrap.v1 import bootstrap_service_pb2 as pb
from pdmesh.bootstrap.v1 import bootstrap_service_pb2_grpc, rank_table_pb2
from pdmesh.common.v1 import generation_pb2, identity_pb2, worker_pb2, worker_pb2_grpc
from pdmesh.decode.v1 import decode_service_pb2, decode_service_pb2_grpc
from services.bootstrap import main as bootstrap_main
from services.cli.workers import services_of
from services.config import BootstrapConfig, WorkerConfig
from services.runtime.channels import ChannelPool
from services.runtime.errors import from_rpc_error
from services.runtime.tasks import Stop
from services.worker.build import run_worker
from services.worker.engine_config import inference_config
from services.worker.stats import STATS_SECONDS
from tests.support import fake_engine
from tests.support.worker_pair import PROMPT


class Running:
    """A main that runs as a task."""

    def __init__(self) -> None:
        self.stop, self.info = Stop(), asyncio.get_running_loop().create_future()
        self.lives: list[dict[str, Any]] = []
        self.task: asyncio.Task[None] | None = None

    def told(self, info: dict[str, Any]) -> None:
        self.lives.append(info)
        if not self.info.done():
            self.info.set_result(info)

    async def ready(self) -> dict[str, Any]:
        assert self.task is not None
        async with asyncio.timeout(30):
            await asyncio.wait({self.task, self.info}, return_when=asyncio.FIRST_COMPLETED)
        if self.task.done():
            self.task.result()
        return dict(self.info.result())


class Bench:
    """One Bootstrap, workers on demand."""

    def __init__(self, folder: Path, bootstrap: str) -> None:
        self.folder, self.bootstrap, self.channels = folder, bootstrap, ChannelPool()
        self.workers: list[Running] = []
        self.registry = Running()

    def worker(self, role: Role, name: str = "", script: dict[str, Any] | None = None, **config: Any) -> Running:
        name = name or f"{role.value.lower()}-0"
        made = Running()
        fields = {"drain_timeout": 5.0, "socket_dir": str(self.folder)} | config
        settings = WorkerConfig(role=role, model="/models/echo", bootstrap=(self.bootstrap,), instance=name, **fields)
        command = fake_engine.command(socket=str(self.folder / f"{len(self.workers)}.sock"), **(script or {}))
        made.task = asyncio.ensure_future(
            run_worker(settings, made.stop, made.told, services_of, engine_command=command)
        )
        self.workers.append(made)
        return made

    async def rows(self) -> list[Any]:
        stub: Any = bootstrap_service_pb2_grpc.BootstrapServiceStub(self.channels.get(self.bootstrap))
        return list((await stub.GetRankTable(pb.GetRankTableRequest(), timeout=5)).rows)

    def worker_stub(self, info: dict[str, Any]) -> Any:
        return worker_pb2_grpc.WorkerServiceStub(self.channels.get(info["endpoint"]))

    async def health(self, info: dict[str, Any], name: str = "") -> Any:
        stub: Any = health_pb2_grpc.HealthStub(self.channels.get(info["endpoint"]))
        return (await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)).status

    def generate(self, decode: dict[str, Any], prefill: dict[str, Any] | None, room: int, request_id: str = "") -> Any:
        request = decode_service_pb2.GenerateRequest(
            request=generation_pb2.GenerationRequest(
                session=identity_pb2.SessionId(room=room),
                request_id=request_id,
                prompt_token_ids=PROMPT,
                sampling=generation_pb2.SamplingParams(max_tokens=5),
            ),
            decode_incarnation=decode["incarnation"],
        )
        if prefill is not None:
            request.prefill.CopyFrom(
                identity_pb2.PeerRef(endpoint=prefill["endpoint"], incarnation=prefill["incarnation"])
            )
        stub: Any = decode_service_pb2_grpc.DecodeServiceStub(self.channels.get(decode["endpoint"]))
        return stub.Generate(request, timeout=20)


async def tokens_of(call: Any) -> list[int]:
    tokens: list[int] = []
    while (message := await call.read()) is not grpc.aio.EOF:
        tokens.extend(message.token_ids)
    return tokens


@asynccontextmanager
async def bench(folder: Path) -> AsyncIterator[Bench]:
    bootstrap = Running()
    config = BootstrapConfig(port=0)
    bootstrap.task = asyncio.ensure_future(bootstrap_main.run(config, bootstrap.stop, bootstrap.info.set_result))
    made = Bench(folder, (await bootstrap.ready())["endpoint"])
    made.registry = bootstrap
    try:
        yield made
    finally:
        for group in (made.workers, [bootstrap]):
            for running in group:
                running.stop.request_now()
            async with asyncio.timeout(30):
                await asyncio.gather(*(r.task for r in group if r.task is not None), return_exceptions=True)
        await made.channels.close()
    left = [t.get_name() for t in asyncio.all_tasks() if t is not asyncio.current_task()]
    assert not [name for name in left if "/" in name], left


async def test_pair_registers_links_ahead_and_serves(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        prefill = await made.worker(Role.PREFILL, "p").ready()
        decode = await made.worker(Role.DECODE, "d").ready()
        stub = made.worker_stub(decode)

        async def linked() -> bool:
            stats = await stub.GetStats(worker_pb2.GetStatsRequest(), timeout=5)
            return [pair.peer_incarnation for pair in stats.pairs if pair.up] == [prefill["incarnation"]]

        async with asyncio.timeout(15):
            while not await linked():  # noqa: ASYNC110  # another process has no event
                await asyncio.sleep(0.05)
        assert await tokens_of(made.generate(decode, prefill, 1)) == [11, 12, 13, 14, 11]
        stats = await stub.GetStats(worker_pb2.GetStatsRequest(), timeout=5)
        assert (stats.instance, stats.role, stats.state) == ("d", identity_pb2.ROLE_DECODE, "READY")
        assert (stats.pid, stats.engine_pid) == (os.getpid(), decode["engine_pid"])
        assert (stats.streams, stats.tasks, stats.counters["sessions_opened"]) == (0, 0, 1.0)
        assert (stats.load.kv.total, stats.load.kv.free) == (64, 64)
        explained = await stub.Explain(worker_pb2.ExplainRequest(rooms=[1]), timeout=5)
        assert [(m.machine, m.from_state, m.to_state) for m in explained.moves] == [
            ("decode_request", "ADMITTED", "QUEUED")
        ]
        assert abs(explained.moves[0].unix_seconds - time.time()) < 60
        rows = {row.instance.name: row for row in await made.rows()}
        assert rows["p"].state == rows["d"].state == rank_table_pb2.MEMBERSHIP_STATE_READY
        assert rows["d"].instance.tokenizer_digest == "tok"
        assert list(rows["d"].instance.served_model_names) == ["echo"]
        assert rows["p"].instance.fingerprint == rows["d"].instance.fingerprint == stats.fingerprint
        assert await made.health(decode, "pdmesh.decode.v1.DecodeService") == health_pb2.HealthCheckResponse.SERVING


async def test_first_stop_lets_streams_end_then_deregisters(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        running = made.worker(Role.MIXED)
        mixed = await running.ready()
        call = made.generate(mixed, None, 1, "hold:d.decoding")
        assert (await call.read()).token_ids[0] == 11
        running.stop.request()
        async with asyncio.timeout(10):
            while await made.health(mixed) != health_pb2.HealthCheckResponse.NOT_SERVING:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await tokens_of(made.generate(mixed, None, 2))
        error = from_rpc_error(caught.value, Leg.UNKNOWN)
        assert (error.reason, error.retryable, caught.value.code()) == ("DRAINING", True, grpc.StatusCode.UNAVAILABLE)
        (row,) = await made.rows()
        assert row.state == rank_table_pb2.MEMBERSHIP_STATE_DRAINING
        assert running.task is not None and not running.task.done()
        call.cancel()
        async with asyncio.timeout(10):
            await running.task
        assert await made.rows() == []
        assert not Path(f"/proc/{mixed['engine_pid']}").exists()


async def test_drain_timeout_cuts_streams(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        running = made.worker(Role.MIXED, drain_timeout=0.2)
        call = made.generate(await running.ready(), None, 1, "hold:d.decoding")
        assert (await call.read()).token_ids[0] == 11
        running.stop.request()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await tokens_of(call)
        error = from_rpc_error(caught.value, Leg.UNKNOWN)
        assert (error.reason, error.retryable) == ("HANDOVER", True)
        assert running.task is not None
        async with asyncio.timeout(10):
            await running.task


async def until_stats(stub: Any, reached: Callable[[Any], bool]) -> Any:
    async with asyncio.timeout(15):
        while not reached(stats := await stub.GetStats(worker_pb2.GetStatsRequest(), timeout=5)):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return stats


async def test_figures_of_an_engine_that_is_busy_say_how_old_they_are(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        mixed = await made.worker(Role.MIXED).ready()
        stub = made.worker_stub(mixed)
        os.kill(mixed["engine_pid"], signal.SIGSTOP)
        try:
            stats = await until_stats(stub, lambda stats: stats.figures_age_seconds > 0)
            assert stats.figures_age_seconds >= STATS_SECONDS and stats.load.kv.total == 64
        finally:
            os.kill(mixed["engine_pid"], signal.SIGCONT)
        await until_stats(stub, lambda stats: stats.figures_age_seconds == 0)


async def test_drain_worker_call_keeps_the_process(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        running = made.worker(Role.MIXED)
        mixed = await running.ready()
        call = made.generate(mixed, None, 1, "hold:d.decoding")
        assert (await call.read()).token_ids[0] == 11
        stub = made.worker_stub(mixed)
        # Nobody could take over: without force it waits, whatever the limit.
        answer = await stub.DrainWorker(worker_pb2.DrainWorkerRequest(limit_seconds=0.0), timeout=5)
        assert (answer.sessions, answer.last_pair) == (1, True)
        stats = await until_stats(stub, lambda s: "force hands over" in s.drain_note)
        assert (stats.state, stats.streams, stats.drained) == ("DRAINING", 1, False)
        await stub.DrainWorker(worker_pb2.DrainWorkerRequest(limit_seconds=0.1, force=True), timeout=5)
        with pytest.raises(grpc.aio.AioRpcError, match="hands its streams over") as caught:
            await tokens_of(call)
        error = from_rpc_error(caught.value, Leg.UNKNOWN)
        assert (error.reason, error.retryable, error.peer_incarnation) == ("HANDOVER", True, mixed["incarnation"])
        stats = await until_stats(stub, lambda s: s.drained)
        assert (stats.state, stats.streams, stats.sessions, stats.drain_note) == ("DRAINING", 0, 0, "drained")
        assert running.task is not None and not running.task.done()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.StopProfile(worker_pb2.StopProfileRequest(), timeout=5)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        profile = await stub.StartProfile(worker_pb2.StartProfileRequest(steps=3), timeout=5)
        assert (await stub.StopProfile(worker_pb2.StopProfileRequest(), timeout=5)).path == profile.path
        await stub.DrainWorker(worker_pb2.DrainWorkerRequest(stop=True), timeout=5)
        async with asyncio.timeout(10):
            await running.task
        assert await made.rows() == []


async def test_with_another_pair_there_the_limit_hands_over_unforced(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        running = made.worker(Role.MIXED, "a")
        mixed = await running.ready()
        await made.worker(Role.MIXED, "b").ready()
        call = made.generate(mixed, None, 1, "hold:d.decoding")
        assert (await call.read()).token_ids[0] == 11
        stub = made.worker_stub(mixed)
        wrong = worker_pb2.DrainWorkerRequest(incarnation=mixed["incarnation"] + 1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.DrainWorker(wrong, timeout=5)
        assert from_rpc_error(caught.value, Leg.UNKNOWN).reason == "INCARNATION_MISMATCH"
        with pytest.raises(grpc.aio.AioRpcError, match="limit_seconds"):
            await stub.DrainWorker(worker_pb2.DrainWorkerRequest(limit_seconds=float("nan")), timeout=5)

        async def both_known() -> bool:
            return [row.state for row in await made.rows()] == [rank_table_pb2.MEMBERSHIP_STATE_READY] * 2

        async with asyncio.timeout(10):
            while not await both_known():  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await stub.DrainWorker(worker_pb2.DrainWorkerRequest(limit_seconds=0.0, stop=True), timeout=5)
        with pytest.raises(grpc.aio.AioRpcError, match="hands its streams over"):
            await tokens_of(call)
        assert running.task is not None
        async with asyncio.timeout(10):
            await running.task
        assert [row.instance.name for row in await made.rows()] == ["b"]


async def test_a_change_of_role_is_another_life_on_the_same_port(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        running = made.worker(Role.MIXED, "m")
        mixed = await running.ready()
        stub = made.worker_stub(mixed)
        same = await stub.ChangeRole(worker_pb2.ChangeRoleRequest(role=identity_pb2.ROLE_MIXED), timeout=5)
        assert (same.changed, same.sessions) == (False, 0)
        request = worker_pb2.ChangeRoleRequest(role=identity_pb2.ROLE_PREFILL, incarnation=mixed["incarnation"])
        with pytest.raises(grpc.aio.AioRpcError, match="last pair") as caught:
            await stub.ChangeRole(request, timeout=5)
        error = from_rpc_error(caught.value, Leg.UNKNOWN)
        assert (error.reason, error.retryable) == ("LAST_PAIR", False)
        call = made.generate(mixed, None, 1, "hold:d.decoding")
        assert (await call.read()).token_ids[0] == 11
        request.force, request.limit_seconds = True, 0.0
        assert (await stub.ChangeRole(request, timeout=5)).changed
        with pytest.raises(grpc.aio.AioRpcError, match="hands its streams over"):
            await tokens_of(call)
        async with asyncio.timeout(20):
            while len(running.lives) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        changed = running.lives[1]
        assert (changed["service"], changed["instance"], changed["port"]) == ("prefill", "m", mixed["port"])
        assert changed["incarnation"] > mixed["incarnation"] and changed["engine_pid"] != mixed["engine_pid"]
        assert not Path(f"/proc/{mixed['engine_pid']}").exists()
        (row,) = await made.rows()
        assert (row.instance.role, row.incarnation) == (identity_pb2.ROLE_PREFILL, changed["incarnation"])
        decode = await made.worker(Role.DECODE, "d").ready()
        assert await tokens_of(made.generate(decode, changed, 2)) == [11, 12, 13, 14, 11]
        running.stop.request()
        assert running.task is not None
        async with asyncio.timeout(10):
            await running.task


async def test_a_drained_worker_comes_back_in_its_own_role(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        running = made.worker(Role.MIXED, "m")
        first = await running.ready()
        stub = made.worker_stub(first)
        await stub.DrainWorker(worker_pb2.DrainWorkerRequest(), timeout=5)
        await until_stats(stub, lambda s: s.drained)
        assert (await stub.ChangeRole(worker_pb2.ChangeRoleRequest(role=identity_pb2.ROLE_MIXED), timeout=5)).changed
        async with asyncio.timeout(20):
            while len(running.lives) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert await tokens_of(made.generate(running.lives[1], None, 2)) == [11, 12, 13, 14, 11]


async def test_engine_death_ends_the_process_after_its_streams(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        running = made.worker(Role.MIXED)
        mixed = await running.ready()
        call = made.generate(mixed, None, 1, "hold:d.decoding")
        assert (await call.read()).token_ids[0] == 11
        os.kill(mixed["engine_pid"], signal.SIGKILL)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await tokens_of(call)
        assert from_rpc_error(caught.value, Leg.UNKNOWN).reason == "ENGINE_DIED"
        assert running.task is not None
        with pytest.raises(UnavailableError, match="engine"):
            async with asyncio.timeout(10):
                await running.task
        assert await made.rows() == []


async def test_an_engine_that_makes_no_step_is_reported_then_killed(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        running = made.worker(Role.MIXED, watchdog_timeout=6.0)
        mixed = await running.ready()
        call = made.generate(mixed, None, 1, "stick:d.decoding")
        assert (await call.read()).token_ids[0] == 11
        stub = made.worker_stub(mixed)
        stats = await until_stats(stub, lambda s: s.stalled_seconds >= 3.0)
        assert stats.stalled_seconds < 6.0 and stats.engine_pid == mixed["engine_pid"]
        async with asyncio.timeout(5):
            while await made.health(mixed) != health_pb2.HealthCheckResponse.NOT_SERVING:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await tokens_of(call)
        error = from_rpc_error(caught.value, Leg.UNKNOWN)
        assert error.reason == "ENGINE_DIED" and "had work and made no step for 6 s" in error.message
        assert running.task is not None
        with pytest.raises(UnavailableError, match="made no step"):
            async with asyncio.timeout(10):
                await running.task
        assert not Path(f"/proc/{mixed['engine_pid']}").exists()


async def test_a_pool_that_is_quarantined_is_given_up_without_blame(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        running = made.worker(Role.MIXED)
        mixed = await running.ready()
        call = made.generate(mixed, None, 1, "hold:d.decoding")
        assert (await call.read()).token_ids[0] == 11
        other = made.generate(mixed, None, 2, "overflow:d.decoding")
        for stream in (call, other):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await tokens_of(stream)
            error = from_rpc_error(caught.value, Leg.UNKNOWN)
            assert (error.reason, error.retryable) == ("HANDOVER", True)
            assert "100% of the KV cache waits for a proof of quiet" in error.message
        assert running.task is not None
        with pytest.raises(UnavailableError, match="starts anew"):
            async with asyncio.timeout(10):
                await running.task
        assert await made.rows() == []


async def test_health_hangs_on_nobody_else(tmp_path: Path) -> None:
    """With its only prefill worker and every Bootstrap gone, decode is as alive and as ready as before."""
    async with bench(tmp_path) as made:
        prefill, decode = made.worker(Role.PREFILL, "p"), made.worker(Role.DECODE, "d")
        await prefill.ready()
        info = await decode.ready()
        for running in (made.registry, prefill):
            running.stop.request_now()
            assert running.task is not None
            async with asyncio.timeout(20):
                await running.task
        stub: Any = health_pb2_grpc.HealthStub(made.channels.get(info["endpoint"]))
        watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=60)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(TimeoutError):  # the link and the watch of the table are long known to be gone
            async with asyncio.timeout(1.0):
                await watch.read()
        watch.cancel()
        assert await made.health(info) == health_pb2.HealthCheckResponse.SERVING


async def test_model_error_is_raised_before_registering(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        running = made.worker(Role.MIXED, script={"startup_error": "model.safetensors lacks lm_head.weight"})
        with pytest.raises(ConfigError, match=r"^model.safetensors lacks lm_head.weight$"):
            await running.ready()
        assert await made.rows() == []


async def test_stop_while_the_model_loads(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        running = made.worker(Role.MIXED, script={"ready_delay": 60})
        await asyncio.sleep(0.1)
        running.stop.request()
        assert running.task is not None
        async with asyncio.timeout(10):
            await running.task
        assert await made.rows() == []


async def test_later_incarnation_in_the_row_ends_the_process(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        first, second = made.worker(Role.MIXED, "m"), None
        held = await first.ready()
        second = made.worker(Role.MIXED, "m")
        later = await second.ready()
        assert later["incarnation"] > held["incarnation"]
        assert first.task is not None
        with pytest.raises(FencedError):
            async with asyncio.timeout(20):
                await first.task
        assert [row.incarnation for row in await made.rows()] == [later["incarnation"]]


async def test_without_bootstrap_it_keeps_trying_and_is_not_serving(tmp_path: Path) -> None:
    bench_without = Bench(tmp_path, "127.0.0.1:9")
    running = bench_without.worker(Role.MIXED, port=0)
    await asyncio.sleep(1.0)
    assert running.task is not None and not running.task.done() and not running.info.done()
    running.stop.request_now()
    async with asyncio.timeout(15):
        await running.task
    await bench_without.channels.close()


def test_engine_configuration_follows_the_workers() -> None:
    config = WorkerConfig(
        role=Role.DECODE, model="/m", kv_memory_mb=3, block_size=32, threads=2, served_model_name=("a", "b"),
        transfer_backend="tcp", prefix_cache=False, verify_kv=True, transfer_script="{}",
    )  # fmt: skip
    plain = inference_config(config, "/tmp/x")
    assert plain["scheduler"]["kv_memory_bytes"] == 3 << 20
    assert (plain["scheduler"]["block_size"], plain["scheduler"]["enable_prefix_cache"]) == (32, False)
    assert (plain["model"]["model_path"], plain["model"]["model_name"], plain["model"]["num_threads"]) == ("/m", "a", 2)
    disagg = {"disaggregation_mode": "DECODE", "transfer_backend": "tcp", "socket_dir": "/tmp/x", "verify_kv": True}
    assert disagg.items() <= plain["disagg"].items()
