"""Domain error <-> gRPC status <-> HTTP status <-> frame: one table.

A failed call carries google.rpc.Status with a packed pdmesh.common.v1.ErrorDetail, so that the caller
knows which leg failed, which incarnation, and whether another try makes sense. Handlers raise
PdmeshError; ErrorInterceptor turns it into the status. What is not a PdmeshError is a bug: it is logged
with its traceback, and the client learns only that it happened.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from inspect import isasyncgenfunction
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError
from google.rpc import status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from engine_core.host.frames import ErrorInfo
from engine_core.types.errors import (
    CancelledSessionError,
    ConfigError,
    ContextLengthError,
    DeadlineError,
    FencedError,
    InternalError,
    InvalidRequestError,
    Leg,
    NotFoundError,
    PdmeshError,
    PeerFailedError,
    QueueFullError,
    UnauthenticatedError,
    UnavailableError,
)
from pdmesh.common.v1 import error_detail_pb2
from services.runtime.tls import hint

log = logging.getLogger(__name__)

_UNREACHED = ("failed to connect to all addresses", "errors resolving", "DNS resolution failed")
"""How gRPC begins to say that a call has never left this process."""

_MAX_MESSAGE = 2_000
"""Characters of a message that travel: trailing metadata is limited to some kilobytes."""

STATUS: dict[type[PdmeshError], tuple[grpc.StatusCode, int]] = {
    InvalidRequestError: (grpc.StatusCode.INVALID_ARGUMENT, 400),
    ContextLengthError: (grpc.StatusCode.INVALID_ARGUMENT, 400),
    NotFoundError: (grpc.StatusCode.NOT_FOUND, 404),
    QueueFullError: (grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
    UnavailableError: (grpc.StatusCode.UNAVAILABLE, 503),
    PeerFailedError: (grpc.StatusCode.UNAVAILABLE, 503),
    UnauthenticatedError: (grpc.StatusCode.UNAUTHENTICATED, 503),
    FencedError: (grpc.StatusCode.FAILED_PRECONDITION, 409),
    DeadlineError: (grpc.StatusCode.DEADLINE_EXCEEDED, 504),
    CancelledSessionError: (grpc.StatusCode.CANCELLED, 499),
    ConfigError: (grpc.StatusCode.INTERNAL, 500),
    InternalError: (grpc.StatusCode.INTERNAL, 500),
}
"""The one table. A class that is not in it has its nearest ancestor's row."""

_BY_CODE: dict[grpc.StatusCode, type[PdmeshError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: QueueFullError,
    grpc.StatusCode.UNAVAILABLE: PeerFailedError,
    # Our own cancel surfaces as asyncio.CancelledError; this status means that the peer gave up the call.
    grpc.StatusCode.CANCELLED: PeerFailedError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
    grpc.StatusCode.FAILED_PRECONDITION: FencedError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
}
_BY_REASON: dict[str, type[PdmeshError]] = {kind.reason: kind for kind in STATUS}
_BY_NAME: dict[str, type[PdmeshError]] = {kind.__name__: kind for kind in STATUS}
_CODE_BY_NUMBER: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}

_LEG_TO_PROTO: dict[Leg, error_detail_pb2.Leg] = {
    Leg.UNKNOWN: error_detail_pb2.LEG_UNSPECIFIED,
    Leg.ROUTER: error_detail_pb2.LEG_ROUTER,
    Leg.PREFILL: error_detail_pb2.LEG_PREFILL,
    Leg.DECODE: error_detail_pb2.LEG_DECODE,
    Leg.TRANSFER: error_detail_pb2.LEG_TRANSFER,
    Leg.BOOTSTRAP: error_detail_pb2.LEG_BOOTSTRAP,
}
_LEG_BY_NAME: dict[str, Leg] = {leg.value: leg for leg in Leg}
_LEG_FROM_PROTO = {number: leg for leg, number in _LEG_TO_PROTO.items()}


def _row(kind: type[PdmeshError]) -> tuple[grpc.StatusCode, int]:
    for ancestor in kind.__mro__:
        if ancestor in STATUS:
            return STATUS[ancestor]
    return STATUS[InternalError]


def grpc_code(exc: PdmeshError) -> grpc.StatusCode:
    """The gRPC status code of an error."""
    return _row(type(exc))[0]


