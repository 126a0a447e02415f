"""What a worker tells Prometheus, from figures and moves as its engine sends them."""

from __future__ import annotations

import time

import httpx
import pytest

from engine_core.host.frames import PairStats, Stats
from engine_core.lifecycle.machine import Move
from engine_core.lifecycle.membership import MembershipState
from engine_core.scheduler.figures import Distributions
from engine_core.types.errors import ConfigError, Leg
from engine_core.types.ids import SessionId
from engine_core.types.kv import KvUsage
from engine_core.types.request import Role
from services.runtime.tasks import TaskOwner
from services.runtime.telemetry.exposition import MetricsServer
from services.worker.engine_client import EngineClient
from services.worker.metrics import WorkerMetrics
from services.worker.sessions import SessionTable
from services.worker.stats import WorkerState
from tests.support.scraping import parse, run_promtool, value

OWN = {"worker": "decode-0", "role": "DECODE"}


def state_of(role: Role = Role.DECODE) -> WorkerState:
    name = f"{role.value.lower()}-0"
    return WorkerState(name, role, 5, SessionTable(Leg.DECODE, 5), TaskOwner("sessions"))


def with_engine(stats: Stats, role: Role = Role.DECODE) -> WorkerState:
    """A state whose engine has sent figures; its process was never started."""
    state = state_of(role)
    state.engine = EngineClient({}, 5, state.instance, leg=Leg.DECODE)
    state.engine.stats, state.engine.stats_at = stats, time.monotonic()
    return state


def figures(**changes: object) -> Stats:
    known: dict[str, object] = {
        "running": 3, "queued": 2, "queued_tokens": 70, "sessions": 6, "steps": 40, "busy": True,
        "kv": KvUsage(total=100, free=40, used=30, cached=20, pinned=4, quarantined=6),
    }  # fmt: skip
    return Stats(**{**known, **changes})  # type: ignore[arg-type]


async def scrape(metrics: WorkerMetrics) -> str:
    server = await MetricsServer.start("127.0.0.1", 0, metrics.registry)
    try:
        async with httpx.AsyncClient(trust_env=False) as client:
            answer = await client.get(f"http://{server.endpoint}/metrics")
    finally:
        await server.stop()
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return answer.text


async def test_figures_of_an_engine() -> None:
    distributions = Distributions()
    distributions.step(4, 0, 4, 0.0042)
    distributions.step(4, 1, 60, 0.03)
    distributions.push(3072, 0.001)
    stats = figures(
        states={"decode_request.DECODING": 3, "transfer_session.ABORTING": 1},
        quarantined={"prefill-0": 6},
        histograms=distributions.figures(),
        counters={"preemptions": 2.0, "prefix_hit_tokens": 64.0, "moves.decode_request.FINISHED": 9.0},
        pairs=(
            PairStats(1, 8, "prefill-0", "shm", "", False, 1000, 0.5, 1),
            PairStats(2, 9, "prefill-0", "shm", "", True, 500, 0.25, 0),
            PairStats(3, 7, "prefill-1", "tcp", "", True, 10, 0.1, 0),
        ),
    )
    state = with_engine(stats)
    state.membership = MembershipState.READY
    text = await scrape(WorkerMetrics(state))
    code, said = await run_promtool("check", "metrics", text=text)
    assert (code, said) == (0, ""), said
    got = parse(text)
    assert value(got, "pdmesh_engine_requests_running", **OWN) == 3
    assert value(got, "pdmesh_engine_requests_waiting", **OWN) == 2
    assert {k["state"]: v for k, v in got["pdmesh_engine_kv_blocks"]} == {
        "free": 40, "used": 30, "cached": 20, "pinned": 4, "quarantined": 6,
    }  # fmt: skip
    assert value(got, "pdmesh_engine_kv_usage_ratio", **OWN) == 0.4
    assert value(got, "pdmesh_engine_kv_quarantined_blocks", peer="prefill-0") == 6
    assert value(got, "pdmesh_engine_sessions", machine="decode_request", state="DECODING") == 3
    assert value(got, "pdmesh_engine_preemptions_total") == 2 and value(got, "pdmesh_engine_steps_total") == 40
    assert value(got, "pdmesh_engine_prefix_cache_hit_tokens_total") == 64
    assert value(got, "pdmesh_engine_requests_total", end="finished") == 9
    for kind, below, above in (("decode", "0.0025", "0.005"), ("mixed", "0.025", "0.05")):
        assert value(got, "pdmesh_engine_step_seconds_bucket", kind=kind, le=below) == 0
        assert value(got, "pdmesh_engine_step_seconds_bucket", kind=kind, le=above) == 1
    assert value(got, "pdmesh_engine_step_sequences_sum") == 9 and value(got, "pdmesh_engine_step_tokens_sum") == 64
    assert value(got, "pdmesh_push_bytes_sum") == 3072 and value(got, "pdmesh_push_seconds_count") == 1
    assert value(got, "pdmesh_push_bytes_per_second_sum") == 3_072_000
    # A peer that started anew is one series, and up while one of its links is.
    links = {"peer": "prefill-0", "transport": "shm"}
    assert value(got, "pdmesh_link_bytes_total", **links) == 1500 and value(got, "pdmesh_link_up", **links) == 1
    assert value(got, "pdmesh_link_failures_total", **links) == 1
    assert value(got, "pdmesh_link_busy_seconds_total", peer="prefill-1", transport="tcp") == 0.1
    assert (
        value(got, "pdmesh_worker_state", state="READY") == 1 and value(got, "pdmesh_worker_state", state="LOST") == 0
    )
    assert value(got, "pdmesh_engine_up", **OWN) == 1 and value(got, "pdmesh_engine_heartbeat_age_seconds") < 60

    assert state.engine is not None
    state.engine.stats = figures(pairs=(PairStats(3, 7, "prefill-1", "tcp", "", True, 10, 0.1, 0),))
    left = parse(await scrape(WorkerMetrics(state)))
    assert [k["peer"] for k, _ in left["pdmesh_link_up"]] == ["prefill-1"], "who left has no series"
    assert "pdmesh_engine_kv_quarantined_blocks" not in left


