"""Prometheus metrics of Bootstrap: rows, leases, lapses, watchers. Read from the table when somebody scrapes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine_core.lifecycle.machine import Move
from engine_core.lifecycle.membership import MembershipState
from engine_core.types.request import Role
from services.bootstrap.rank_table import TAKEN_OVER, RankTable
from services.bootstrap.rooms import RoomBook
from services.runtime.telemetry import LoopLagMonitor
from services.runtime.telemetry.exposition import service_registry

_STATES = tuple(state for state in MembershipState if state is not MembershipState.LEFT)


class TableMoves:
    """Counts the moves of rows; fits as a RankTable's move_log."""

    def __init__(self) -> None:
        self.by_state: Counter[str] = Counter()
        self.takeovers = 0

    def log(self, move: Move) -> None:
        """Takes one move."""
        self.by_state[move.target] += 1
        self.takeovers += move.reason.startswith(TAKEN_OVER)


class BootstrapMetrics(Collector):
    """Collects from a table; `registry` is what a metrics server serves."""

    def __init__(
        self,
        table: RankTable,
        moves: TableMoves,
        rooms: RoomBook,
        watchers: Callable[[], int],
        lag: LoopLagMonitor,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._table, self._moves, self._rooms, self._watchers, self._clock = table, moves, rooms, watchers, clock
        self.registry: CollectorRegistry = service_registry("bootstrap", lag)
        self.registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """Yields the families; called by the registry."""
        table = self._table
        counts = Counter((row.instance.role, row.state) for row in table.rows())
        rows = GaugeMetricFamily("pdmesh_bootstrap_rows", "Rows of the rank table", labels=["role", "state"])
        for role in Role:
            for state in _STATES:
                rows.add_metric([role.value, state.value], counts[role, state])
        lease = GaugeMetricFamily(
            "pdmesh_bootstrap_lease_remaining_seconds",
            "Until a worker's lease lapses; renewed in time it stays near its length",
            labels=["worker", "role", "dp"],
        )
        for key, seconds in table.lease_seconds(self._clock()):
            if key.coord.cp == key.coord.tp == 0:
                lease.add_metric([key.instance, key.role.value, str(key.coord.dp)], seconds)
        moves = CounterMetricFamily("pdmesh_bootstrap_moves", "Moves of rows into a state", labels=["state"])
        for target in MembershipState:
            moves.add_metric([target.value], self._moves.by_state[target.value])
        return (
            rows,
            lease,
            moves,
            CounterMetricFamily(
                "pdmesh_bootstrap_lease_lapses",
                "Leases that lapsed: a worker was silent for too long",
                value=self._moves.by_state[MembershipState.LOST.value],
            ),
            CounterMetricFamily(
                "pdmesh_bootstrap_takeovers",
                "Rows that a later life of their worker took over: it died and started anew",
                value=self._moves.takeovers,
            ),
            CounterMetricFamily("pdmesh_bootstrap_load_reports", "Loads that changed something", value=table.load_seq),
            GaugeMetricFamily("pdmesh_bootstrap_table_revision", "Changes of the table so far", value=table.revision.n),
            GaugeMetricFamily("pdmesh_bootstrap_watchers", "Open watch streams", value=self._watchers()),
            GaugeMetricFamily("pdmesh_bootstrap_rooms", "Routes of requests that are kept", value=len(self._rooms)),
        )
