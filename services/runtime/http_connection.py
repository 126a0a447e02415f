"""One HTTP connection, held within limits: what is cheap for a client to send is cheap to have received.

    accepted ─▶ a request's head, within its size and time ─▶ the application answers ─▶ kept for the next request

uvicorn's protocol parses and answers; this one bounds what it leaves open:

- how many connections there are: at the limit the idle ones make room, else a newcomer gets a 503;
- how large a request's head may be (431; its target: 414), and how long it may take (408, if anything came);
- requests that are sent before the answer to the last one is over: the connection ends with that answer, which HTTP
  allows, and what came after is dropped. So a connection never holds more than one request;
- clients that take nothing of what was sent to them, for `stall_seconds`: they are cut off, whoever waits for them
  hears of it, and the memory of what they did not take is freed.

Errors that come before the application are OpenAI's error objects too. What costs time is looked at once a second, for
all connections (`Connections.watch`).
"""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import struct
from collections.abc import Callable
from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

ABORT = "pdmesh.abort"
"""In a scope's extensions: cuts the connection, whatever has not been sent."""

_LOOK_SECONDS = 1.0
_LINGER_SECONDS = 2.0
"""That a client which is refused has to read why, before the connection is cut."""
_LINGERING = 64
"""Refused newcomers that may linger at a time; beyond, they are cut without a word."""
_KERNEL_BYTES = 256 * 1024
"""Asked of the kernel for what a client has not taken yet; it would let megabytes wait for one that does not read."""
_LATE_BYTES = 64 * 1024 * 1024
"""Of a body that come after its answer: dropped up to here, so that the client gets to read the answer."""


_OFFERS = frozenset({b"connection", b"upgrade", b"http2-settings"})
"""Headers by which a client offers to go on in another protocol."""


class HttpLimits(msgspec.Struct, frozen=True):
    """Of each connection, and of their number."""

    connections: int = 2048
    head_bytes: int = 64 * 1024
    """Request line and headers together."""
    head_fields: int = 128
    target_bytes: int = 8 * 1024
    """The path with its query."""
    head_seconds: float = 10.0
    stall_seconds: float = 60.0


class Connections:
    """The limits, and what they have refused. One per server."""

    def __init__(self, limits: HttpLimits, on_refused: Callable[[str], None] = lambda _: None) -> None:
        """`on_refused` gets one of: connections, head_size, target_size, head_time, malformed, pipelined, stalled."""
        self.limits, self.refused = limits, on_refused
        self.all: set[GuardedProtocol] = set()
        """Those that are open; refused newcomers are not among them."""
        self.lingering = 0

    def protocol(self, **uvicorn: Any) -> GuardedProtocol:
        """What uvicorn makes for each connection."""
        return GuardedProtocol(self, **uvicorn)

    async def watch(self) -> None:
        """Looks at all connections once a second, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            self.look(loop.time())

    def look(self, now: float) -> None:
        """Ends those whose time is up, by the loop's clock."""
        for connection in list(self.all):
            connection.look(now)

    def make_room(self) -> bool:
        """True when one connection more may be held; an idle one is closed for it where there is one."""
        if len(self.all) < self.limits.connections:
            return True
        idle = next((connection for connection in self.all if connection.idle), None)
        if idle is None:
            return False
        idle.transport.abort()
        self.all.discard(idle)
        return True


