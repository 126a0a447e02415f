"""HTTP under the routes: bodies with a limit, request ids, OpenAI error bodies, disconnects, event streams."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine_core.types.errors import (
    CancelledSessionError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    Leg,
    NotFoundError,
    PdmeshError,
    QueueFullError,
    UnavailableError,
)
from services.router.edge.json_body import short
from services.router.routing.poison import PoisonError
from services.runtime.api_keys import name_of, shown_keys
from services.runtime.errors import http_status
from services.runtime.http_connection import ABORT
from services.runtime.tasks import TaskOwner
from services.runtime.telemetry import bind_log_fields

log = logging.getLogger(__name__)
T = TypeVar("T")

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[!-~]{0,64})?")
_DISCARD_AT_MOST = 64 * 1024 * 1024
"""Bytes of an oversized body that are read and dropped, so that the client gets to read the answer."""
BODY_STALL_SECONDS = 30.0
"""Without a byte of the body for so long, the request is given up."""
BODY_SECONDS = 120.0
"""So is a body that takes longer in all; `pdmesh.body_seconds` in the scope goes before."""
LAST_WORD_SECONDS = 1.0
"""That a client of a router which ends has to take its error."""
SHUTS_DOWN = "this router is shutting down"
DONE = b"data: [DONE]\n\n"


class BodyTooLargeError(InvalidRequestError):
    """The body is above max_body_bytes."""

    reason = "BODY_TOO_LARGE"


class ApiKeyError(InvalidRequestError):
    """The request shows no API key, or a wrong one."""

    reason = "INVALID_API_KEY"


class BodyStalledError(DeadlineError):
    """The body did not come in time."""

    reason = "BODY_STALLED"


class RequestTimeoutError(DeadlineError):
    """The time that the client allows for its request is over."""

    reason = "REQUEST_TIMEOUT"


class NotJsonError(InvalidRequestError):
    """The body is declared to be something else than JSON: a browser's form, for example."""

    reason = "UNSUPPORTED_MEDIA_TYPE"


def json_response(data: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON response; orjson writes it."""
    return Response(orjson.dumps(data), status, dict(headers or {}), media_type="application/json")


_OF_HTTP: Mapping[type[PdmeshError], int] = {
    ApiKeyError: 401,
    BodyStalledError: 408,
    BodyTooLargeError: 413,
    NotJsonError: 415,
    RequestTimeoutError: 408,
}
"""Errors that only HTTP knows; of all others services/runtime/errors.py knows the status."""


_ANTHROPIC = "/v1/messages"
OVERLOADED = 529
"""Anthropic's status where others have 503."""
_ANTHROPIC_KINDS: Mapping[int, str] = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}


def is_anthropic(path: str) -> bool:
    """True for paths of Anthropic's API, which has errors of its own form."""
    return path == _ANTHROPIC or path.startswith(f"{_ANTHROPIC}/")


def error_status(exc: PdmeshError, path: str = "") -> int:
    """HTTP status of an error on a path: Anthropic's API has 529 where others have 503."""
    status = _OF_HTTP.get(type(exc)) or http_status(exc)
    return OVERLOADED if status == 503 and is_anthropic(path) else status


def error_body(exc: PdmeshError) -> dict[str, Any]:
    """OpenAI's shape: {"error": {message, type, param, code}}."""
    kind = "server_error"
    if isinstance(exc, InvalidRequestError | NotFoundError | BodyStalledError | RequestTimeoutError):
        kind = "invalid_request_error"
    elif isinstance(exc, QueueFullError):
        kind = "rate_limit_error"
    code = exc.reason.lower()
    return {"error": {"message": exc.message, "type": kind, "param": exc.field or None, "code": code}}


def anthropic_error(message: str, status: int, request_id: str | None) -> dict[str, Any]:
    """Anthropic's shape: {"type": "error", "error": {type, message}, "request_id"}."""
    kind = _ANTHROPIC_KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def error_event(exc: PdmeshError) -> bytes:
    """The last event of a stream of chunks that has failed."""
    return b"data: " + orjson.dumps(error_body(exc)) + b"\n\n"


