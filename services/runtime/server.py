"""A gRPC server as every service of the mesh runs it.

Health and reflection are there from the first moment, health as NOT_SERVING until set_serving(True).
Health speaks of this process alone and never depends on a peer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from engine_core.types.errors import ConfigError, Leg
from services.runtime.addresses import dialable
from services.runtime.channels import KEEPALIVE_MS, MAX_MESSAGE_BYTES
from services.runtime.errors import ErrorInterceptor
from services.runtime.security import Security

LIVENESS = "liveness"
"""A name in health that is SERVING as long as the process answers, also while it joins, drains or waits for
Bootstrap: for probes that restart what does not answer."""

_OPTIONS = [
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_MS),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Peers ping every 5 s, also without calls; a jittery clock is no reason to hang up on them.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Two processes on one port would share its connections at random; the second must fail instead.
    ("grpc.so_reuseport", 0),
]


class GrpcServer:
    """A started server. Make one with start()."""

    def __init__(self, server: grpc.aio.Server, checks: Any, names: Sequence[str], endpoint: str, port: int) -> None:
        self._server, self._checks, self._names = server, checks, tuple(names)
        self.endpoint = endpoint
        """Where peers reach it: host:port or unix:path."""
        self.port = port
        """The port that was bound; 0 for a unix socket."""

    @classmethod
    async def start(
        cls,
        address: str,
        add: Callable[[grpc.aio.Server], None],
        service_names: Sequence[str],
        *,
        leg: Leg = Leg.UNKNOWN,
        advertise_host: str = "",
        advertise_port: int = 0,
        security: Security | None = None,
    ) -> GrpcServer:
        """Binds `address` ("host:port", port 0 picks one, or "unix:path"), lets `add` add servicers, and
        starts. `service_names` are the full names, such as pdmesh.decode.v1.DecodeService; `leg` names
        this process in errors; peers are told `advertise_host` and `advertise_port` where what is bound would not
        do. Callers must show what `security` asks for. Raises ConfigError when the address can't be had, or could be
        reached from other machines while nothing protects it."""
        protection = security if security is not None else Security()
        unix = address.startswith("unix:")
        if not unix:
            protection.check_host(address.rpartition(":")[0])
        server = grpc.aio.server(
            interceptors=[
                *protection.interceptors(leg),
                ErrorInterceptor(leg, protection.heard if protection.tls is not None else None),
            ],
            options=_OPTIONS,
        )
        add(server)
        checks = health.aio.HealthServicer()  # type: ignore[attr-defined]  # the stubs lack aio
        health_pb2_grpc.add_HealthServicer_to_server(checks, server)
        names = [*service_names, health.SERVICE_NAME]
        reflection.enable_server_reflection([*names, reflection.SERVICE_NAME], server)
        try:
            port = protection.add_port(server, address)
        except RuntimeError as exc:
            # For ports gRPC only says that binding failed.
            why = str(exc) if unix else "the port is taken, or the address is none of this machine's"
            raise ConfigError(f"cannot listen on {address}: {why}", field="port") from exc
        shown = f"{dialable(address.rpartition(':')[0], advertise_host)}:{advertise_port or port}"
        endpoint = address if unix else shown
        made = cls(server, checks, service_names, endpoint, 0 if unix else port)
        await made.set_serving(False)  # before start: the overall status begins as SERVING otherwise
        await checks.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        await server.start()
        return made

    async def set_serving(self, serving: bool) -> None:  # noqa: FBT001  # reads plainly: set_serving(True)
        """Sets the health of every service and of the whole."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self._names):
            await self._checks.set(name, status)

    async def stop(self, grace: float | None = None) -> None:
        """Says NOT_SERVING, takes no new calls, and cuts the others after `grace` seconds."""
        await self.set_serving(False)
        await self._server.stop(grace)

    async def wait(self) -> None:
        """Returns when the server has stopped."""
        await self._server.wait_for_termination()
