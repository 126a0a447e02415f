"""Asking workers about themselves, as plain data: for the commands that show a mesh, and for the router's console."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdmesh.bootstrap.v1 import rank_table_pb2
from pdmesh.common.v1 import identity_pb2, worker_pb2, worker_pb2_grpc
from services.runtime.channels import ChannelPool

T = TypeVar("T")
KV_STATES = ("total", "free", "used", "cached", "pinned", "quarantined")
_UNHEALTHY = "NO ANSWER"


async def ask(call: Awaitable[T]) -> tuple[T | None, str]:
    """The answer, or None and why there is none."""
    try:
        return await call, ""
    except grpc.aio.AioRpcError as exc:
        return None, f"{exc.code().name}: {exc.details()}"


async def ask_rank(pool: ChannelPool, row: rank_table_pb2.RankRow, timeout: float) -> dict[str, Any]:
    """One rank, asked for its figures and health; `timeout` seconds for each."""
    channel = pool.get(row.endpoint)
    (live, error), (health, _) = await asyncio.gather(
        ask(worker_pb2_grpc.WorkerServiceStub(channel).GetStats(worker_pb2.GetStatsRequest(), timeout=timeout)),
        ask(health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout)),
    )
    return rank_as_data(row, live, error, health)


def rank_as_data(
    row: rank_table_pb2.RankRow,
    live: worker_pb2.GetStatsResponse | None,
    error: str = "",
    health: health_pb2.HealthCheckResponse | None = None,
) -> dict[str, Any]:
    """One rank: what it says itself, or else what the table says of it."""
    state = rank_table_pb2.MembershipState.Name(row.state).removeprefix("MEMBERSHIP_STATE_")
    source: Any = row if live is None else live
    role = row.instance.role if live is None else live.role
    return {
        "instance": row.instance.name,
        "role": identity_pb2.Role.Name(role).removeprefix("ROLE_"),
        "dp": row.coord.dp,
        "cp": row.coord.cp,
        "tp": row.coord.tp,
        "endpoint": row.endpoint,
        "incarnation": source.incarnation,
        "pid": source.pid,
        "engine_pid": source.engine_pid,
        "host": source.host,
        "state": state if live is None else live.state or state,
        "table_state": state,
        "answers": live is not None,
        "error": error,
        "health": _UNHEALTHY if health is None else health_pb2.HealthCheckResponse.ServingStatus.Name(health.status),
        "load": {
            "running": source.load.running,
            "queued": source.load.queued,
            "queued_tokens": source.load.queued_tokens,
        },
        "kv": {name: getattr(source.load.kv, name) for name in KV_STATES},
        "pairs": [] if live is None else [_pair(pair) for pair in live.pairs],
        "sessions": 0 if live is None else live.sessions,
        "streams": 0 if live is None else live.streams,
        "tasks": 0 if live is None else live.tasks,
        "uptime_seconds": 0.0 if live is None else live.uptime_seconds,
        "loop_lag_p99_seconds": 0.0 if live is None else live.loop_lag_p99_seconds,
        "counters": {} if live is None else dict(live.counters),
        "drained": False if live is None else live.drained,
        "drain_note": "" if live is None else live.drain_note,
        "stalled_seconds": 0.0 if live is None else live.stalled_seconds,
        "figures_age_seconds": 0.0 if live is None else live.figures_age_seconds,
        "fingerprint": row.instance.fingerprint,
        "metrics_endpoint": row.metrics_endpoint,
        "models": list(row.instance.served_model_names),
        "max_model_len": row.instance.max_model_len,
    }


def _pair(pair: worker_pb2.TransferPair) -> dict[str, Any]:
    return {
        "peer_instance": pair.peer_instance,
        "peer_incarnation": pair.peer_incarnation,
        "transport": pair.transport,
        "reason": pair.reason,
        "up": pair.up,
        "bytes": pair.bytes,
        "seconds": pair.seconds,
        "failures": pair.failures,
    }


async def ask_moves(
    pool: ChannelPool, endpoint: str, rooms: set[int], timeout: float
) -> tuple[list[worker_pb2.StateMove], str]:
    """The moves of rooms that a worker still knows, and why there is no answer."""
    stub = worker_pb2_grpc.WorkerServiceStub(pool.get(endpoint))
    answer, error = await ask(stub.Explain(worker_pb2.ExplainRequest(rooms=sorted(rooms)), timeout=timeout))
    return (list(answer.moves) if answer is not None else [], error)


def worker_move(process: str, move: worker_pb2.StateMove) -> dict[str, Any]:
    """A move as a worker tells it, in the form that all moves have here."""
    return {
        "unix_seconds": move.unix_seconds,
        "process": process,
        "room": move.session.room,
        "attempt": move.session.attempt,
        "machine": move.machine,
        "from": move.from_state,
        "to": move.to_state,
        "seconds": move.seconds,
        "reason": move.reason,
    }


def router_move(move: dict[str, Any]) -> dict[str, Any]:
    """A move as the router writes it, in the form that all moves have here."""
    return {
        "unix_seconds": float(move.get("unix_seconds", 0.0)),
        "process": "router",
        "room": int(move.get("room", 0)),
        "attempt": int(move.get("attempt", 0)),
        "machine": str(move.get("machine", "request")),
        "from": str(move.get("from_state", "")),
        "to": str(move.get("to_state", "")),
        "seconds": float(move.get("seconds", 0.0)),
        "reason": str(move.get("reason", "")),
    }
