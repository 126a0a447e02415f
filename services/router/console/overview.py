"""The mesh as this router sees it: one snapshot for all who look.

A snapshot is made when somebody asks and the last one is a second old, so a mesh that nobody looks at is not
asked, and many browsers cost as much as one.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from collections.abc import Callable
from importlib import metadata
from typing import Any

import orjson

from engine_core.types.errors import NotFoundError
from services.router.front import Front
from services.router.routing.live import SLOW_FIRST_TOKEN, SLOW_TOKEN
from services.router.routing.placement import placeable
from services.wire.bootstrap import RankRow, row_to_proto
from services.worker.survey import ask_moves, router_move, worker_move
from services.worker.surveyor import Surveyor

FRESH_SECONDS = 1.0
_ASK_TIMEOUT = 3.0
_REQUESTS = 200
_RECENT = 40
_SHOWN = (
    "instance", "role", "dp", "endpoint", "incarnation", "pid", "host", "state", "age", "rates", "answers", "error",
    "load", "kv", "sessions", "uptime_seconds", "models", "max_model_len",
)  # fmt: skip


class Overview:
    """Makes snapshots. Used on one event loop only; `clock` is monotonic, in seconds."""

    def __init__(self, front: Front, clock: Callable[[], float] = time.monotonic) -> None:
        self._front, self._clock = front, clock
        self._surveyor = Surveyor(front.mesh.pool, front.tasks, clock=clock)
        self._lock = asyncio.Lock()
        self._made = float("-inf")
        self._bytes = b"{}"
        self._started = clock()
        self._host = socket.gethostname()
        self._version = metadata.version("pdmesh")

    async def as_json(self, since: float) -> bytes:
        """{mesh, history}: the snapshot, and the samples of history after `since`, in seconds since the epoch."""
        async with self._lock:
            if self._clock() - self._made >= FRESH_SECONDS:
                self._made = self._clock()
                self._bytes = orjson.dumps(await self._snapshot())
        history = orjson.dumps(self._front.mesh.history.since(since))
        return b'{"mesh":' + self._bytes + b',"history":' + history + b"}"

    async def explain(self, request_id: str) -> dict[str, Any]:
        """{request_id, rooms, moves, silent}: moves of the router and of the workers that had the request, in order
        of time. Raises NotFoundError for a request that did not come through this router."""
        trace = self._front.traces.find(request_id)
        if trace is None:
            raise NotFoundError(f"this router knows no request {request_id}", field="request_id")
        placed = " + ".join(move.reason for move in trace.moves if move.to_state == "PLACED")
        rows = [row for row in self._leaders() if row.instance.name in placed]
        pool, rooms = self._front.mesh.pool, set(trace.rooms)
        answers = await asyncio.gather(*(ask_moves(pool, row.endpoint, rooms, _ASK_TIMEOUT) for row in rows))
        moves = [router_move(move) for move in trace.as_json()["moves"]]
        for row, (found, _) in zip(rows, answers, strict=True):
            moves += [worker_move(row.instance.name, move) for move in found]
        for move in moves:
            move["room"] = f"{move['room']:016x}"
        silent = [
            {"process": row.instance.name, "error": error}
            for row, (_, error) in zip(rows, answers, strict=True)
            if error
        ]
        return {
            "request_id": trace.request_id,
            "rooms": [f"{room:016x}" for room in trace.rooms],
            "moves": sorted(moves, key=lambda move: move["unix_seconds"]),
            "silent": silent,
        }

    # ---- inside -----------------------------------------------------------------------------------

    def _leaders(self) -> list[RankRow]:
        return [row for row in self._front.mesh.table.rows() if row.is_leader]

    async def _snapshot(self) -> dict[str, Any]:
        front, mesh = self._front, self._front.mesh
        rows = self._leaders()
        ranks = await self._surveyor.survey([row_to_proto(row) for row in rows])
        roster = mesh.table.roster
        requests = mesh.live.rows(_REQUESTS)
        return {
            "time": time.time(),
            "version": self._version,
            "models": list(front.model.names),
            "router": {
                "host": self._host,
                "draining": front.draining,
                "ready": not front.draining and bool(placeable(mesh.table.rows(), mesh.digest)),
                "in_flight": front.admission.in_flight,
                "queued": front.admission.queued,
                "max_in_flight": front.config.max_in_flight,
                "max_queued": front.config.max_queued,
                "uptime_seconds": self._clock() - self._started,
                "policy": front.config.policy.value,
            },
            "bootstraps": [
                {"address": address, "in_contact": roster.contact(address)} for address in front.config.bootstrap
            ],
            "workers": [self._worker(rank) for rank in ranks],
            "links": self._surveyor.links(ranks),
            "requests": requests,
            "requests_total": len(mesh.live),
            "stages": Counter(request["state"] for request in requests),
            "recent": mesh.live.recent(_RECENT),
            "slow_after": {"first_token": SLOW_FIRST_TOKEN, "token": SLOW_TOKEN},
        }

    def _worker(self, rank: dict[str, Any]) -> dict[str, Any]:
        counters = rank["counters"]
        return {name: rank[name] for name in _SHOWN} | {
            "incarnation": str(rank["incarnation"]),  # JavaScript has no integers of 63 bits
            "asked_tokens": counters.get("prefix_query_tokens", 0.0),
            "cached_tokens": counters.get("prefix_hit_tokens", 0.0),
            "ours": self._front.mesh.in_flight[rank["incarnation"]],
        }


async def keep_history(front: Front) -> None:
    """Closes a sample of history each second, for ever."""
    while True:
        await asyncio.sleep(1.0)
        front.mesh.history.tick(time.time(), front.admission.in_flight, front.admission.queued)
