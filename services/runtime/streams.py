"""Streams that a client writes to: how they really ended.

A write onto a stream that the peer has just ended fails, and grpc.aio then sets the call's status to INTERNAL
"Internal error from Core" (grpc issue 36066). Depending on what the event loop handles first, the peer's own status
is overwritten by it, or comes later and takes its place. Duplex keeps what the peer said, whichever is first:

    status, then the failed write   the status was noted when the call was done
    failed write, then the status   the status is awaited, for STATUS_WITHIN seconds
    a failed write and no status    the connection is at fault: UNAVAILABLE, which callers may retry

    call = Duplex(stub.Prefill(timeout=...))
    await call.write(request)                     # False: over already, reading says how
    await call.done_writing()
    async for message in call: ...                # raises AioRpcError with the peer's status
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Any, Generic, TypeVar

import grpc

STATUS_WITHIN = 2.0
"""Seconds that a status may come after a failed write: the peer has sent it already, or its connection is lost."""

_CORE = "Internal error from Core"
_POLL = 0.005

Sent = TypeVar("Sent")
Received = TypeVar("Received")


class Duplex(Generic[Sent, Received]):
    """A bidirectional call. One task reads, one at a time writes; all methods are of one event loop."""

    def __init__(self, call: grpc.aio.StreamStreamCall[Sent, Received], status_within: float = STATUS_WITHIN) -> None:
        """Takes a call that was just made; nothing else may use it."""
        self._call, self._within = call, status_within
        self._noted: grpc.aio.AioRpcError | None = None
        """The status with which the call became done, OK too."""
        self._error: grpc.aio.AioRpcError | None = None
        self._messages: AsyncIterator[Received] = aiter(call)
        call.add_done_callback(self._note)

    async def write(self, message: Sent) -> bool:
        """Writes one message. False when the stream is over: that is no error here, reading says what it is."""
        return await self._writing(self._call.write(message))

    async def done_writing(self) -> bool:
        """Says that no more will be written. False when the stream is over."""
        return await self._writing(self._call.done_writing())

    async def read(self) -> Received | None:
        """The next message; None at the end of a stream that ended well. Raises AioRpcError with the peer's status,
        and asyncio.CancelledError after cancel()."""
        if self._error is not None:
            raise self._error
        try:
            return await anext(self._messages, None)
        except grpc.aio.AioRpcError as exc:
            error = await self._what_the_peer_said(exc)
        if error.code() is grpc.StatusCode.OK:
            return None
        self._error = error
        raise error

    async def __aiter__(self) -> AsyncIterator[Received]:
        """All messages to the end; raises as read() does."""
        while (message := await self.read()) is not None:
            yield message

    def cancel(self) -> None:
        """Ends the call from this side; a no-op when it has ended."""
        if not self._call.done():
            self._call.cancel()

    async def _writing(self, write: Awaitable[None]) -> bool:
        try:
            await write
        except (grpc.aio.AioRpcError, grpc.aio.InternalError, asyncio.InvalidStateError):
            return False
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return False  # not this task was cancelled but the call, by whoever reads
        return True

    def _note(self, _: Any) -> None:
        # At once, since a write that fails a moment later replaces it. All parts are there: nothing is awaited.
        snapshot = _ended_with(self._call)
        try:
            snapshot.send(None)
        except StopIteration as end:
            self._noted = end.value
        finally:
            snapshot.close()

    async def _what_the_peer_said(self, error: grpc.aio.AioRpcError) -> grpc.aio.AioRpcError:
        """The status behind an error, which may be that of a write."""
        if not _of_a_write(error):
            return error
        if self._noted is not None and not _of_a_write(self._noted):
            return self._noted
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._within
        while _of_a_write(error := await _ended_with(self._call)):
            if loop.time() > deadline:
                return grpc.aio.AioRpcError(
                    grpc.StatusCode.UNAVAILABLE,
                    grpc.aio.Metadata(),
                    grpc.aio.Metadata(),
                    details="the connection broke while a message was written",
                    debug_error_string=error.debug_error_string(),
                )
            await asyncio.sleep(_POLL)  # grpc tells nobody when it replaces a status
        return error


def _of_a_write(error: grpc.aio.AioRpcError) -> bool:
    """True for the status that grpc.aio makes of a failed write."""
    return error.code() is grpc.StatusCode.INTERNAL and error.details() == _CORE


async def _ended_with(call: Any) -> grpc.aio.AioRpcError:
    """The status of a call that is done, as it stands now."""
    return grpc.aio.AioRpcError(
        await call.code(),
        await call.initial_metadata(),
        await call.trailing_metadata(),
        details=await call.details(),
        debug_error_string=await call.debug_error_string(),
    )
