"""Prometheus metrics of a worker: its service process, its engine, its links, and how long requests take per stage.

Gauges and counters are read when somebody scrapes, from the engine's figures of that moment. How long a request
spent in a state comes from the state moves, which `pdmesh explain` and traces are made of too. Every series names
the worker and its role; peers are named by instance, and leave with the last link that the engine remembers.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from engine_core.host.frames import Stats
from engine_core.lifecycle.machine import Move
from engine_core.lifecycle.membership import MembershipState
from services.runtime.telemetry.exposition import service_registry
from services.worker.stats import STATS_SECONDS, WorkerState

STAGE_BUCKETS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
)  # fmt: skip
STAGES: Mapping[str, frozenset[str]] = {
    "decode_request": frozenset(
        {"QUEUED", "AWAITING_START", "AWAITING_KV", "READY", "COMPUTING", "DECODING", "PREEMPTED"}
    ),
    "prefill_request": frozenset({"QUEUED", "COMPUTING", "COMPUTED", "PUSHING"}),
    "transfer_session": frozenset({"TICKETED", "PUSHING", "ABORTING"}),
}
"""States that a request spends time in, by machine."""

_KV = ("free", "used", "cached", "pinned", "quarantined")
_HISTOGRAMS = {
    "step_seconds": ("pdmesh_engine_step_seconds", "Steps by kind: decode, prefill (chunks of prompts), or mixed"),
    "step_sequences": ("pdmesh_engine_step_sequences", "Sequences in a step: the batch size"),
    "step_tokens": ("pdmesh_engine_step_tokens", "Tokens computed by a step"),
    "push_seconds": ("pdmesh_push_seconds", "One push of KV: from its start until the receiver has all of it"),
    "push_bytes": ("pdmesh_push_bytes", "Bytes of one push of KV"),
    "push_bytes_per_second": ("pdmesh_push_bytes_per_second", "Speed of one push of KV"),
}
_COUNTERS = {
    "prefix_query_tokens": ("pdmesh_engine_prefix_cache_query_tokens", "Prompt tokens looked up in the prefix cache"),
    "prefix_hit_tokens": ("pdmesh_engine_prefix_cache_hit_tokens", "Prompt tokens found in the prefix cache"),
    "evictions": ("pdmesh_engine_kv_evictions", "Cached blocks that were given to others"),
    "preemptions": ("pdmesh_engine_preemptions", "Running requests whose blocks went to an older one"),
    "set_back": ("pdmesh_engine_set_backs", "Prompts that prefill set back for an earlier one"),
    "prompt_tokens_computed": ("pdmesh_engine_prompt_tokens", "Prompt tokens computed here"),
    "output_tokens": ("pdmesh_engine_output_tokens", "Tokens given out here"),
    "quarantined": ("pdmesh_engine_quarantines", "Sessions whose blocks were quarantined"),
    "steps": ("pdmesh_engine_steps", "Steps"),
    "step_seconds": ("pdmesh_engine_busy_seconds", "Seconds spent in steps"),
    "forward_seconds": ("pdmesh_engine_forward_seconds", "Seconds spent in the model, a part of the steps"),
}
_ENDS = ("FINISHED", "FAILED", "CANCELLED")


class WorkerMetrics(Collector):
    """Collects from a WorkerState. `registry` is what a metrics server serves, refresh() what it awaits before."""

    def __init__(self, state: WorkerState) -> None:
        self._state = state
        self.registry: CollectorRegistry = service_registry(state.role.value.lower(), state.lag)
        # While there is no engine there are no such figures: no process has the id 0.
        ProcessCollector("pdmesh_engine", pid=lambda: state.engine.pid if state.engine else 0, registry=self.registry)
        stages = Histogram(
            "pdmesh_engine_stage_seconds",
            "Time that a request spent in a state of its machine, before it moved on",
            ["worker", "role", "machine", "state"],
            buckets=STAGE_BUCKETS,
            registry=self.registry,
        )
        self._stages = {
            (machine, name): stages.labels(state.instance, state.role.value, machine, name)
            for machine in self._machines()
            for name in sorted(STAGES[machine])
        }
        self.registry.register(self)

    def _machines(self) -> tuple[str, ...]:
        request = "prefill_request" if self._state.role.value == "PREFILL" else "decode_request"
        return (request, "transfer_session")

    def observe(self, moves: Sequence[Move]) -> None:
        """Takes the engine's moves."""
        for move in moves:
            stage = self._stages.get((move.machine, move.source))
            if stage is not None:
                stage.observe(move.seconds)

    async def refresh(self) -> None:
        """Asks the engine for its figures of now, for half a second at most."""
        if self._state.engine is not None:
            await self._state.engine.fresh_stats(STATS_SECONDS)

    def collect(self) -> Iterable[Metric]:
        """Yields the families; called by the registry."""
        made = _Families(self._state.instance, self._state.role.value)
        self._service(made)
        stats = self._state.engine_stats
        if stats is not None:
            self._engine(made, stats)
            _requests(made, stats, self._machines()[0])
            _histograms(made, stats)
            _links(made, stats)
        return made.families

    def _service(self, made: _Families) -> None:
        state = self._state
        made.gauge(
            "pdmesh_worker_state", "1 for the membership state that the worker has",
            [((s.value,), float(s is state.membership)) for s in MembershipState], "state",
        )  # fmt: skip
        made.gauge("pdmesh_worker_streams", "Open gRPC streams of sessions", [((), len(state.sessions))])
        for name, count in (
            ("opened", state.sessions.opened),
            ("fenced", state.sessions.fenced),
            ("refused", state.sessions.refused),
        ):
            made.counter(f"pdmesh_worker_sessions_{name}", f"Sessions that were {name}", [((), count)])
        registration = state.registration
        leases = registration.lease_ages() if registration is not None else ()
        lapses = registration.lapses if registration is not None else 0
        made.gauge(
            "pdmesh_worker_lease_age_seconds", "Since a Bootstrap last renewed this worker's lease",
            [((endpoint,), age) for endpoint, age in leases], "bootstrap",
        )  # fmt: skip
        made.counter("pdmesh_worker_lease_lapses", "Leases that a Bootstrap knew no more", [((), lapses)])

    def _engine(self, made: _Families, stats: Stats) -> None:
        engine = self._state.engine
        assert engine is not None
        made.gauge("pdmesh_engine_up", "1 while the engine process lives", [((), float(engine.death is None))])
        age = max(0.0, time.monotonic() - engine.stats_at)
        made.gauge("pdmesh_engine_heartbeat_age_seconds", "Since the engine last sent figures", [((), age)])
        made.gauge("pdmesh_engine_requests_running", "Requests in the running batch", [((), stats.running)])
        made.gauge("pdmesh_engine_requests_waiting", "Requests that wait", [((), stats.queued)])
        made.gauge("pdmesh_engine_waiting_tokens", "Tokens that wait to be computed", [((), stats.queued_tokens)])
        made.gauge(
            "pdmesh_engine_sessions", "Sessions by the state of their machines",
            [(tuple(name.split(".", 1)), count) for name, count in sorted(stats.states.items())], "machine", "state",
        )  # fmt: skip
        kv = stats.kv
        made.gauge("pdmesh_engine_kv_blocks", "KV blocks by state", [((s,), getattr(kv, s)) for s in _KV], "state")
        taken = (kv.used + kv.pinned + kv.quarantined) / kv.total if kv.total else 0.0
        made.gauge("pdmesh_engine_kv_usage_ratio", "Share of the KV blocks that nobody else can have", [((), taken)])
        made.gauge(
            "pdmesh_engine_kv_quarantined_blocks", "Blocks that a peer may still write",
            [((peer or "unknown",), count) for peer, count in sorted(stats.quarantined.items())], "peer",
        )  # fmt: skip
        counters = stats.counters | {"steps": float(stats.steps)}
        for key, (name, help_text) in _COUNTERS.items():
            made.counter(name, help_text, [((), counters.get(key, 0.0))])


