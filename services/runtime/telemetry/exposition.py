"""/metrics over HTTP for the services that have no HTTP server of their own, and what every service has in it.

GET /metrics answers in the text format of Prometheus, GET /health that the event loop runs. Nothing else is served:
no request can change anything, and nothing here depends on a peer.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable

import uvicorn
from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import Receive, Scope, Send

from engine_core.types.errors import ConfigError
from services.runtime.addresses import dialable
from services.runtime.http_server import HttpServer
from services.runtime.tasks import TaskOwner
from services.runtime.telemetry.lag import LoopLagMonitor

log = logging.getLogger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_STOP_SECONDS = 2.0

Refresh = Callable[[], Awaitable[None]]
"""Awaited before each scrape; must end in time by itself."""


class ServiceFigures(Collector):
    """What every service tells of itself beside the process's own figures."""

    def __init__(self, service: str, lag: LoopLagMonitor) -> None:
        self._service, self._version, self._lag = service, version(), lag

    def collect(self) -> Iterable[Metric]:
        """Yields the families; called by the registry."""
        info = GaugeMetricFamily("pdmesh_build_info", "Always 1; what runs here", labels=["service", "version"])
        info.add_metric([self._service, self._version], 1)
        lag = GaugeMetricFamily(
            "pdmesh_event_loop_lag_seconds",
            "How late the event loop wakes a timer: 99th percentile of the last ten seconds",
            value=self._lag.p99(),
        )
        return (info, lag)


def service_registry(service: str, lag: LoopLagMonitor) -> CollectorRegistry:
    """A registry with process_*, pdmesh_build_info and pdmesh_event_loop_lag_seconds."""
    disable_created_metrics()  # type: ignore[no-untyped-call]  # a series per series that no query needs
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(ServiceFigures(service, lag))
    return registry


def version() -> str:
    """The version of pdmesh; empty where it is not installed."""
    try:
        return importlib.metadata.version("pdmesh")
    except importlib.metadata.PackageNotFoundError:
        return ""


class MetricsServer:
    """A started server. Make one with start(); stop() it."""

    def __init__(self, listener: socket.socket, endpoint: str, app: _App) -> None:
        self._listener = listener
        self.endpoint = endpoint
        """Where others reach it, as host:port."""
        self.port: int = listener.getsockname()[1]
        self._server = HttpServer(
            uvicorn.Config(
                app,
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=1,
            )
        )
        self._tasks = TaskOwner("metrics")
        self._serving: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        host: str,
        port: int,
        registry: CollectorRegistry,
        *,
        refresh: Refresh | None = None,
        advertise_host: str = "",
    ) -> MetricsServer:
        """Listens on `host`:`port` (0 takes a free one). Raises ConfigError when the address can't be had."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host.strip("[]"), port))
        except (OSError, OverflowError) as exc:
            listener.close()
            raise ConfigError(f"cannot serve metrics on {host}:{port}: {exc}", field="metrics_port") from exc
        endpoint = f"{dialable(host, advertise_host)}:{listener.getsockname()[1]}"
        made = cls(listener, endpoint, _App(registry, refresh))
        made._serving = made._tasks.spawn(made._server.serve([listener]), "serve")
        listening = made._tasks.spawn(made._server.listening.wait(), "listening")
        await asyncio.wait({made._serving, listening}, return_when=asyncio.FIRST_COMPLETED)
        listening.cancel()
        return made

    async def stop(self) -> None:
        """Takes no more requests, and ends."""
        self._server.should_exit = True
        if self._serving is not None:
            await asyncio.wait({self._serving}, timeout=_STOP_SECONDS)
        await self._tasks.close()
        self._listener.close()


class _App:
    """The ASGI application."""

    def __init__(self, registry: CollectorRegistry, refresh: Refresh | None) -> None:
        self._registry, self._refresh = registry, refresh

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        status, body = 200, b"ok\n"
        if scope["method"] not in ("GET", "HEAD"):
            status, body = 405, b"only GET\n"
        elif scope["path"] == "/metrics":
            if self._refresh is not None:
                await self._refresh()
            body = generate_latest(self._registry)
        elif scope["path"] != "/health":
            status, body = 404, b"there are /metrics and /health\n"
        headers = [(b"content-type", CONTENT_TYPE.encode()), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})
