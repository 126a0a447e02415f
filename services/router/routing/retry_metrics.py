"""What the router counts of failures and of what it made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.router.routing.breaker import Breakers, BreakerState
from services.wire.bootstrap import RankRow

_VALUES = {BreakerState.CLOSED: 0.0, BreakerState.HALF_OPEN: 1.0, BreakerState.OPEN: 2.0}


class RetryMetrics(Collector):
    """Counters of new attempts, and a gauge per worker's breaker."""

    def __init__(self, registry: CollectorRegistry, rows: Callable[[], Sequence[RankRow]], breakers: Breakers) -> None:
        name = "pdmesh_router"
        self.retries = Counter(
            f"{name}_retries",
            "New attempts: replan (before token 1), resume (after it), handover (given back by a healthy worker)",
            ["kind"],
            registry=registry,
        )
        self.refused = Counter(
            f"{name}_retries_refused",
            "Failures that might have been tried again: budget, attempts, poison",
            ["why"],
            registry=registry,
        )
        self._rows, self._breakers = rows, breakers
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """Yields the breakers; called by the registry."""
        family = GaugeMetricFamily(
            "pdmesh_router_breaker_state", "0 closed, 1 half-open, 2 open, per worker", labels=["worker", "dp"]
        )
        for row in self._rows():
            if row.is_leader:
                labels = [row.instance.name, str(row.coord.dp)]
                family.add_metric(labels, _VALUES[self._breakers.state(row.incarnation)])
        return (family,)