def http_status(exc: PdmeshError) -> int:
    """The HTTP status code of an error."""
    return _row(type(exc))[1]


def to_rich_status(exc: PdmeshError) -> status_pb2.Status:
    """google.rpc.Status with one packed ErrorDetail. The message is cut to 2,000 characters."""
    detail = error_detail_pb2.ErrorDetail(
        leg=_LEG_TO_PROTO[exc.leg],
        peer_incarnation=exc.peer_incarnation,
        retryable=exc.retryable,
        reason=exc.reason,
        field=exc.field[:200],
        retry_after_seconds=exc.retry_after,
    )
    status = status_pb2.Status(code=grpc_code(exc).value[0], message=exc.message[:_MAX_MESSAGE])
    status.details.add().Pack(detail)
    return status


async def abort_with(context: grpc.aio.ServicerContext[Any, Any], exc: PdmeshError) -> NoReturn:
    """Ends the call with the error's status and details; never returns."""
    await context.abort_with_status(rpc_status.to_status(to_rich_status(exc)))  # type: ignore[attr-defined]
    raise AssertionError("abort returned")


def from_rich_status(status: status_pb2.Status) -> PdmeshError | None:
    """The error inside a status, or None when it holds no ErrorDetail."""
    detail = error_detail_pb2.ErrorDetail()
    for packed in status.details:
        if not packed.Is(error_detail_pb2.ErrorDetail.DESCRIPTOR):
            continue
        try:
            packed.Unpack(detail)
        except DecodeError:
            return None
        code = _CODE_BY_NUMBER.get(status.code, grpc.StatusCode.UNKNOWN)
        kind = _BY_REASON.get(detail.reason)
        if kind is None or _row(kind)[0] is not code:
            kind = _kind_of_code(code)
        return kind(
            status.message,
            leg=_LEG_FROM_PROTO.get(detail.leg, Leg.UNKNOWN),
            reason=detail.reason or None,
            field=detail.field,
            peer_incarnation=detail.peer_incarnation,
            retry_after=detail.retry_after_seconds,
            retryable=detail.retryable,
        )
    return None


def _kind_of_code(code: grpc.StatusCode) -> type[PdmeshError]:
    if code is grpc.StatusCode.CANCELLED:
        return CancelledSessionError  # said by the peer in our own words, so it means the caller
    if code is grpc.StatusCode.UNAVAILABLE:
        return UnavailableError
    return _BY_CODE.get(code, InternalError)


def from_rpc_error(exc: grpc.aio.AioRpcError, leg: Leg) -> PdmeshError:
    """The error behind a failed call to the process that serves `leg`.

    With rich details their leg counts (unless it is unknown); without, the code alone decides: a lost
    connection is PeerFailedError of `leg`, retryable; with reason CONNECT_FAILED when there never was one.
    """
    message = exc.details() or exc.code().name
    try:
        status = rpc_status.from_call(exc)  # type: ignore[arg-type]
    except ValueError:
        status = None  # code or message of the details contradict the call's: something in between rewrote it
    if status is not None:
        error = from_rich_status(status)
        if error is not None:
            if error.leg is Leg.UNKNOWN:
                error.leg = leg
            return error
    if exc.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in message:
        return InternalError(message, leg=leg, reason="MESSAGE_TOO_LARGE")
    kind = _BY_CODE.get(exc.code(), InternalError)
    lost = exc.code() is grpc.StatusCode.UNAVAILABLE
    advice = hint(message) if lost else ""
    reason = "CONNECT_FAILED" if lost and message.startswith(_UNREACHED) else None
    return kind(f"{leg.value}: {message}{f' ({advice})' if advice else ''}", leg=leg, reason=reason)


def to_error_info(exc: PdmeshError) -> ErrorInfo:
    """The error as a frame's data."""
    kind = next((k.__name__ for k in type(exc).__mro__ if k in STATUS), "InternalError")
    return ErrorInfo(
        kind=kind,
        message=exc.message,
        reason=exc.reason,
        leg=exc.leg.value,
        field=exc.field,
        peer_incarnation=exc.peer_incarnation,
        retryable=exc.retryable,
        retry_after=exc.retry_after,
    )