async def test_time_per_stage_comes_from_moves() -> None:
    metrics = WorkerMetrics(with_engine(figures(), Role.PREFILL))
    session = SessionId(1, 0)
    metrics.observe(
        [
            Move("prefill_request", session, "ACCEPTED", "QUEUED", "", 0.0, 0.0),
            Move("prefill_request", session, "QUEUED", "COMPUTING", "", 0.2, 0.2),
            Move("prefill_request", session, "COMPUTING", "COMPUTED", "", 0.5, 0.3),
            Move("transfer_session", session, "PUSHING", "DELIVERED", "", 0.6, 0.1),
            Move("decode_request", session, "QUEUED", "COMPUTING", "", 0.6, 0.1),
        ]
    )
    got = parse(await scrape(metrics))
    name = "pdmesh_engine_stage_seconds"
    assert value(got, f"{name}_sum", machine="prefill_request", state="QUEUED", role="PREFILL") == 0.2
    assert value(got, f"{name}_count", machine="prefill_request", state="COMPUTING") == 1
    assert value(got, f"{name}_bucket", machine="transfer_session", state="PUSHING", le="0.1") == 1
    assert value(got, f"{name}_count") == 3, "where a request comes in and what is another role's is no stage"
    assert {k["machine"] for k, _ in got[f"{name}_count"]} == {"prefill_request", "transfer_session"}


async def test_a_worker_without_figures_still_answers() -> None:
    got = parse(await scrape(WorkerMetrics(state_of())))
    assert value(got, "pdmesh_worker_state", state="JOINING", **OWN) == 1
    assert value(got, "pdmesh_build_info", service="decode") == 1 and value(got, "process_open_fds") > 0
    assert "pdmesh_engine_up" not in got and "pdmesh_engine_process_open_fds" not in got


async def test_the_server_serves_nothing_else() -> None:
    server = await MetricsServer.start("127.0.0.1", 0, WorkerMetrics(state_of()).registry)
    try:
        async with httpx.AsyncClient(base_url=f"http://{server.endpoint}", trust_env=False) as client:
            assert (await client.get("/health")).text == "ok\n"
            assert [(await client.get("/")).status_code, (await client.post("/metrics")).status_code] == [404, 405]
            assert (await client.head("/metrics")).text == ""
        with pytest.raises(ConfigError, match="cannot serve metrics on 127.0.0.1") as caught:
            await MetricsServer.start("127.0.0.1", server.port, WorkerMetrics(state_of()).registry)
        assert caught.value.field == "metrics_port"
    finally:
        await server.stop()
