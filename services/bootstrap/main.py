"""The Bootstrap process: a table, its two timers, and a gRPC server."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from typing import Any

import msgspec

from engine_core.types.errors import Leg
from engine_core.types.ids import mint_incarnation
from pdmesh.bootstrap.v1 import bootstrap_service_pb2_grpc
from services.bootstrap.auto_role import AutoRole, AutoRoleSettings
from services.bootstrap.metrics import BootstrapMetrics, TableMoves
from services.bootstrap.rank_table import RankTable
from services.bootstrap.role_changer import RoleChanger
from services.bootstrap.rooms import RoomBook
from services.bootstrap.servicer import SERVICE_NAME, BootstrapServicer
from services.config import BootstrapConfig, service_manager
from services.runtime.addresses import bracketed
from services.runtime.channels import ChannelPool
from services.runtime.security import Security
from services.runtime.server import GrpcServer
from services.runtime.tasks import Stop, TaskOwner
from services.runtime.telemetry import LoopLagMonitor
from services.runtime.telemetry.exposition import MetricsServer
from services.wire.bootstrap import WatchedService

_STOP_GRACE = 1.0


async def run(config: BootstrapConfig, stop: Stop, on_ready: Callable[[dict[str, Any]], None]) -> None:
    """Serves until `stop.draining`: there is nothing to drain but calls that take milliseconds.

    `on_ready` gets {"service", "endpoint", "port", "pid", "epoch"}. Raises ConfigError when the address
    can't be had.
    """
    security = Security.of(config)
    channels = ChannelPool(security=security)
    epoch = mint_incarnation()
    moves, lag, rooms = TableMoves(), LoopLagMonitor(), RoomBook(config.rooms_kept)
    table = RankTable(epoch, ttl=config.lease_ttl, renew=config.lease_renewal, move_log=moves.log)
    me = WatchedService(name="bootstrap", pid=os.getpid(), host=socket.gethostname())
    servicer = BootstrapServicer(table, rooms, me, time.monotonic)
    tasks = TaskOwner("bootstrap", on_error=lambda name, exc: stop.request_now())
    server = await GrpcServer.start(
        f"{bracketed(config.host)}:{config.port}",
        lambda server: bootstrap_service_pb2_grpc.add_BootstrapServiceServicer_to_server(servicer, server),
        [SERVICE_NAME],
        leg=Leg.BOOTSTRAP,
        security=security,
    )
    metrics: MetricsServer | None = None
    try:
        if config.metrics_port >= 0:
            figures = BootstrapMetrics(table, moves, rooms, lambda: servicer.watchers, lag)
            metrics = await MetricsServer.start(config.host, config.metrics_port, figures.registry)
            servicer.introduce(msgspec.structs.replace(me, metrics_endpoint=metrics.endpoint))
        tasks.spawn(security.watch(), "key files")
        tasks.spawn(lag.run(), "loop lag")
        tasks.spawn(servicer.expire_forever(), "expire")
        tasks.spawn(servicer.publish_loads_forever(), "loads")
        if config.auto_role:
            settings = AutoRoleSettings(
                config.auto_role_high, config.auto_role_low, config.auto_role_hold, config.auto_role_cooldown
            )
            changer = RoleChanger(
                AutoRole(settings), table.rows, channels, time.monotonic, limit=config.auto_role_limit
            )
            tasks.spawn(changer.run(), "auto role")
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
        if metrics is not None:
            await metrics.stop()
        await channels.close()