def from_error_info(info: ErrorInfo) -> PdmeshError:
    """The error that a frame carries; an unknown kind is InternalError, an unknown leg Leg.UNKNOWN."""
    kind = _BY_NAME.get(info.kind, InternalError)
    return kind(
        info.message,
        leg=_LEG_BY_NAME.get(info.leg, Leg.UNKNOWN),
        reason=info.reason,
        field=info.field,
        peer_incarnation=info.peer_incarnation,
        retry_after=info.retry_after,
        retryable=info.retryable,
    )


_Behaviour = Callable[[Any, Any], Any]
_Handler = Callable[[Any, Any], Awaitable[Any]]
_Read = Callable[[bytes], Any] | None


def _stream_reader(deserialize: _Read) -> _Read:
    """Reads messages of a stream: what is no message is the caller's fault, raised where the handler reads."""
    if deserialize is None:
        return None

    def read(raw: bytes) -> Any:
        try:
            return deserialize(raw)
        except DecodeError as exc:
            raise InvalidRequestError(f"not a message: {exc}") from None

    return read


def _reader(deserialize: _Read) -> _Read:
    """The same for a call with one request. gRPC reads it outside the handler, where an error would end the call
    as a bug of ours, so the error is handed in instead and raised by _readable."""
    read = _stream_reader(deserialize)
    if read is None:
        return None

    def read_or_error(raw: bytes) -> Any:
        try:
            return read(raw)
        except InvalidRequestError as exc:
            return exc

    return read_or_error


def _readable(request: Any) -> Any:
    if isinstance(request, InvalidRequestError):
        raise request
    return request


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs alone
    """Turns what handlers raise into statuses. `leg` is filled in where an error names none.

    Streaming handlers may be async generators; they are closed before the call ends, whichever way it
    ends, so that their `finally` runs at once and not when the garbage collector comes.
    """

    def __init__(self, leg: Leg = Leg.UNKNOWN, heard: Callable[[str], None] | None = None) -> None:
        """`heard` is told the peer of each call."""
        self._leg, self._heard = leg, heard

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wraps the handler, of any of the four kinds."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None  # an unknown method
        method = handler_call_details.method
        one = (_reader(handler.request_deserializer), handler.response_serializer)
        many = (_stream_reader(handler.request_deserializer), handler.response_serializer)
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(self._unary(handler.unary_unary, method), *one)
        if handler.stream_unary:
            return grpc.stream_unary_rpc_method_handler(self._unary(handler.stream_unary, method), *many)
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(self._stream(handler.unary_stream, method), *one)
        return grpc.stream_stream_rpc_method_handler(self._stream(handler.stream_stream, method), *many)

    def _unary(self, behaviour: _Behaviour, method: str) -> _Handler:
        async def call(request: Any, context: Any) -> Any:
            self._hear(context)
            try:
                return await behaviour(_readable(request), context)
            except Exception as exc:  # noqa: BLE001  # the border of the process: all errors become statuses
                await self._fail(context, method, exc)

        return call

    def _stream(self, behaviour: _Behaviour, method: str) -> _Handler:
        generates = isasyncgenfunction(behaviour)

        async def call(request: Any, context: Any) -> None:
            self._hear(context)
            try:
                if not generates:
                    await behaviour(_readable(request), context)
                    return
                async with aclosing(behaviour(_readable(request), context)) as responses:
                    async for response in responses:
                        await context.write(response)
            except Exception as exc:  # noqa: BLE001  # the border of the process: all errors become statuses
                await self._fail(context, method, exc)

        return call

    def _hear(self, context: Any) -> None:
        if self._heard is not None:
            self._heard(context.peer())

    async def _fail(self, context: Any, method: str, exc: Exception) -> NoReturn:
        # CancelledError is no Exception and passes by itself.
        if isinstance(exc, grpc.aio.AbortError | grpc.aio.UsageError) or context.done():
            raise exc
        if isinstance(exc, grpc.aio.AioRpcError):
            exc = from_rpc_error(exc, self._leg)
        elif isinstance(exc, TimeoutError | asyncio.QueueFull):
            log.warning("%s let a %s escape", method, type(exc).__name__, exc_info=exc)
        if not isinstance(exc, PdmeshError):
            log.error("%s failed", method, exc_info=exc)
            exc = InternalError("internal error; the server's log has the details", leg=self._leg)
        if exc.leg is Leg.UNKNOWN:
            exc.leg = self._leg
        await abort_with(context, exc)
