"""`pdmesh status`: the rank table, and every worker and router asked live.

Who does not answer is shown as the table has it, with `answers: false` and the error.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import grpc
import httpx
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from engine_core.types.errors import Leg, UnavailableError
from pdmesh.bootstrap.v1 import bootstrap_service_pb2, bootstrap_service_pb2_grpc, rank_table_pb2
from services.cli.options import add_command, query_fields
from services.cli.routers import http_client, trouble
from services.config import QueryConfig, load
from services.runtime.channels import ChannelPool
from services.runtime.errors import from_rpc_error
from services.runtime.security import Security
from services.runtime.tasks import run
from services.wire.bootstrap import http_url
from services.worker.survey import KV_STATES, ask_rank


def add_command_to(app: typer.Typer) -> None:
    """Adds `status`."""
    as_json = Annotated[bool, typer.Option("--json", help="One JSON object")]
    fields = query_fields()
    doc = "Show the rank table, health, load, KV accounting and transfer pairs, asked live."
    add_command(app, "status", fields, _command, doc=doc, extras={"json": (as_json, False)})


def _command(file: Path | None, flags: dict[str, Any], extra: dict[str, Any]) -> int:
    config = load(QueryConfig, file=file, flags=flags)
    status = run(lambda _stop: collect_any(config))
    if extra["json"]:
        print(json.dumps(status))
    else:
        show(status, wide_console())
    return 0


async def collect_any(config: QueryConfig) -> dict[str, Any]:
    """The status from the first Bootstrap that answers. Raises UnavailableError of the last one."""
    security = Security.of(config)
    last = UnavailableError("no Bootstrap address is given")
    for address in config.bootstrap:
        try:
            return await collect(address, config.query_timeout, security, config.http_ca)
        except UnavailableError as exc:
            last = exc
    raise last


async def collect(
    bootstrap: str, timeout: float, security: Security | None = None, http_ca: str = ""
) -> dict[str, Any]:
    """The whole status as plain data; `timeout` seconds for each process asked. `http_ca` is a PEM file with
    authorities of routers' certificates beside those of the system.

    Raises UnavailableError when Bootstrap does not answer.
    """
    pool = ChannelPool(timeout, security=security)
    try:
        table = await get_table(pool, bootstrap, timeout)
        ranks = await asyncio.gather(*(ask_rank(pool, row, timeout) for row in table.rows))
        routers = await _services(table.services, timeout, http_ca)
    finally:
        await pool.close()
    ranks = sorted(ranks, key=lambda r: (r["instance"], r["dp"], r["cp"], r["tp"]))
    workers = [
        _service(r["role"].lower(), r["pid"], r["host"], r["endpoint"], r["instance"], r["metrics_endpoint"])
        for r in ranks
        if r["answers"]
    ]
    known = {(w["host"], w["pid"]) for w in workers}
    others = [s for s in routers if (s["host"], s["pid"]) not in known]
    for service in others:
        if service["name"] == "bootstrap":
            service["endpoint"] = bootstrap
    revision = {"table_epoch": table.revision.table_epoch, "n": table.revision.n}
    return {"bootstrap": bootstrap, "revision": revision, "ranks": ranks, "services": _unique(others + workers)}


async def get_table(pool: ChannelPool, bootstrap: str, timeout: float) -> bootstrap_service_pb2.GetRankTableResponse:
    """The rank table. Raises UnavailableError."""
    stub = bootstrap_service_pb2_grpc.BootstrapServiceStub(pool.get(bootstrap))
    try:
        table: bootstrap_service_pb2.GetRankTableResponse = await stub.GetRankTable(
            bootstrap_service_pb2.GetRankTableRequest(), timeout=timeout
        )
        return table
    except grpc.aio.AioRpcError as exc:
        why = from_rpc_error(exc, Leg.BOOTSTRAP).message
        raise UnavailableError(f"Bootstrap at {bootstrap} does not answer: {exc.code().name} {why}") from exc


async def _services(services: Iterable[rank_table_pb2.Service], timeout: float, http_ca: str) -> list[dict[str, Any]]:
    """Those that have a stream at Bootstrap; whoever has an HTTP address is asked whether he answers there."""
    async with http_client(timeout, http_ca) as client:

        async def why_silent(service: rank_table_pb2.Service) -> str:
            if not service.http_endpoint:
                return ""
            try:
                answer = await client.get(f"{http_url(service.http_endpoint)}/liveness")
            except httpx.HTTPError as exc:
                return str(trouble(exc))
            return f"its answer is {answer.status_code}" if answer.status_code >= 500 else ""

        errors = await asyncio.gather(*(why_silent(s) for s in services))
    return [
        _service(s.name, s.pid, s.host, s.http_endpoint, "", s.metrics_endpoint, error)
        for s, error in zip(services, errors, strict=True)
    ]


def _service(
    name: str, pid: int, host: str, endpoint: str, instance: str, metrics: str, error: str = ""
) -> dict[str, Any]:
    return {
        "name": name,
        "pid": pid,
        "host": host,
        "endpoint": endpoint,
        "instance": instance,
        "metrics": metrics,
        "answers": not error,
        "error": error,
    }


def _unique(services: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return list({(s["host"], s["pid"], s["name"]): s for s in services}.values())


def wide_console() -> Console:
    """Standard output, wide enough that no cell is cut; a narrow terminal wraps the lines itself."""
    console = Console(highlight=False)
    console.width = max(console.width, 180)
    return console


def plain_table(*columns: str, title: str = "") -> Table:
    """A table without a frame whose cells stay on one line."""
    table = Table(box=SIMPLE_HEAD, title=title or None, title_justify="left", pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table


def show(status: dict[str, Any], console: Console) -> None:
    """Prints the status as tables."""
    revision = status["revision"]
    console.print(f"rank table {revision['table_epoch']}/{revision['n']} of {status['bootstrap']}")
    ranks = plain_table(
        "instance", "role", "dp.cp.tp", "state", "health", "endpoint", "pid", "engine", "running", "queued"
    )
    kv = plain_table("instance", *KV_STATES, "incarnation", "up for", title="KV blocks")
    pairs = plain_table("instance", "peer", "transport", "why", "up", "MB", "GB/s", "failures", title="Transfer pairs")
    for r in status["ranks"]:
        place = f"{r['dp']}.{r['cp']}.{r['tp']}"
        numbers = [str(n) for n in (r["pid"], r["engine_pid"], r["load"]["running"], r["load"]["queued"])]
        ranks.add_row(r["instance"], r["role"], place, r["state"], r["health"], r["endpoint"], *numbers)
        blocks = [str(r["kv"][name]) for name in KV_STATES]
        kv.add_row(r["instance"], *blocks, str(r["incarnation"]), f"{r['uptime_seconds']:.0f} s")
        for p in r["pairs"]:
            rate = f"{p['bytes'] / p['seconds'] / 1e9:.2f}" if p["seconds"] > 0 else "-"
            up = "yes" if p["up"] else "no"
            amount = f"{p['bytes'] / 1e6:.1f}"
            pairs.add_row(
                r["instance"], p["peer_instance"], p["transport"], p["reason"], up, amount, rate, str(p["failures"])
            )
    services = plain_table("service", "instance", "pid", "host", "address", "/metrics at", "answers", title="Processes")
    for s in status["services"]:
        answers = "yes" if s["answers"] else "no"
        services.add_row(s["name"], s["instance"], str(s["pid"]), s["host"], s["endpoint"], s["metrics"], answers)
    for table in (ranks, kv, pairs, services):
        if table.row_count:
            console.print(table)
    for s in status["services"]:
        if not s["answers"]:
            console.print(f"{s['name']} {s['endpoint']} does not answer: {s['error']}")
    for r in status["ranks"]:
        if not r["answers"]:
            console.print(f"{r['instance']} does not answer: {r['error']}")
        if r["drain_note"]:
            console.print(f"{r['instance']} drains: {r['drain_note']}")
        if r["stalled_seconds"]:
            console.print(f"{r['instance']}: its engine has made no progress for {r['stalled_seconds']:.0f} s")
