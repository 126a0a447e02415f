"""A Bootstrap in this process, on a unix socket, that tests stop and start anew."""

from __future__ import annotations

import asyncio
from typing import Any

from engine_core.types.ids import mint_incarnation
from pdmesh.bootstrap.v1 import bootstrap_service_pb2_grpc
from services.bootstrap.rank_table import RankTable
from services.bootstrap.rooms import RoomBook
from services.bootstrap.servicer import SERVICE_NAME, BootstrapServicer
from services.runtime.channels import ChannelPool
from services.runtime.server import GrpcServer
from services.runtime.tasks import TaskOwner
from services.wire.bootstrap import WatchedService
from services.worker.roster import RosterWatcher

ME = WatchedService("bootstrap", 1, "here")


class LocalBootstrap:
    """start() and stop() as often as needed; each start is a new life at the same address."""

    def __init__(self, path: Any, *, ttl: float = 15.0, renew: float = 5.0, log_size: int = 4_096) -> None:
        self.endpoint = f"unix:{path}"
        self._ttl, self._renew, self._log_size = ttl, renew, log_size
        self.table: RankTable
        self.servicer: BootstrapServicer
        self._server: GrpcServer | None = None

    async def start(self) -> None:
        clock = asyncio.get_running_loop().time
        self.table = RankTable(mint_incarnation(), ttl=self._ttl, renew=self._renew, log_size=self._log_size)
        self.servicer = BootstrapServicer(self.table, RoomBook(), ME, clock, load_interval=0.02)
        self._tasks = TaskOwner("bootstrap")
        self._tasks.spawn(self.servicer.expire_forever(), "expire")
        self._tasks.spawn(self.servicer.publish_loads_forever(), "loads")
        self._server = await GrpcServer.start(
            self.endpoint,
            lambda server: bootstrap_service_pb2_grpc.add_BootstrapServiceServicer_to_server(self.servicer, server),
            [SERVICE_NAME],
        )

    async def stop(self) -> None:
        if self._server is None:
            return
        server, self._server = self._server, None
        self.servicer.close()
        await server.stop(0)
        await self._tasks.close()

    async def __aenter__(self) -> LocalBootstrap:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()


def watcher_of(channels: ChannelPool, *bootstraps: LocalBootstrap, ttl: float = 15.0) -> RosterWatcher:
    """A started watcher that calls itself a router."""
    watcher = RosterWatcher(
        [bootstrap.endpoint for bootstrap in bootstraps],
        WatchedService("router", 2, "there", "h:80"),
        channels,
        ttl=ttl,
    )
    watcher.start()
    return watcher