def error_response(exc: PdmeshError, scope: Scope | None = None) -> Response:
    """The whole response to the request of `scope`, in the form of its API; 429, 503 and 529 say when to come back."""
    path = "" if scope is None else scope["path"]
    status = error_status(exc, path)
    headers = {}
    if status in (429, 503, OVERLOADED):
        headers["retry-after"] = str(max(1, math.ceil(exc.retry_after)))
    if isinstance(exc, BodyStalledError | BodyTooLargeError):
        headers["connection"] = "close"
    if status == 401:
        headers["www-authenticate"] = 'Bearer realm="pdmesh"'
    if isinstance(exc, PoisonError):
        headers["x-should-retry"] = "false"  # OpenAI's clients try a 500 again unless told not to
    if scope is not None and is_anthropic(path):
        return json_response(anthropic_error(exc.message, status, scope.get("pdmesh.request_id")), status, headers)
    return json_response(error_body(exc), status, headers)


def as_pdmesh_error(exc: BaseException) -> PdmeshError:
    """What the client is told of any failure; a bug is logged and told as one."""
    if isinstance(exc, PdmeshError):
        return exc
    log.error("a request failed", exc_info=exc)
    return InternalError("internal error; the router's log has the details")


async def read_body(request: Request, limit: int, stall: float = BODY_STALL_SECONDS) -> bytes:
    """Reads the body. Raises NotJsonError when it is declared as anything but JSON (a missing declaration passes) or
    as compressed, BodyTooLargeError beyond `limit` bytes, CancelledSessionError on disconnect, BodyStalledError
    when nothing more comes for `stall` seconds, or not all of it within BODY_SECONDS."""
    chunks: list[bytes] = []
    size = 0
    _check_announced(request, limit)
    loop = asyncio.get_running_loop()
    within = float(request.scope.get("pdmesh.body_seconds", BODY_SECONDS))
    deadline = loop.time() + within
    while True:
        try:
            async with asyncio.timeout_at(min(loop.time() + stall, deadline)):
                message = await request.receive()
        except TimeoutError:
            late = loop.time() >= deadline
            what = f"the body did not come within {within:g} s" if late else f"the body stalled for {stall:g} s"
            raise BodyStalledError(what, leg=Leg.ROUTER) from None
        if message["type"] == "http.disconnect":
            raise CancelledSessionError("the client went away")
        chunk = message.get("body", b"")
        size += len(chunk)
        if size <= limit:
            chunks.append(chunk)
        more = message.get("more_body", False)
        if size > limit and (not more or size > _DISCARD_AT_MOST):
            raise BodyTooLargeError(f"the body is above {limit} bytes")
        if not more:
            break
    declared = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if declared and declared != "application/json" and not declared.endswith("+json"):
        raise NotJsonError(f"content-type: {short(declared)} is not application/json", field="content-type")
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise NotJsonError(
            f"content-encoding: {short(coding)} is not read here; send it as it is", field="content-encoding"
        )
    return b"".join(chunks)


def _check_announced(request: Request, limit: int) -> None:
    """Refuses at once what the client has not begun to send, and what would not be read to its end anyway."""
    announced = request.headers.get("content-length", "")
    most = limit if request.headers.get("expect", "").lower() == "100-continue" else _DISCARD_AT_MOST
    if announced.isdecimal() and int(announced) > max(limit, most):
        raise BodyTooLargeError(f"the body is above {limit} bytes")


def request_id_of(scope: Scope) -> str:
    """The id of this request: the client's x-request-id, or a new one."""
    return str(scope["pdmesh.request_id"])


def client_of(request: Request, user: str | None) -> str:
    """Whom a request is from, for fair queueing: the API key, as a name that does not tell it, and the user that the
    body names."""
    shown = shown_keys(request.scope["headers"])
    owner = request.scope.get("pdmesh.client") or (name_of(shown[0]) if shown else "")
    return f"{owner}/{(user or '')[:256]}"


def traceparent_of(request: Request) -> str:
    """The client's trace context; empty without one, or with what is none (gRPC would refuse it as metadata)."""
    given = request.headers.get("traceparent", "")
    return given if _TRACEPARENT.fullmatch(given) else ""


def wants_timings(request: Request) -> bool:
    """True when the client asks where the time goes: `x-pdmesh-timings: 1`."""
    return request.headers.get("x-pdmesh-timings", "").strip().lower() in ("1", "true", "yes")


