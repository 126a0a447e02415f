"""Errors survive every border: gRPC with details, frames, HTTP."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engine_core.types import errors as tree
from engine_core.types.errors import (
    ContextLengthError,
    FencedError,
    InternalError,
    InvalidRequestError,
    Leg,
    PdmeshError,
    PeerFailedError,
    QueueFullError,
)
from services.runtime.channels import ChannelPool
from services.runtime.errors import (
    STATUS,
    from_error_info,
    from_rich_status,
    from_rpc_error,
    grpc_code,
    http_status,
    to_error_info,
    to_rich_status,
)
from services.runtime.server import GrpcServer
from services.runtime.streams import Duplex

KINDS = [kind for kind in vars(tree).values() if isinstance(kind, type) and issubclass(kind, PdmeshError)]


def full(kind: type[PdmeshError]) -> PdmeshError:
    return kind(
        "broken", leg=Leg.TRANSFER, field="prompt", peer_incarnation=(1 << 63) - 1, retry_after=1.5, retryable=True
    )


def same(a: PdmeshError, b: PdmeshError) -> None:
    assert type(a) is type(b)
    for name in ("message", "leg", "reason", "field", "peer_incarnation", "retry_after", "retryable"):
        assert getattr(a, name) == getattr(b, name), name


@pytest.mark.parametrize("kind", [k for k in KINDS if k is not PdmeshError])
def test_every_class_has_a_row_and_comes_back_whole(kind: type[PdmeshError]) -> None:
    assert kind in STATUS
    error = full(kind)
    back = from_rich_status(to_rich_status(error))
    assert back is not None
    same(error, back)
    same(error, from_error_info(to_error_info(error)))


def test_a_class_outside_the_tree_takes_its_ancestors_row() -> None:
    class Odd(QueueFullError):
        reason = "ODD"

    assert http_status(Odd("x")) == 429
    assert grpc_code(Odd("x")) is grpc.StatusCode.RESOURCE_EXHAUSTED
    back = from_error_info(to_error_info(Odd("x")))
    assert (type(back), back.reason) == (QueueFullError, "ODD")
    assert http_status(PdmeshError("bare")) == 500


def test_an_error_without_retryable_keeps_its_class_default() -> None:
    back = from_rich_status(to_rich_status(InvalidRequestError("x", field="n")))
    assert back is not None
    assert (back.retryable, back.field) == (False, "n")


Call = Callable[[Any, Any], Any]


@asynccontextmanager
async def serving(tmp_path: Any, check: Call, watch: Call) -> AsyncIterator[health_pb2_grpc.HealthStub]:
    """A server whose health service, under another name, does what the test says; all handler kinds can be had."""

    def add(server: grpc.aio.Server) -> None:
        codec = (health_pb2.HealthCheckRequest.FromString, health_pb2.HealthCheckResponse.SerializeToString)
        handlers = {
            "UnaryUnary": grpc.unary_unary_rpc_method_handler(check, *codec),
            "StreamUnary": grpc.stream_unary_rpc_method_handler(check, *codec),
            "UnaryStream": grpc.unary_stream_rpc_method_handler(watch, *codec),
            "StreamStream": grpc.stream_stream_rpc_method_handler(watch, *codec),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", handlers),))

    server = await GrpcServer.start(f"unix:{tmp_path}/s", add, ["t.T"], leg=Leg.DECODE)
    pool = ChannelPool()
    try:
        yield pool.get(server.endpoint)
    finally:
        await pool.close()
        await server.stop(0)


async def call(channel: Any, kind: str, raw: bytes | None = None) -> None:
    codec = {"response_deserializer": health_pb2.HealthCheckResponse.FromString}
    request = health_pb2.HealthCheckRequest(service="x").SerializeToString() if raw is None else raw
    if kind == "UnaryUnary":
        await channel.unary_unary("/t.T/UnaryUnary", **codec)(request, timeout=5)
    elif kind == "StreamUnary":
        await channel.stream_unary("/t.T/StreamUnary", **codec)(iter([request]), timeout=5)
    elif kind == "UnaryStream":
        async for _ in channel.unary_stream("/t.T/UnaryStream", **codec)(request, timeout=5):
            pass
    else:
        # An iterator's failed write would hide the status: grpc.aio puts its own over the server's.
        duplex: Duplex[Any, Any] = Duplex(channel.stream_stream("/t.T/StreamStream", **codec)(timeout=5))
        if await duplex.write(request):
            await duplex.done_writing()
        async for _ in duplex:
            pass


@pytest.mark.parametrize("kind", ["UnaryUnary", "StreamUnary", "UnaryStream", "StreamStream"])
async def test_interceptor_maps_all_kinds_of_handler(tmp_path: Any, kind: str) -> None:
    error: Exception = FencedError("another life", peer_incarnation=77)

    async def check(request: Any, context: Any) -> Any:
        raise error

    async def watch(request: Any, context: Any) -> AsyncIterator[Any]:
        yield health_pb2.HealthCheckResponse()
        raise error

    async with serving(tmp_path, check, watch) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, kind)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        same(FencedError("another life", peer_incarnation=77, leg=Leg.DECODE), from_rpc_error(caught.value, Leg.ROUTER))


@pytest.mark.parametrize("kind", ["UnaryUnary", "StreamUnary", "UnaryStream", "StreamStream"])
async def test_bytes_that_are_no_message_are_the_callers_fault(
    tmp_path: Any, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def check(request: Any, context: Any) -> Any:
        if not isinstance(request, health_pb2.HealthCheckRequest):
            request = [message async for message in request]
        return health_pb2.HealthCheckResponse()

    async def watch(request: Any, context: Any) -> AsyncIterator[Any]:
        if not isinstance(request, health_pb2.HealthCheckRequest):
            request = [message async for message in request]
        yield health_pb2.HealthCheckResponse()

    async with serving(tmp_path, check, watch) as channel:
        await call(channel, kind)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, kind, raw=b"\xff\xff no message")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    back = from_rpc_error(caught.value, Leg.ROUTER)
    assert (type(back), back.leg) == (InvalidRequestError, Leg.DECODE)
    assert not caplog.records


@pytest.mark.parametrize("kind", ["UnaryUnary", "StreamStream"])
async def test_a_bug_is_logged_and_not_told(tmp_path: Any, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    async def check(request: Any, context: Any) -> Any:
        raise KeyError("secret")

    async def watch(request: Any, context: Any) -> Any:
        raise KeyError("secret")

    async with serving(tmp_path, check, watch) as channel:
        with caplog.at_level(logging.ERROR), pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, kind)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in (caught.value.details() or "")
    back = from_rpc_error(caught.value, Leg.ROUTER)
    assert (type(back), back.leg, back.retryable) == (InternalError, Leg.DECODE, False)
    logged = [record for record in caplog.records if record.exc_info]
    assert len(logged) == 1
    assert "KeyError" in logging.Formatter().formatException(logged[0].exc_info)  # type: ignore[arg-type]


async def test_cancelling_the_client_closes_the_generator(tmp_path: Any) -> None:
    ended = asyncio.Event()

    async def check(request: Any, context: Any) -> Any:
        return health_pb2.HealthCheckResponse()

    async def watch(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            yield health_pb2.HealthCheckResponse()
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with serving(tmp_path, check, watch) as channel:
        stream = channel.unary_stream(
            "/t.T/UnaryStream", response_deserializer=health_pb2.HealthCheckResponse.FromString
        )
        running = stream(b"", timeout=20)
        await running.read()
        assert not ended.is_set()
        running.cancel()
        await asyncio.wait_for(ended.wait(), 5)


async def test_a_lost_peer_is_blamed_by_its_leg(tmp_path: Any) -> None:
    pool = ChannelPool(connect_timeout=0.5)
    try:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(pool.get(f"unix:{tmp_path}/nobody"), "UnaryUnary")
    finally:
        await pool.close()
    back = from_rpc_error(caught.value, Leg.PREFILL)
    assert (type(back), back.leg, back.retryable) == (PeerFailedError, Leg.PREFILL, True)


async def test_unknown_methods_and_long_messages(tmp_path: Any) -> None:
    async def check(request: Any, context: Any) -> Any:
        raise ContextLengthError("long " * 10_000, field="f" * 10_000)

    async with serving(tmp_path, check, check) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/t.T/Nothing")(b"", timeout=5)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert type(from_rpc_error(caught.value, Leg.DECODE)) is InternalError
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, "UnaryUnary")
        back = from_rpc_error(caught.value, Leg.ROUTER)
        assert (type(back), len(back.message), len(back.field)) == (ContextLengthError, 2_000, 200)
