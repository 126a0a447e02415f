"""Streams that the peer ends while they are written to: the peer's status counts, whatever grpc.aio makes of it."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from engine_core.types.errors import Leg, PdmeshError, UnavailableError
from pdmesh.prefill.v1 import prefill_service_pb2, prefill_service_pb2_grpc
from services.runtime.errors import from_rpc_error
from services.runtime.streams import Duplex
from tests.support.early_end import TIMEOUT, EarlyEnd, early_end

MESSAGE = prefill_service_pb2.PrefillRequest()
PAUSES = [0.05 * 2**n for n in range(6)]
"""Seconds for a status to arrive; a machine that is too slow for the first gets the next."""


async def open_stream(service: EarlyEnd, channel: grpc.aio.Channel) -> tuple[Duplex[Any, Any], Any]:
    """A stream on which one message was written; and grpc's own call."""
    raw = prefill_service_pb2_grpc.PrefillServiceStub(channel).Prefill(timeout=TIMEOUT)
    call: Duplex[Any, Any] = Duplex(raw)
    assert await call.write(MESSAGE)
    return call, raw


@pytest.mark.parametrize("read_first", [True, False], ids=["status-first", "write-first"])
async def test_the_peers_status_counts(*, read_first: bool) -> None:
    """With STARTED taken, the status is handled before the failed write, and else behind it."""
    refusal = UnavailableError("full of others", leg=Leg.TRANSFER, reason="LINK_DOWN", retry_after=3.0)
    with early_end(refusal) as service:
        async with grpc.aio.insecure_channel(service.endpoint) as channel:
            for pause in PAUSES:
                call, raw = await open_stream(service, channel)
                started = [await call.read()] if read_first else []
                service.end(pause)
                written = await call.write(MESSAGE)
                replaced = raw.done() and await raw.details() == "Internal error from Core"
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    started += [message async for message in call]
                error = from_rpc_error(caught.value, Leg.PREFILL)
                assert type(error) is UnavailableError and error.retryable
                assert (error.leg, error.reason, error.retry_after) == (Leg.TRANSFER, "LINK_DOWN", 3.0)
                with pytest.raises(grpc.aio.AioRpcError, match="full of others"):
                    await call.read()
                assert len(started) <= 1
                if not written:
                    assert replaced
                    return
    raise AssertionError("no write was too late")


async def test_an_end_without_error_is_one() -> None:
    with early_end(None) as service:
        async with grpc.aio.insecure_channel(service.endpoint) as channel:
            for pause in PAUSES:
                call, _ = await open_stream(service, channel)
                assert (await call.read()).HasField("started")
                service.end(pause)
                written = await call.write(MESSAGE)
                assert [message async for message in call] == []
                if not written:
                    assert not await call.write(MESSAGE)
                    return
    raise AssertionError("no write was too late")


class NeverEnding:
    """A call of grpc's whose write failed and whose status never comes."""

    def add_done_callback(self, callback: Any) -> None:
        callback(self)

    async def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.INTERNAL

    async def details(self) -> str:
        return "Internal error from Core"

    async def debug_error_string(self) -> str:
        return "send failed"

    async def initial_metadata(self) -> grpc.aio.Metadata:
        return grpc.aio.Metadata()

    trailing_metadata = initial_metadata

    async def __aiter__(self) -> Any:
        for _ in ():
            yield
        raise grpc.aio.AioRpcError(
            grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), grpc.aio.Metadata(), details=await self.details()
        )


async def test_without_a_status_the_connection_is_at_fault() -> None:
    call: Duplex[Any, Any] = Duplex(NeverEnding(), status_within=0.05)  # type: ignore[arg-type]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    error = from_rpc_error(caught.value, Leg.PREFILL)
    assert isinstance(error, PdmeshError) and error.retryable and error.leg is Leg.PREFILL
    assert "connection broke" in error.message


async def stuck_write(call: Duplex[Any, Any]) -> asyncio.Task[bool]:
    """A write that waits: the peer does not read, and what may be under way is full."""
    big = prefill_service_pb2.PrefillRequest(open={"request": {"cache_salt": "x" * 3_000_000}})
    for _ in range(50):
        writing = asyncio.ensure_future(call.write(big))
        if not (await asyncio.wait({writing}, timeout=0.1))[0]:
            return writing
    raise AssertionError("150 MB are under way")


async def test_cancelling_the_call_is_not_cancelling_the_writer() -> None:
    with early_end(None) as service:
        async with grpc.aio.insecure_channel(service.endpoint) as channel:
            call, _ = await open_stream(service, channel)
            assert (await call.read()).HasField("started")
            writing = await stuck_write(call)
            call.cancel()
            assert await writing is False
            with pytest.raises(asyncio.CancelledError):
                await call.read()


async def test_cancelling_the_writer_is() -> None:
    with early_end(None) as service:
        async with grpc.aio.insecure_channel(service.endpoint) as channel:
            call, _ = await open_stream(service, channel)
            writing = await stuck_write(call)
            writing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await writing