class _Refused(Exception):  # noqa: N818  # never leaves this file
    """Raised in the parser's callbacks to stop it."""


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's protocol within limits."""

    def __init__(self, guard: Connections, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._guard, self._limits = guard, guard.limits
        self._refusal: tuple[int, str, str, str] | None = None
        self._deaf = False
        """Nothing that comes is read any more."""
        self._head_since: float | None = None
        """Since when a request's head is awaited; None while one is served, or none is due."""
        self._head_bytes = self._fields = self._late = 0
        self._in_head = True
        """False while a body comes."""
        self._answered_at = 0.0
        self._unsent = 0
        self._unsent_since: float | None = None
        self._lingers = self._offered = False

    # ---- the connection -----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if not self._guard.make_room():
            self.transport = transport
            self._guard.refused("connections")
            self._lingers = True
            self._guard.lingering += 1
            if self._guard.lingering > _LINGERING:
                self._deaf = True
                transport.abort()
                return
            self._answer(503, "server_error", "too_many_connections", "this router holds too many connections")
            return
        super().connection_made(transport)
        self._set_option(socket.SO_SNDBUF, _KERNEL_BYTES)
        self._guard.all.add(self)
        self._head_since = self.loop.time()

    def connection_lost(self, exc: Exception | None) -> None:
        self._guard.all.discard(self)
        if self._lingers:
            self._guard.lingering -= 1
        super().connection_lost(exc)

    @property
    def idle(self) -> bool:
        """True between two requests, and before the first byte."""
        return self._in_head and not self._head_bytes and (self.cycle is None or self.cycle.response_complete)

    def look(self, now: float) -> None:
        """Ends the connection when its client's time is up."""
        if self.transport.is_closing() and not self.transport.get_write_buffer_size():
            return
        self._look_at_writes(now)
        limit = self._limits.head_seconds
        if self._deaf:
            return
        if self._head_since is not None and now - self._head_since > limit:
            self._guard.refused("head_time")
            if self._head_bytes:
                what = f"the request's head did not come within {limit:g} s"
                self._answer(408, "invalid_request_error", "request_timeout", what)
            else:
                self.transport.close()
        elif not self._in_head and self.cycle.response_complete and now - self._answered_at > limit:
            self.transport.close()  # it has its answer and goes on sending

    def _look_at_writes(self, now: float) -> None:
        size = self.transport.get_write_buffer_size()
        if not size or size < self._unsent or self._unsent_since is None:
            self._unsent_since = now if size else None
        self._unsent = size
        if self._unsent_since is not None and now - self._unsent_since > self._limits.stall_seconds:
            self._guard.refused("stalled")
            self.abort()

    # ---- what comes ---------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        if self._in_head:
            if self._head_since is None:
                self._head_since = self.loop.time()
            self._head_bytes += len(data)
        elif self.cycle.response_complete:
            self._late += len(data)
            if self._late > _LATE_BYTES:
                self.transport.close()
                return
        self._unset_keepalive_if_required()
        self._feed(data)
        if self._in_head and self._head_bytes > self._limits.head_bytes and not self._deaf:
            self._refuse_head_size()
            self._stop_reading()

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as exc:
            self._stay_with_http(data[int(exc.args[0]) :])
        except httptools.HttpParserError:
            self._stop_reading()

    def _stay_with_http(self, rest: bytes) -> None:
        """Offers of other protocols are not taken up. Java's client makes one (h2c) with every first request; the
        parser takes its body for the other protocol, so the request is read once more, without the offer."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        if method == b"CONNECT":
            self._stop_reading()
            return
        kept = [(name, value) for name, value in self.headers if name not in _OFFERS]
        lines = [b"%s %s HTTP/%s" % (method, self.url, version), *(b"%s: %s" % field for field in kept)]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as the first one
        self._offered = False
        self._feed(b"\r\n".join(lines) + b"\r\n\r\n" + rest)

    def _stop_reading(self) -> None:
        if self._deaf:  # pipelined: the answer that is on its way is the last
            return
        status, kind, code, message = self._refusal or (
            400,
            "invalid_request_error",
            "malformed_request",
            "this is no HTTP request",
        )
        if self._refusal is None:
            self._guard.refused("malformed")
        self._answer(status, kind, code, message)

    def _refuse_head_size(self) -> None:
        self._guard.refused("head_size")
        limits = self._limits
        what = f"the request's head is above {limits.head_bytes} bytes or {limits.head_fields} fields"
        self._refusal = (431, "invalid_request_error", "headers_too_large", what)

    # ---- callbacks of the parser ----------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._guard.refused("pipelined")
            self._deaf = True
            self.cycle.keep_alive = False
            raise _Refused
        self._in_head, self._fields, self._late = True, 0, 0
        super().on_message_begin()
        self.scope["extensions"] = {ABORT: {"call": self.abort}}

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > self._limits.target_bytes:
            self._guard.refused("target_size")
            what = f"the request's target is above {self._limits.target_bytes} bytes"
            self._refusal = (414, "invalid_request_error", "uri_too_long", what)
            raise _Refused

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields += 1
        if self._fields > self._limits.head_fields:
            self._refuse_head_size()
            raise _Refused
        if self._in_head:  # trailers are dropped
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self._limits.head_bytes:
            self._refuse_head_size()
            raise _Refused
        self._offered = self.parser.should_upgrade()
        if self._offered:
            return
        super().on_headers_complete()
        self._in_head, self._head_since, self._head_bytes = False, None, 0

    def on_message_complete(self) -> None:
        if self._offered:
            return
        super().on_message_complete()
        self._in_head = True
        """False while a body comes."""

    def on_response_complete(self) -> None:
        self._answered_at = self.loop.time()
        super().on_response_complete()

    # ---- the end ------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Cuts the connection at once; what the kernel has of it goes too."""
        self._set_option(socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _set_option(self, option: int, value: int | bytes) -> None:
        sock = self.transport.get_extra_info("socket")
        if sock is not None and sock.fileno() >= 0:
            sock.setsockopt(socket.SOL_SOCKET, option, value)

    def _answer(self, status: int, kind: str, code: str, message: str) -> None:
        """Says what is wrong, unless an answer is under way, and ends the connection."""
        self._deaf = True
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            started = cycle.response_started
            cycle.disconnected = True
            cycle.message_event.set()
            if started:
                self.transport.close()
                return
        error = {"message": message, "type": kind, "param": None, "code": code}
        body = json.dumps({"error": error}).encode()
        retry = b"retry-after: 1\r\n" if status == 503 else b""
        head = b"content-type: application/json\r\ncontent-length: %d\r\n%sconnection: close\r\n\r\n"
        self.transport.write(STATUS_LINE[status] + head % (len(body), retry) + body)
        # A close with bytes unread would be a reset, which may overtake the answer.
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self.loop.call_later(_LINGER_SECONDS, self.transport.abort)
        else:
            self.transport.close()


def allow_files(wanted: int) -> int:
    """Raises this process's limit of open files to `wanted`, as far as it may; the limit that holds then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == resource.RLIM_INFINITY else soft
