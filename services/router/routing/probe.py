"""Health checks that close breakers: workers whose breaker is half-open are asked whether they serve."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Hashable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engine_core.types.request import Role
from services.router.routing.breaker import Breakers, BreakerState
from services.router.routing.table import WatchedTable
from services.runtime.channels import ChannelPool
from services.runtime.tasks import TaskOwner
from services.wire.bootstrap import RankRow

PERIOD = 0.25
TIMEOUT = 1.0


class Prober:
    """Drives the breakers' time; run() it with a TaskOwner."""

    def __init__(self, breakers: Breakers, table: WatchedTable, pool: ChannelPool) -> None:
        self._breakers, self._table, self._pool = breakers, table, pool
        self._tasks = TaskOwner("probes")
        self._blocked: Collection[Hashable] = ()

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                await asyncio.sleep(PERIOD)
                self._tick()
        finally:
            await self._tasks.close()

    def _tick(self) -> None:
        rows = {row.incarnation: row for row in self._table.rows() if row.is_leader}
        self._breakers.keep(rows.keys())
        now = time.monotonic()
        due = self._breakers.tick(now)
        for key in due:
            if isinstance(key, int):
                self._tasks.spawn(self._probe(rows[key]), f"probe {rows[key].instance.name}")
        # A pair can only be tried by a request, and so can who has a trial that takes too long.
        before, self._blocked = self._blocked, self._breakers.blocked(now)
        if any(isinstance(key, tuple) for key in due) or any(key not in self._blocked for key in before):
            self._table.notify()

    async def _probe(self, row: RankRow) -> None:
        service = "prefill.v1.PrefillService" if row.instance.role is Role.PREFILL else "decode.v1.DecodeService"
        well = False
        try:
            with self._pool.use(row.endpoint) as channel:
                answer = await health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(service=f"pdmesh.{service}"), timeout=TIMEOUT
                )
            well = answer.status == health_pb2.HealthCheckResponse.SERVING
        except grpc.aio.AioRpcError:
            pass  # it is not well, in whatever way
        self._breakers.probed(row.incarnation, well=well, now=time.monotonic())
        if self._breakers.state(row.incarnation) is not BreakerState.OPEN:
            self._table.notify()
