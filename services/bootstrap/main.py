"""The Bootstrap process: a table, its two timers, and a gRPC server."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from typing import Any

from engine_core.types.errors import Leg
from engine_core.types.ids import mint_incarnation
from pdmesh.bootstrap.v1 import bootstrap_service_pb2_grpc
from services.bootstrap.rank_table import RankTable
from services.bootstrap.rooms import RoomBook
from services.bootstrap.servicer import SERVICE_NAME, BootstrapServicer
from services.config import BootstrapConfig, service_manager
from services.runtime.addresses import bracketed
from services.runtime.security import Security
from services.runtime.server import GrpcServer
from services.runtime.tasks import Stop, TaskOwner
from services.wire.bootstrap import WatchedService

_STOP_GRACE = 1.0


async def run(config: BootstrapConfig, stop: Stop, on_ready: Callable[[dict[str, Any]], None]) -> None:
    """Serves until `stop.draining`: there is nothing to drain but calls that take milliseconds.

    `on_ready` gets {"service", "endpoint", "port", "pid", "epoch"}. Raises ConfigError when the address
    can't be had.
    """
    security = Security.of(config)
    epoch = mint_incarnation()
    table = RankTable(epoch, ttl=config.lease_ttl, renew=config.lease_renewal)
    me = WatchedService(name="bootstrap", pid=os.getpid(), host=socket.gethostname())
    servicer = BootstrapServicer(table, RoomBook(config.rooms_kept), me, time.monotonic)
    tasks = TaskOwner("bootstrap", on_error=lambda name, exc: stop.request_now())
    server = await GrpcServer.start(
        f"{bracketed(config.host)}:{config.port}",
        lambda server: bootstrap_service_pb2_grpc.add_BootstrapServiceServicer_to_server(servicer, server),
        [SERVICE_NAME],
        leg=Leg.BOOTSTRAP,
        security=security,
    )
    try:
        tasks.spawn(security.watch(), "key files")
        tasks.spawn(servicer.expire_forever(), "expire")
        tasks.spawn(servicer.publish_loads_forever(), "loads")
        await server.set_serving(True)
        on_ready(
            {
                "service": "bootstrap",
                "endpoint": server.endpoint,
                "port": server.port,
                "pid": me.pid,
                "epoch": epoch,
            }
        )
        tasks.spawn(service_manager().accompany(stop), "service manager")
        await stop.draining.wait()
    finally:
        servicer.close()
        await server.stop(_STOP_GRACE)
        await tasks.close()
