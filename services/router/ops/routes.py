"""For operators: health, readiness, workers, metrics, explain, version."""

from __future__ import annotations

import asyncio
import time
from importlib import metadata
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from engine_core.types.errors import Leg, NotFoundError, UnavailableError
from services.router.edge.http import client_of, error_response, json_response, request_id_of, until_disconnect
from services.router.front import Front, Submission
from services.router.journey import Delta
from services.router.metrics import CONTENT_TYPE
from services.router.routing.mesh import Mesh
from services.router.routing.placement import placeable
from services.router.sampling_schema import SamplingRequest
from services.wire.bootstrap import RankRow

_METRICS_WAIT = 1.5


def ops_routes(front: Front) -> APIRouter:
    """The routes that need no model."""
    router = APIRouter(tags=["operations"])
    version = metadata.version("pdmesh")

    @router.get("/health")
    @router.get("/liveness")
    @router.get("/ping")
    async def health() -> Response:
        """200 while this process serves HTTP, whatever the workers do."""
        return json_response({"status": "ok"})

    @router.get("/health_generate")
    async def health_generate(request: Request) -> Response:
        """200 when a token could be generated; it takes the way of all requests."""
        options = front.options(SamplingRequest(temperature=0.0, max_tokens=1, ignore_eos=True), None)
        submission = Submission(
            request_id=request_id_of(request.scope),
            path="/health_generate",
            prompts=((0,),),
            options=options,
            arrival=time.monotonic(),
            client=client_of(request, None),
        )
        await until_disconnect(request.receive, front.run(submission, lambda _: _drop), front.tasks)
        return json_response({"status": "ok"})

    @router.get("/readiness")
    async def readiness() -> Response:
        """200 when a request could be placed now."""
        if front.draining:
            return error_response(UnavailableError("this router is draining", leg=Leg.ROUTER, reason="DRAINING"))
        if not placeable(front.mesh.table.rows(), front.mesh.digest):
            return error_response(
                UnavailableError("no pair of workers is ready", leg=Leg.ROUTER, reason="NO_WORKER", retry_after=1.0)
            )
        return json_response({"status": "ready"})

    @router.get("/workers")
    async def workers() -> Response:
        """The rank table as this router sees it."""
        roster = front.mesh.table.roster
        revision = roster.revision
        return json_response(
            {
                "revision": None if revision is None else msgspec.structs.asdict(revision),
                "synced": roster.synced,
                "in_contact": roster.in_contact,
                "workers": [_worker(row, front.mesh) for row in roster.rows()],
            }
        )

    @router.get("/version")
    async def show_version() -> Response:
        """The version of pdmesh."""
        return json_response({"version": version})

    @router.get("/metrics")
    async def metrics() -> Response:
        """Prometheus text; workers are asked at most every two seconds."""
        refresh = front.tasks.spawn(front.figures.refresh(), "figures")
        await asyncio.wait({refresh}, timeout=_METRICS_WAIT)
        return Response(front.metrics.render(), media_type=CONTENT_TYPE)

    @router.get("/explain/{request_id}")
    async def explain(request_id: str) -> Response:
        """The router's own moves for a request."""
        trace = front.traces.find(request_id)
        if trace is None:
            raise NotFoundError(f"this router knows no request {request_id}", field="request_id")
        return json_response(trace.as_json())

    return router


async def _drop(delta: Delta) -> None:
    """Nobody reads it."""


def _worker(row: RankRow, mesh: Mesh) -> dict[str, Any]:
    spec, load = row.instance, row.load
    return {
        "instance": spec.name,
        "role": spec.role.value,
        **{axis: getattr(row.coord, axis) for axis in ("dp", "cp", "tp")},
        "endpoint": row.endpoint,
        "incarnation": row.incarnation,
        "state": row.state.value,
        "host": row.host,
        "pid": row.pid,
        "engine_pid": row.engine_pid,
        "models": list(spec.served_model_names),
        "fingerprint": spec.fingerprint,
        "max_model_len": spec.max_model_len,
        "load": {"running": load.running, "queued": load.queued, "queued_tokens": load.queued_tokens},
        "kv": msgspec.structs.asdict(load.kv),
        "in_flight": mesh.in_flight[row.incarnation],
        "breaker": mesh.breakers.state(row.incarnation).value,
    }