class RequestIds:
    """ASGI middleware: takes over or mints x-request-id, and echoes it on every response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes everything on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((v for k, v in scope["headers"] if k == b"x-request-id"), b"").decode("latin-1")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope["pdmesh.request_id"] = request_id
        bind_log_fields(request_id=request_id)
        names = (b"x-request-id", b"request-id") if is_anthropic(scope["path"]) else (b"x-request-id",)
        own = [(name, request_id.encode()) for name in names]

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *own]
            await send(message)

        await self._app(scope, receive, send_with_id)


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T], tasks: TaskOwner) -> T:
    """Runs `work` in the calling task and cancels it when the client goes away.

    Raises CancelledSessionError then. The request's body must have been read.
    """
    current = asyncio.current_task()
    assert current is not None
    ended = gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        if not ended:
            gone = True
            current.cancel()

    watcher = tasks.spawn(watch(), "disconnect")
    try:
        return await work
    except asyncio.CancelledError:
        if gone and current.uncancel() == 0:
            raise CancelledSessionError("the client went away") from None
        raise
    finally:
        ended = True
        watcher.cancel()


class EventStream:
    """Server-sent events on one response. Headers leave with the first event or comment.

    Whatever sends raises CancelledSessionError when the client takes nothing for `stall` seconds.
    """

    def __init__(self, send: Send, stall: float) -> None:
        self._transmit = send
        self.stall = stall
        self._lock = asyncio.Lock()
        self.started = False
        self.last_at = time.monotonic()
        """When something was sent last; at first, when the response began."""

    async def write(self, data: bytes) -> None:
        """Sends whole events, or a comment; waits while the client reads slowly."""
        self.last_at = time.monotonic()
        if not self.started:
            await self._start()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        """Ends the response."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, message: Message) -> None:
        try:
            async with asyncio.timeout(self.stall):
                await self._transmit(message)
        except TimeoutError:
            raise CancelledSessionError(f"the client took nothing for {self.stall:g} s") from None

    async def _start(self) -> None:
        async with self._lock:
            if self.started:
                return
            headers = [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),
            ]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            self.started = True


OnEnd = Callable[[BaseException | None, bool], None]
"""Called once with the failure, if any, and whether events had been sent."""


class EventResponse(Response):
    """Runs `produce(stream)` as the response.

    A failure before the first event is a real status; after it, what `failed` says, and no [DONE]. Whenever nothing was
    sent for `comment_after` seconds, before token 1 or while a broken stream waits for a worker, a comment keeps
    the connection awake (and fixes the status at 200).
    A client that takes nothing for `stall` seconds counts as gone.
    """

    def __init__(
        self,
        produce: Callable[[EventStream], Awaitable[None]],
        tasks: TaskOwner,
        comment_after: float,
        on_end: OnEnd,
        *,
        stall: float,
        failed: Callable[[PdmeshError], bytes] = error_event,
    ) -> None:
        super().__init__()
        self._produce, self._tasks, self._failed = produce, tasks, failed
        self._comment_after, self._on_end, self._stall = comment_after, on_end, stall

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the response."""
        stream = EventStream(send, self._stall)
        failure: BaseException | None = None
        try:
            await until_disconnect(receive, self._run(stream), self._tasks)
        except CancelledSessionError as exc:
            failure = exc  # nobody reads any more
            await _cut(scope, receive)
        except asyncio.CancelledError as exc:  # this router ends: its drain took too long
            failure = exc
            if stream.started:
                stream.stall = LAST_WORD_SECONDS
                await self._fail(UnavailableError(SHUTS_DOWN), stream, scope, receive, send)
            raise
        except Exception as exc:  # noqa: BLE001  # the border of the process: all errors become answers
            failure = as_pdmesh_error(exc)
            await self._fail(failure, stream, scope, receive, send)
        else:
            with contextlib.suppress(CancelledSessionError):
                await stream.end()
        finally:
            self._on_end(failure, stream.started)

    async def _run(self, stream: EventStream) -> None:
        waker = self._tasks.spawn(self._keep_awake(stream), "keep awake")
        try:
            await self._produce(stream)
        finally:
            waker.cancel()

    async def _keep_awake(self, stream: EventStream) -> None:
        while True:
            quiet = time.monotonic() - stream.last_at
            if quiet < self._comment_after:
                await asyncio.sleep(self._comment_after - quiet)
                continue
            with contextlib.suppress(CancelledSessionError):
                await stream.write(b": wait\n\n")

    async def _fail(self, exc: PdmeshError, stream: EventStream, scope: Scope, receive: Receive, send: Send) -> None:
        if not stream.started:
            await error_response(exc, scope)(scope, receive, send)
            return
        with contextlib.suppress(CancelledSessionError):
            await stream.write(self._failed(exc))
            await stream.end()


async def _cut(scope: Scope, receive: Receive) -> None:
    """Cuts the connection of a client that does not read: what it did not take would stay in memory with it."""
    abort = scope.get("extensions", {}).get(ABORT)
    if abort is not None:
        abort["call"]()
        while (await receive())["type"] != "http.disconnect":
            pass
