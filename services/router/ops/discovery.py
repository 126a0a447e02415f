"""/sd: every process of the mesh that serves /metrics, in the format of Prometheus's http_sd_config.

    scrape_configs:
      - job_name: pdmesh
        http_sd_configs: [{url: "http://ROUTER:8000/sd"}]

Workers are those of the watched rank table; routers and Bootstraps are asked from every Bootstrap. What is gone
leaves the list with its row, or with its watch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import grpc
from fastapi import APIRouter
from starlette.responses import Response

from engine_core.lifecycle.membership import MembershipState
from pdmesh.bootstrap.v1 import bootstrap_service_pb2, bootstrap_service_pb2_grpc
from services.router.edge.http import json_response
from services.router.front import Front
from services.runtime.channels import ChannelPool
from services.wire.bootstrap import RankRow, WatchedService, service_from_proto

_ASK_SECONDS = 1.0


def discovery_routes(front: Front) -> APIRouter:
    """The route /sd."""
    router = APIRouter(tags=["operations"])

    @router.get("/sd")
    async def scrape_targets() -> Response:
        """Scrape targets for Prometheus."""
        services = await ask_services(front.mesh.pool, front.config.bootstrap)
        return json_response(targets(front.mesh.table.rows(), services))

    return router


async def ask_services(pool: ChannelPool, bootstraps: Sequence[str]) -> list[WatchedService]:
    """The processes that watch the table, and the Bootstraps themselves; of those Bootstraps that answer in time."""

    async def ask(endpoint: str) -> list[WatchedService]:
        stub = bootstrap_service_pb2_grpc.BootstrapServiceStub(pool.get(endpoint))
        try:
            table = await stub.GetRankTable(bootstrap_service_pb2.GetRankTableRequest(), timeout=_ASK_SECONDS)
        except grpc.aio.AioRpcError:
            return []
        return [service_from_proto(service) for service in table.services]

    answers = await asyncio.gather(*(ask(endpoint) for endpoint in bootstraps))
    return list(dict.fromkeys(service for answer in answers for service in answer))


def targets(rows: Iterable[RankRow], services: Iterable[WatchedService]) -> list[dict[str, Any]]:
    """One group per process: [{"targets": ["host:port"], "labels": {"job": "pdmesh-decode", …}}]. Pure.

    A worker that is LOST stays, so that an alert can tell that it does not answer.
    """
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row.metrics_endpoint and row.is_leader and row.state is not MembershipState.LEFT:
            name, role = row.instance.name, row.instance.role.value.lower()
            _add(found, row.metrics_endpoint, "decode" if role == "mixed" else role, row.host, name)
    for service in services:
        if service.metrics_endpoint:
            _add(found, service.metrics_endpoint, service.name, service.host, "")
    return [found[address] for address in sorted(found)]


def _add(found: dict[str, dict[str, Any]], endpoint: str, service: str, host: str, name: str) -> None:
    scheme, _, address = endpoint.rpartition("://")
    labels = {"job": f"pdmesh-{service}", "__meta_pdmesh_host": host, "__meta_pdmesh_instance": name}
    if scheme == "https":
        labels["__scheme__"] = "https"
    found[address] = {"targets": [address], "labels": labels}
