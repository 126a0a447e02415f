"""The router process: tokenizer, watched table, channels, HTTP server.

read the model directory ─▶ bind ─▶ watch Bootstrap ─▶ serve ─▶ drain: no new connections, streams end
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from engine_core.types.digest import tokenizer_digest
from engine_core.types.errors import ConfigError
from services.config import RouterConfig, service_manager
from services.router.app import make_app
from services.router.console.overview import keep_history
from services.router.edge.middleware import check_origins
from services.router.front import Front, ModelInfo
from services.router.metrics import RouterMetrics, TableFigures, WorkerFigures
from services.router.routing.mesh import Mesh
from services.router.routing.placement import placeable
from services.router.routing.retry import RetryBudget
from services.router.routing.rooms import RoomRecorder
from services.router.routing.table import WatchedTable
from services.router.text.tokenizer import RouterTokenizer
from services.runtime.addresses import dialable
from services.runtime.api_keys import ApiKeys
from services.runtime.channels import ChannelPool
from services.runtime.http_connection import Connections, HttpLimits, allow_files
from services.runtime.http_server import HttpServer
from services.runtime.security import Security
from services.runtime.tasks import Stop, TaskOwner
from services.runtime.telemetry import LoopLagMonitor
from services.runtime.telemetry.tracing import start_tracing
from services.runtime.tls import HttpTls
from services.wire.bootstrap import WatchedService
from services.worker.roster import RosterWatcher

log = logging.getLogger(__name__)

_SYNC_TIMEOUT = 5.0
_FLUSH_TIMEOUT = 2.0
_OTHER_FILES = 512
"""That this process may have open beside its clients' connections: to workers, to Bootstraps, and its own."""
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}
"""Hosts that mean every address, with what to dial on this machine."""


async def run(config: RouterConfig, stop: Stop, on_ready: Callable[[dict[str, Any]], None]) -> None:
    """Serves until `stop.draining`, then ends open requests for up to drain_timeout, or until `stop.now`.

    `on_ready` gets {"service", "endpoint", "port", "pid"} once HTTP is served; whether workers are there,
    /readiness says. Raises ConfigError when the model directory or the address is wrong.
    """
    security, tls = Security.of(config), HttpTls.of(config.http_tls_cert, config.http_tls_key)
    if tls is not None:
        security.also(tls)
    check_origins(config.cors_origin)
    keys = ApiKeys(config.api_key, Path(config.api_key_file) if config.api_key_file else None)
    security.also(keys)
    tokenizer = RouterTokenizer.load(config.model, config.chat_template)
    model = ModelInfo.read(config, tokenizer)
    listener, endpoint = _bind(config.host, config.port)
    port: int = listener.getsockname()[1]
    pool = ChannelPool(config.connect_timeout, security=security)
    reachable = f"{'' if tls is None else 'https://'}{dialable(config.host, config.advertise_host)}:{port}"
    me = WatchedService(
        "router", os.getpid(), socket.gethostname(), http_endpoint=reachable, metrics_endpoint=reachable
    )
    watcher = RosterWatcher(config.bootstrap, me, pool)
    table = WatchedTable(watcher.roster)
    watcher.on_change(table.notify)
    lag = LoopLagMonitor()
    metrics = RouterMetrics(lag)
    figures = WorkerFigures(table.rows, pool)
    metrics.registry.register(figures)
    recorder = RoomRecorder(pool, config.bootstrap)
    mesh = Mesh(
        table,
        pool,
        tokenizer,
        tokenizer_digest(config.model),
        policy=config.policy,
        recorder=recorder,
        metrics=metrics,
        max_attempts=config.max_attempts,
        peer_wait=config.peer_wait,
        # The burst lets every request in flight lose its worker twice in a row.
        budget=RetryBudget(share=config.retry_share, floor=config.retry_floor, burst=2.0 * config.max_in_flight),
    )
    front = Front(config, tokenizer, model, mesh, figures)
    metrics.registry.register(TableFigures(watcher.roster, partial(_ready, mesh), mesh.live.states))
    tracing = start_tracing(config.otlp_endpoint, config.trace_sample_ratio, "router", reachable)
    front.traces.tracer = tracing
    connections = _connections(config, metrics)
    server = HttpServer(_uvicorn_config(config, make_app(front, keys), tls, connections))
    tasks = TaskOwner("router", on_error=lambda name, exc: stop.request_now())
    try:
        watcher.start()
        tasks.spawn(security.watch(), "key files")
        tasks.spawn(recorder.run(), "rooms")
        tasks.spawn(lag.run(), "loop lag")
        tasks.spawn(connections.watch(), "connections")
        tasks.spawn(mesh.prober.run(), "breakers")
        if config.serves_console:
            tasks.spawn(keep_history(front), "history")
        if not await watcher.wait_synced(_SYNC_TIMEOUT):
            log.warning("no Bootstrap answers yet: %s", ", ".join(config.bootstrap))
        serving = tasks.spawn(server.serve([listener]), "http")
        tasks.spawn(_stop_in_stages(server, front, stop), "stop")
        listening = tasks.spawn(server.listening.wait(), "listening")
        await asyncio.wait({serving, listening}, return_when=asyncio.FIRST_COMPLETED)
        if server.listening.is_set():
            on_ready({"service": "router", "endpoint": endpoint, "port": port, "pid": me.pid})
            tasks.spawn(service_manager().accompany(stop), "service manager")
        await serving
    finally:
        await front.tasks.close()
        await front.grammars.close()
        await tasks.close()
        await watcher.close()
        if tracing is not None:
            await tracing.close()
        try:
            async with asyncio.timeout(_FLUSH_TIMEOUT):
                await recorder.flush()
        except TimeoutError:
            log.debug("rooms of the last second were not recorded")
        await pool.close()
        tokenizer.close()
        listener.close()


def _ready(mesh: Mesh) -> bool:
    return bool(placeable(mesh.table.rows(), mesh.digest))


async def _stop_in_stages(server: HttpServer, front: Front, stop: Stop) -> None:
    await stop.draining.wait()
    front.draining = True
    server.should_exit = True
    await stop.now.wait()
    server.force_exit = True


def _connections(config: RouterConfig, metrics: RouterMetrics) -> Connections:
    allowed = allow_files(config.max_connections + _OTHER_FILES)
    if allowed < config.max_connections + _OTHER_FILES:
        log.warning(
            "this process may open %d files: too few for --max-connections %d (ulimit -n)",
            allowed,
            config.max_connections,
        )
    limits = HttpLimits(
        connections=config.max_connections,
        head_bytes=config.max_header_bytes,
        head_seconds=config.header_timeout,
        stall_seconds=config.client_stall_timeout,
    )
    return Connections(limits, lambda reason: metrics.refused_connections.labels(reason).inc())


def _uvicorn_config(
    config: RouterConfig, app: FastAPI, tls: HttpTls | None, connections: Connections
) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=connections.protocol,  # type: ignore[arg-type]  # whatever makes a protocol does
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=max(1, round(config.drain_timeout)),
        ssl_context_factory=None if tls is None else lambda *_: tls.context,
    )


def _bind(host: str, port: int) -> tuple[socket.socket, str]:
    """A bound socket and where others reach it. Raises ConfigError when the address can't be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except (OSError, OverflowError) as exc:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {exc}", field="port") from exc
    bound = listener.getsockname()[1]
    shown = _WILDCARDS.get(host, f"[{host}]" if ":" in host else host)
    return listener, f"{shown}:{bound}"
