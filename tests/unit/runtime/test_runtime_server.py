"""Servers: health, reflection, ports; channels: reuse and eviction."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from engine_core.types.errors import ConfigError
from pdmesh.bootstrap.v1 import bootstrap_service_pb2_grpc
from services.runtime.channels import ChannelPool
from services.runtime.server import GrpcServer

NAME = "pdmesh.bootstrap.v1.BootstrapService"


def add(server: grpc.aio.Server) -> None:
    bootstrap_service_pb2_grpc.add_BootstrapServiceServicer_to_server(
        bootstrap_service_pb2_grpc.BootstrapServiceServicer(), server
    )


async def test_health_and_reflection_on_tcp() -> None:
    server = await GrpcServer.start("127.0.0.1:0", add, [NAME])
    pool = ChannelPool()
    try:
        assert server.endpoint == f"127.0.0.1:{server.port}"
        stub = health_pb2_grpc.HealthStub(pool.get(server.endpoint))
        for serving, status in ((False, "NOT_SERVING"), (True, "SERVING"), (False, "NOT_SERVING")):
            await server.set_serving(serving)
            for name in ("", NAME):
                answer = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
                assert health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status) == status
        reflect = reflection_pb2_grpc.ServerReflectionStub(pool.get(server.endpoint))
        ask = reflection_pb2.ServerReflectionRequest
        asked = iter([ask(list_services=""), ask(file_containing_symbol=NAME)])
        answers = [answer async for answer in reflect.ServerReflectionInfo(asked, timeout=5)]
        listed = {service.name for service in answers[0].list_services_response.service}
        assert {NAME, "grpc.health.v1.Health"} <= listed
        assert answers[1].file_descriptor_response.file_descriptor_proto
    finally:
        await pool.close()
        await server.stop(0)


async def test_a_port_is_never_shared() -> None:
    server = await GrpcServer.start("127.0.0.1:0", add, [NAME])
    try:
        with pytest.raises(ConfigError, match="cannot listen on .*: the port is taken"):
            await GrpcServer.start(server.endpoint, add, [NAME])
    finally:
        await server.stop(0)


async def test_unix_sockets(tmp_path: Any) -> None:
    address = f"unix:{tmp_path}/s"
    server = await GrpcServer.start(address, add, [NAME])
    await server.set_serving(True)
    pool = ChannelPool()
    try:
        assert (server.endpoint, server.port) == (address, 0)
        stub = health_pb2_grpc.HealthStub(pool.get(address))
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    finally:
        await pool.close()
        await server.stop(0)


async def test_channels_are_shared_and_idle_ones_evicted() -> None:
    now = 0.0
    pool = ChannelPool(idle_seconds=10.0, clock=lambda: now)
    try:
        first = pool.get("127.0.0.1:1")
        assert pool.get("127.0.0.1:1") is first
        with pool.use("127.0.0.1:2"):
            now = 11.0
            pool.get("127.0.0.1:3")
            assert pool.endpoints == {"127.0.0.1:2", "127.0.0.1:3"}
            assert pool.get("127.0.0.1:1") is not first
        now = 21.5
        pool.get("127.0.0.1:4")
        assert pool.endpoints == {"127.0.0.1:4"}
        await asyncio.sleep(0)
    finally:
        await pool.close()
    assert pool.endpoints == frozenset()