def _requests(made: _Families, stats: Stats, machine: str) -> None:
    ends = [((end.lower(),), stats.counters.get(f"moves.{machine}.{end}", 0.0)) for end in _ENDS]
    made.counter("pdmesh_engine_requests", "Requests by how they ended here", ends, "end")


def _histograms(made: _Families, stats: Stats) -> None:
    for name, (metric, help_text) in _HISTOGRAMS.items():
        kinds = {k.partition(".")[2]: v for k, v in stats.histograms.items() if k.partition(".")[0] == name}
        labels = ("kind",) if name == "step_seconds" else ()
        family = made.histogram(metric, help_text, *labels)
        for kind, figures in kinds.items():
            buckets, below = [], 0
            for bound, count in zip((*figures.bounds, float("inf")), figures.counts, strict=True):
                below += count
                buckets.append(("+Inf" if bound == float("inf") else repr(bound), float(below)))
            family.add_metric([*made.own, *([kind] if labels else [])], buckets, figures.sum)


def _links(made: _Families, stats: Stats) -> None:
    """One series per peer and transport: a peer that started anew has a link per life."""
    up: dict[tuple[str, ...], float] = {}
    sums: dict[tuple[str, ...], tuple[float, float, float]] = {}
    for pair in stats.pairs:
        key = (pair.peer_instance or "unknown", pair.transport or "none")
        up[key] = max(up.get(key, 0.0), float(pair.up))
        before = sums.get(key, (0.0, 0.0, 0.0))
        sums[key] = (before[0] + pair.bytes, before[1] + pair.seconds, before[2] + pair.failures)
    labels = ("peer", "transport")
    made.gauge("pdmesh_link_up", "1 while a link to the peer is open", list(up.items()), *labels)
    for i, (name, help_text) in enumerate(
        (
            ("pdmesh_link_bytes", "KV bytes that went over links to the peer"),
            ("pdmesh_link_busy_seconds", "Seconds that pushes to the peer were on their way"),
            ("pdmesh_link_failures", "Pushes to the peer that failed"),
        )
    ):
        made.counter(name, help_text, [(key, sums[key][i]) for key in sums], *labels)


_Samples = Sequence[tuple[tuple[str, ...], float]]


class _Families:
    """Makes families whose series name the worker and its role."""

    def __init__(self, worker: str, role: str) -> None:
        self.own = [worker, role]
        self.families: list[Metric] = []

    def gauge(self, name: str, help_text: str, samples: _Samples, *labels: str) -> None:
        """A gauge with a value per label values."""
        self._add(GaugeMetricFamily(name, help_text, labels=["worker", "role", *labels]), samples)

    def counter(self, name: str, help_text: str, samples: _Samples, *labels: str) -> None:
        """A counter; its series end in _total."""
        self._add(CounterMetricFamily(name, help_text, labels=["worker", "role", *labels]), samples)

    def histogram(self, name: str, help_text: str, *labels: str) -> HistogramMetricFamily:
        """An empty histogram family."""
        family = HistogramMetricFamily(name, help_text, labels=["worker", "role", *labels])
        self.families.append(family)
        return family

    def _add(self, family: GaugeMetricFamily | CounterMetricFamily, samples: _Samples) -> None:
        for values, value in samples:
            family.add_metric([*self.own, *values], value)
        self.families.append(family)
