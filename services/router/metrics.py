"""Prometheus metrics of the router, in a registry of their own.

The router counts its own requests. Some figures of workers (KV blocks, transfers) are asked from them when
/metrics is read, at most every two seconds, so that one scrape target shows the whole mesh; all else workers tell
themselves, at the addresses that /sd lists.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Sequence

import grpc
import msgspec
from prometheus_client import Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine_core.lifecycle.membership import MembershipState
from engine_core.types.kv import KvUsage
from engine_core.types.request import Role
from pdmesh.common.v1 import worker_pb2, worker_pb2_grpc
from services.runtime.channels import ChannelPool
from services.runtime.telemetry import LoopLagMonitor
from services.runtime.telemetry.exposition import CONTENT_TYPE as CONTENT_TYPE
from services.runtime.telemetry.exposition import service_registry
from services.wire.bootstrap import RankRow
from services.wire.common import usage_from_proto
from services.worker.roster import Roster

_TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_E2E_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_STATES = ("free", "used", "cached", "pinned", "quarantined")
_ASK_TIMEOUT = 1.0
_FRESH_SECONDS = 2.0


class RouterMetrics:
    """All that the router counts itself."""

    def __init__(self, lag: LoopLagMonitor | None = None) -> None:
        self.registry = registry = service_registry("router", lag or LoopLagMonitor())
        name = "pdmesh_router"
        self.requests = Counter(f"{name}_requests", "HTTP requests by path and end", ["path", "end"], registry=registry)
        self.refused_connections = Counter(
            f"{name}_refused_connections",
            "HTTP connections that were ended or cut short before or without a request's own answer, by reason",
            ["reason"],
            registry=registry,
        )
        self.samples = Counter(
            f"{name}_samples",
            "Samples by finish reason, and by path: pd (prefilled elsewhere) or local",
            ["finish_reason", "path"],
            registry=registry,
        )
        self.prompt_tokens = Counter(f"{name}_prompt_tokens", "Prompt tokens", registry=registry)
        self.cached_tokens = Counter(f"{name}_cached_tokens", "Prompt tokens found in a cache", registry=registry)
        self.output_tokens = Counter(f"{name}_output_tokens", "Output tokens", registry=registry)
        self.replans = Counter(
            f"{name}_replans", "Attempts that were planned again elsewhere", ["leg", "reason"], registry=registry
        )
        self.ttft = Histogram(
            f"{name}_time_to_first_token_seconds",
            "From arrival to token 1",
            buckets=_TTFT_BUCKETS,
            registry=registry,
        )
        self.itl = Histogram(
            f"{name}_inter_token_latency_seconds",
            "Between two tokens of a sample",
            buckets=_ITL_BUCKETS,
            registry=registry,
        )
        self.e2e = Histogram(
            f"{name}_request_seconds", "From arrival to the end of a sample", buckets=_E2E_BUCKETS, registry=registry
        )
        self._stages = Histogram(
            f"{name}_stage_seconds",
            "Time that a sample spent in a state at the router, before it moved on",
            ["state"],
            buckets=_E2E_BUCKETS,
            registry=registry,
        )
        self._in_flight = Gauge(f"{name}_in_flight", "Samples that are served now", registry=registry)
        self._queued = Gauge(f"{name}_queued", "Samples that wait for a slot", registry=registry)

    def watch_admission(self, in_flight: Callable[[], float], queued: Callable[[], float]) -> None:
        """Reads both gauges from their owner."""
        self._in_flight.set_function(in_flight)
        self._queued.set_function(queued)

    def left_state(self, state: str, seconds: float) -> None:
        """A sample was in `state` for so long. There are a dozen states."""
        self._stages.labels(state).observe(seconds)

    def render(self) -> bytes:
        """The text format of Prometheus."""
        return generate_latest(self.registry)


class _Pair(msgspec.Struct, frozen=True):
    peer: str
    transport: str
    bytes: int
    seconds: float
    failures: int


class _Worker(msgspec.Struct, frozen=True):
    instance: str
    role: str
    dp: int
    running: int
    queued: int
    kv: KvUsage
    sessions: int
    up: bool
    pairs: tuple[_Pair, ...] = ()


class WorkerFigures(Collector):
    """The last figures of all workers; a worker that does not answer keeps what the rank table says of it."""

    def __init__(self, rows: Callable[[], Sequence[RankRow]], pool: ChannelPool) -> None:
        self._rows, self._pool = rows, pool
        self._workers: list[_Worker] = []
        self._asked = float("-inf")
        self._lock = asyncio.Lock()

    async def refresh(self) -> None:
        """Asks all leaders, unless that was done within the last two seconds."""
        async with self._lock:
            if time.monotonic() - self._asked < _FRESH_SECONDS:
                return
            leaders = [row for row in self._rows() if row.is_leader]
            names = {row.incarnation: row.instance.name for row in leaders}
            self._workers = list(await asyncio.gather(*(self._ask(row, names) for row in leaders)))
            self._asked = time.monotonic()

    async def _ask(self, row: RankRow, names: dict[int, str]) -> _Worker:
        stub = worker_pb2_grpc.WorkerServiceStub(self._pool.get(row.endpoint))
        name, role, dp = row.instance.name, row.instance.role.value, row.coord.dp
        try:
            stats = await stub.GetStats(worker_pb2.GetStatsRequest(), timeout=_ASK_TIMEOUT)
        except grpc.aio.AioRpcError:
            load = row.load
            return _Worker(name, role, dp, load.running, load.queued, load.kv, 0, up=False)
        pairs = tuple(
            _Pair(p.peer_instance or names.get(p.peer_incarnation, "?"), p.transport, p.bytes, p.seconds, p.failures)
            for p in stats.pairs
        )
        kv = usage_from_proto(stats.load.kv)
        return _Worker(
            name, role, dp, stats.load.running, stats.load.queued, kv, stats.sessions, up=True, pairs=_merged(pairs)
        )

    def collect(self) -> Iterable[Metric]:
        """Yields the families; called by the registry."""
        labels = ["worker", "role", "dp"]
        up = GaugeMetricFamily("pdmesh_worker_up", "1 when the worker answered", labels=labels)
        running = GaugeMetricFamily("pdmesh_worker_running", "Requests in the running batch", labels=labels)
        queued = GaugeMetricFamily("pdmesh_worker_queued", "Requests that wait", labels=labels)
        sessions = GaugeMetricFamily("pdmesh_worker_sessions", "Sessions that are not quiet", labels=labels)
        blocks = GaugeMetricFamily("pdmesh_kv_blocks", "KV blocks by state", labels=[*labels, "state"])
        pair_labels = ["worker", "peer", "transport"]
        moved = CounterMetricFamily("pdmesh_transfer_bytes", "KV bytes moved", labels=pair_labels)
        seconds = CounterMetricFamily("pdmesh_transfer_seconds", "Seconds spent moving KV", labels=pair_labels)
        failures = CounterMetricFamily("pdmesh_transfer_failures", "Pushes that failed", labels=pair_labels)
        for w in self._workers:
            own = [w.instance, w.role, str(w.dp)]
            up.add_metric(own, float(w.up))
            running.add_metric(own, w.running)
            queued.add_metric(own, w.queued)
            sessions.add_metric(own, w.sessions)
            for state in _STATES:
                blocks.add_metric([*own, state], getattr(w.kv, state))
            for pair in w.pairs:
                key = [w.instance, pair.peer, pair.transport]
                moved.add_metric(key, pair.bytes)
                seconds.add_metric(key, pair.seconds)
                failures.add_metric(key, pair.failures)
        return (up, running, queued, sessions, blocks, moved, seconds, failures)


def _merged(pairs: Iterable[_Pair]) -> tuple[_Pair, ...]:
    """One entry per (peer, transport): a peer that restarted has a link per incarnation."""
    found: dict[tuple[str, str], _Pair] = {}
    for p in pairs:
        old = found.get((p.peer, p.transport))
        if old is not None:
            p = _Pair(p.peer, p.transport, old.bytes + p.bytes, old.seconds + p.seconds, old.failures + p.failures)
        found[p.peer, p.transport] = p
    return tuple(found.values())


class TableFigures(Collector):
    """What this router sees of the mesh: the rank table, contact with Bootstrap, and samples by state."""

    def __init__(self, roster: Roster, ready: Callable[[], bool], states: Callable[[], Iterable[str]]) -> None:
        self._roster, self._ready, self._states = roster, ready, states

    def collect(self) -> Iterable[Metric]:
        """Yields the families; called by the registry."""
        roster = self._roster
        rows = Counts((row.instance.role.value, row.state.value) for row in roster.rows())
        workers = GaugeMetricFamily(
            "pdmesh_router_workers", "Rows of the rank table as seen here", labels=["role", "state"]
        )
        for role in Role:
            for state in MembershipState:
                if state is not MembershipState.LEFT:
                    workers.add_metric([role.value, state.value], rows[role.value, state.value])
        live = GaugeMetricFamily("pdmesh_router_samples_now", "Samples under way by state", labels=["state"])
        for name, count in sorted(Counts(self._states()).items()):
            live.add_metric([name], count)
        revision = roster.revision
        return (
            workers,
            live,
            GaugeMetricFamily(
                "pdmesh_router_ready", "1 while a request could be placed", value=float(self._ready())
            ),
            GaugeMetricFamily(
                "pdmesh_router_bootstrap_contact", "1 while a Bootstrap is heard", value=float(roster.in_contact)
            ),
            GaugeMetricFamily(
                "pdmesh_router_table_revision", "Changes of the rank table as seen here",
                value=0 if revision is None else revision.n,
            ),
        )  # fmt: skip
