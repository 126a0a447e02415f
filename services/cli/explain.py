"""`pdmesh explain REQUEST_ID`: the state moves of all processes that one request touched, as one timeline.

Bootstrap knows the rooms of a request id, the router the request's own moves, and every worker the moves
of a room in its service and engine. A process that is gone, or does not answer, is named.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console

from engine_core.types.errors import NotFoundError, UnavailableError
from pdmesh.bootstrap.v1 import bootstrap_service_pb2, bootstrap_service_pb2_grpc, rank_table_pb2
from services.cli.options import add_command, query_fields
from services.cli.routers import http_client, refusal, trouble
from services.cli.status import get_table, plain_table, wide_console
from services.config import QueryConfig, load
from services.runtime.api_keys import key_to_send
from services.runtime.channels import ChannelPool
from services.runtime.security import Security
from services.runtime.tasks import run
from services.wire.bootstrap import http_url
from services.worker.survey import ask, ask_moves, router_move, worker_move


def add_command_to(app: typer.Typer) -> None:
    """Adds `explain`."""
    request_id = Annotated[str, typer.Argument(metavar="REQUEST_ID", help="The id in the response, or x-request-id")]
    as_json = Annotated[bool, typer.Option("--json", help="One JSON object")]
    fields = query_fields()
    doc = "Join the state moves of one request in every process into one timeline."
    extras = {"request_id": (request_id, ...), "json": (as_json, False)}
    add_command(app, "explain", fields, _command, doc=doc, extras=extras)


def _command(file: Path | None, flags: dict[str, Any], extra: dict[str, Any]) -> int:
    config = load(QueryConfig, file=file, flags=flags)
    timeline = run(lambda _stop: _first(config, extra["request_id"]))
    if extra["json"]:
        print(json.dumps(timeline))
    else:
        show(timeline, wide_console())
    return 0


async def _first(config: QueryConfig, request_id: str) -> dict[str, Any]:
    security = Security.of(config)
    key = key_to_send(config.api_key, config.api_key_file)
    last = UnavailableError("no Bootstrap address is given")
    for address in config.bootstrap:
        try:
            return await collect(address, request_id, config.query_timeout, security, config.http_ca, key)
        except UnavailableError as exc:
            last = exc
    raise last


async def collect(
    bootstrap: str,
    request_id: str,
    timeout: float,
    security: Security | None = None,
    http_ca: str = "",
    api_key: str = "",
) -> dict[str, Any]:
    """{request_id, rooms, routes, moves, silent}: moves in order of time, each with the process it came from.

    Raises UnavailableError when Bootstrap does not answer, NotFoundError when nobody knows the request.
    """
    pool = ChannelPool(timeout, security=security)
    try:
        table = await get_table(pool, bootstrap, timeout)
        stub = bootstrap_service_pb2_grpc.BootstrapServiceStub(pool.get(bootstrap))
        ids = {request_id, request_id.removeprefix("chatcmpl-").removeprefix("cmpl-")}
        lookup = bootstrap_service_pb2.LookupRoomsRequest(request_ids=sorted(ids))
        (found, _), from_routers = await asyncio.gather(
            ask(stub.LookupRooms(lookup, timeout=timeout)),
            ask_routers(table.services, request_id, timeout, http_ca, api_key),
        )
        routes = list(found.rooms) if found is not None else []
        rooms = {route.room for route in routes} | {int(room) for answer in from_routers for room in answer["rooms"]}
        if not rooms:
            raise NotFoundError(f"nobody knows a request {request_id}")
        moves = [move for answer in from_routers for move in answer["moves"]]
        silent = [answer["silent"] for answer in from_routers if answer["silent"]]
        endpoints = {row.endpoint: row.instance.name for row in table.rows}
        answers = await asyncio.gather(*(ask_moves(pool, e, rooms, timeout) for e in endpoints))
        for name, (found_moves, error) in zip(endpoints.values(), answers, strict=True):
            moves += [worker_move(name, move) for move in found_moves]
            if error:
                silent.append({"process": name, "error": error})
    finally:
        await pool.close()
    moves.sort(key=lambda move: move["unix_seconds"])
    return {
        "request_id": request_id,
        "rooms": sorted(rooms),
        "routes": [_route(route) for route in routes],
        "moves": moves,
        "silent": silent,
    }


async def ask_routers(
    services: Iterable[rank_table_pb2.Service], request_id: str, timeout: float, http_ca: str, api_key: str = ""
) -> list[dict[str, Any]]:
    """What each router knows: {rooms, moves, silent}, where `silent` says why it did not answer, or is None."""
    answers: list[dict[str, Any]] = []
    async with http_client(timeout, http_ca, api_key) as client:
        for service in services:
            if not service.http_endpoint:
                continue
            data: dict[str, Any] = {}
            try:
                answer = await client.get(f"{http_url(service.http_endpoint)}/explain/{request_id}")
                data = answer.json() if answer.status_code == 200 else {}
                error = str(refusal(answer) or "")
            except (httpx.HTTPError, ValueError) as exc:
                error = str(trouble(exc))
            silent = {"process": f"router {service.http_endpoint}", "error": error} if error else None
            moves = [router_move(move) for move in data.get("moves", ())]
            answers.append({"rooms": data.get("rooms", ()), "moves": moves, "silent": silent})
    return answers


def _route(route: rank_table_pb2.RoomRoute) -> dict[str, Any]:
    return {
        "room": route.room,
        "attempt": route.attempt,
        "prefill_instance": route.prefill_instance,
        "decode_instance": route.decode_instance,
    }


def show(timeline: dict[str, Any], console: Console) -> None:
    """Prints the timeline, times relative to the first move."""
    console.print(f"request {timeline['request_id']}, rooms {', '.join(f'{r:016x}' for r in timeline['rooms'])}")
    for route in timeline["routes"]:
        ways = f"prefill {route['prefill_instance'] or '-'}, decode {route['decode_instance']}"
        console.print(f"  room {route['room']:016x} attempt {route['attempt']}: {ways}")
    start = timeline["moves"][0]["unix_seconds"] if timeline["moves"] else 0.0
    table = plain_table("ms", "process", "attempt", "machine", "move", "after ms", "why")
    for move in timeline["moves"]:
        at, spent = (move["unix_seconds"] - start) * 1e3, move["seconds"] * 1e3
        change = f"{move['from']} → {move['to']}" if move["from"] else move["to"]
        table.add_row(
            f"{at:.1f}", move["process"], str(move["attempt"]), move["machine"], change, f"{spent:.1f}", move["reason"]
        )
    console.print(table)
    for gone in timeline["silent"]:
        console.print(f"{gone['process']} does not answer: {gone['error']}")
