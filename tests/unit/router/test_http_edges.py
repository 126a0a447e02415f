"""HTTP below the routes: origins, HEAD, the sizes and times of heads, connections, clients that do not read."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from engine_core.types.errors import ConfigError
from tests.support.fake_decode import FakeDecode, Harness, error_of, running_router, says, tokens, until
from tests.support.models import tiny_model

BODY = b'{"model": "default", "prompt": "hello", "max_tokens": 2}'
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
ASK = POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
LIMIT = 30.0
"""Seconds for what comes much sooner on a machine with time."""


class Wire:
    """A connection written by hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the next response."""
        async with asyncio.timeout(LIMIT):
            lines = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:] if line)}
            return int(lines[0].split()[1]), headers, await self._reader.readexactly(int(headers["content-length"]))

    async def refused(self) -> tuple[int, str]:
        """Status and code of an error, after which the connection ends."""
        status, headers, body = await self.answer()
        error = json.loads(body)["error"]
        assert set(error) == {"message", "type", "param", "code"} and headers["connection"] == "close"
        assert await self.ended() == b""
        return status, error["code"]

    async def ended(self) -> bytes:
        """What comes until the end, which comes."""
        async with asyncio.timeout(LIMIT):
            try:
                return await self._reader.read()
            except ConnectionResetError:
                return b""


@asynccontextmanager
async def wire(router: Harness) -> AsyncIterator[Wire]:
    host, _, port = router.endpoint.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield Wire(reader, writer)
    finally:
        writer.transport.abort()


async def refusals(router: Harness) -> dict[str, float]:
    """Connections that were ended, by reason."""
    lines = (await router.http.get("/metrics")).text.splitlines()
    name = "pdmesh_router_refused_connections_total{"
    return {line.split('"')[1]: float(line.split()[1]) for line in lines if line.startswith(name)}


# ---- above the connection ---------------------------------------------------------------------------


async def test_pages_of_named_origins_may_call() -> None:
    mine, other = "https://chat.example.com", "https://evil.example.com"
    wishes = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    options: dict[str, Any] = {"cors_origin": (mine, "http://localhost:3000"), "api_key": ("k",)}
    async with running_router(tiny_model(), FakeDecode(says([5])), **options) as router:
        http = router.http
        asked = await http.options("/v1/chat/completions", headers={"origin": mine, **wishes})
        assert asked.status_code == 200  # the browser's question comes without a key
        assert asked.headers["access-control-allow-origin"] == mine
        assert "authorization" in asked.headers["access-control-allow-headers"]
        assert "POST" in asked.headers["access-control-allow-methods"] and "Origin" in asked.headers["vary"]
        refused = await http.options("/v1/chat/completions", headers={"origin": other, **wishes})
        assert (refused.status_code, error_of(refused)["param"]) == (400, "origin")
        assert "access-control-allow-origin" not in refused.headers
        for status, headers in ((401, {}), (200, {"authorization": "Bearer k"})):
            shown = await http.get("/v1/models", headers={"origin": mine, **headers})
            assert (shown.status_code, shown.headers["access-control-allow-origin"]) == (status, mine)
            assert "x-request-id" in shown.headers["access-control-expose-headers"]
        plain = await http.get("/v1/models", headers={"origin": other, "authorization": "Bearer k"})
        assert plain.status_code == 200 and "access-control-allow-origin" not in plain.headers


async def test_without_origins_no_page_may_call_and_head_is_get_without_a_body() -> None:
    async with running_router(tiny_model(), FakeDecode(says([5]))) as router:
        http = router.http
        asked = {"origin": "https://a.example", "access-control-request-method": "POST"}
        response = await http.options("/v1/completions", headers=asked)
        assert response.status_code == 405 and "access-control-allow-origin" not in response.headers
        for path in ("/v1/models", "/v1/models/default", "/health", "/ping", "/readiness", "/version", "/openapi.json"):
            got, head = await http.get(path), await http.head(path)
            assert (head.status_code, head.content) == (got.status_code, b"")
            assert head.headers["content-length"] == got.headers["content-length"] == str(len(got.content))
        assert (await http.head("/v1/models/none")).status_code == 404
        response = await http.put("/v1/models")
        assert (response.status_code, response.headers["allow"]) == (405, "GET, HEAD")
        response = await http.head("/v1/completions")
        assert (response.status_code, response.headers["allow"]) == (405, "POST")
        assert (await http.post("/v1/completions/", json={})).status_code == 404


@pytest.mark.parametrize("origin", ["chat.example.com", "https://a.example/", "https://a.example/x", "ftp://a", ""])
async def test_origins_that_are_none_are_refused_at_the_start(origin: str) -> None:
    with pytest.raises(ConfigError, match="an origin is like https://chat.example.com") as caught:
        async with running_router(tiny_model(), FakeDecode(says([5])), cors_origin=(origin,)):
            pass
    assert caught.value.field == "cors_origin"


# ---- heads --------------------------------------------------------------------------------------------


async def test_heads_beyond_their_limits() -> None:
    async with running_router(tiny_model(), FakeDecode(says([5, 6])), max_header_bytes=4096) as router:
        get = b"GET /health HTTP/1.1\r\nHost: x\r\n"
        for sent, expected in (
            (get + b"a: " + b"b" * 4096 + b"\r\n\r\n", (431, "headers_too_large")),
            (get + b"a: " + b"b" * 9000, (431, "headers_too_large")),  # and no end of it
            (get + b"a: b\r\n" * 128 + b"\r\n", (431, "headers_too_large")),
            (b"GET /" + b"x" * 8192 + b" HTTP/1.1\r\n\r\n", (414, "uri_too_long")),
            (b"nonsense\r\n\r\n", (400, "malformed_request")),
            (POST + b"Content-Length: x\r\n\r\n", (400, "malformed_request")),
            (POST + b"Transfer-Encoding: chunked\r\n\r\nnot-hex\r\n", (400, "malformed_request")),
            (POST + b"Content-Length: 99999999999\r\nExpect: 100-continue\r\n\r\n", (413, "body_too_large")),
            (b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n", (400, "malformed_request")),
        ):
            async with wire(router) as line:
                await line.send(sent)
                assert await line.refused() == expected, sent[:60]
        async with wire(router) as line:
            await line.send(get + b"a: b\r\n" * 127 + b"\r\n")
            assert (await line.answer())[0] == 200
            await line.send(get + b"a: " + b"b" * 4000 + b"\r\n\r\n")  # each head is counted for itself
            assert (await line.answer())[0] == 200
            trailers = b"".join(b"t%d: x\r\n" % i for i in range(100))
            chunked = b"%x\r\n%s\r\n0\r\n%s\r\n" % (len(BODY), BODY, trailers)
            await line.send(POST + b"Transfer-Encoding: chunked\r\n\r\n" + chunked)
            assert (await line.answer())[0] == 200
        found = await refusals(router)
        assert (found["head_size"], found["target_size"], found["malformed"]) == (3, 1, 4)


async def test_heads_and_bodies_that_do_not_come() -> None:
    fake = FakeDecode(says([5, 6]))
    async with running_router(tiny_model(), fake, header_timeout=0.2, body_timeout=0.2) as router:
        async with wire(router) as begun, wire(router) as silent:
            await begun.send(POST)
            assert await begun.refused() == (408, "request_timeout")
            assert await silent.ended() == b""
        async with wire(router) as body, wire(router) as late:
            await body.send(POST + b"Content-Length: 9\r\n\r\n{")
            # This one has its answer, and goes on as if it had not.
            await late.send(b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
            assert await body.refused() == (408, "body_stalled")
            assert (await late.answer())[0] == 200
            assert await late.ended() == b""
        async with wire(router) as kept:
            await kept.send(HEALTH)
            assert (await kept.answer())[0] == 200
            await kept.send(HEALTH[:10])
            assert await kept.refused() == (408, "request_timeout")
        assert fake.requests == []


async def test_only_one_request_at_a_time_on_a_connection() -> None:
    go = asyncio.Event()
    fake = FakeDecode(lambda request: [go, *says([5, 6])(request)])
    async with running_router(tiny_model(), fake) as router:
        async with wire(router) as line:
            await line.send(ASK + ASK * 50)
            await fake.arrived.wait()
            await line.send(b"garbage" * 1000)
            go.set()
            status, headers, _ = await line.answer()
            assert status == 200 and await line.ended() == b""
        assert len(fake.requests) == 1 and headers["connection"] == "close"
        # Who leaves with requests sent ahead leaves, and what ran for it ends.
        go.clear()
        async with wire(router) as line:
            await line.send(ASK + ASK)
            await until(lambda: len(fake.requests) == 2)
        async with asyncio.timeout(LIMIT):
            await fake.cancelled.wait()


async def test_offers_of_other_protocols_are_not_taken_up() -> None:
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    async with running_router(tiny_model(), FakeDecode(says([5, 6]))) as router, wire(router) as line:
        for _ in range(2):
            await line.send(POST + upgrade + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
            status, _, body = await line.answer()
            assert status == 200 and json.loads(body)["usage"]["completion_tokens"] == 2
        await line.send(HEALTH.replace(b"\r\n\r\n", b"\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"))
        assert (await line.answer())[0] == 200


# ---- connections ------------------------------------------------------------------------------------


async def test_idle_connections_make_room_and_busy_ones_do_not() -> None:
    go = asyncio.Event()
    fake = FakeDecode(lambda request: [go, *says([5, 6])(request)])
    async with running_router(tiny_model(), fake, max_connections=2) as router:
        async with wire(router) as idle, wire(router) as busy:
            await idle.send(HEALTH)
            assert (await idle.answer())[0] == 200
            await busy.send(ASK)
            await fake.arrived.wait()
            async with wire(router) as other:
                await other.send(ASK)
                assert await idle.ended() == b""
                await until(lambda: len(fake.requests) == 2)
                async with wire(router) as newcomer:
                    status, headers, body = await newcomer.answer()
                    assert (status, headers["retry-after"]) == (503, "1")
                    assert json.loads(body)["error"]["code"] == "too_many_connections"
                    assert await newcomer.ended() == b""
                go.set()
                assert (await other.answer())[0] == (await busy.answer())[0] == 200
        assert (await refusals(router))["connections"] == 1


def narrow(router: Harness) -> socket.socket:
    """A connection that takes little before it is read from."""
    host, _, port = router.endpoint.partition(":")
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect((host, int(port)))
    return sock


async def test_a_reader_that_stalls_loses_its_stream_and_the_workers_hear_of_it() -> None:
    sent = 0

    def endless(request: Any) -> Any:
        nonlocal sent
        for sent in range(10**9):
            yield tokens(sent, [65 + sent % 26])

    fake = FakeDecode(endless)
    async with running_router(tiny_model(), fake, client_stall_timeout=0.5, request_timeout=600.0) as router:
        sock = narrow(router)
        try:
            body = b'{"model": "default", "prompt": "hello", "max_tokens": 1000000, "stream": true, "ignore_eos": true}'
            sock.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            async with asyncio.timeout(LIMIT):
                await fake.cancelled.wait()
            taken = sent

            async def gone() -> bool:
                lines = (await router.http.get("/metrics")).text
                return 'requests_total{end="cancelled",path="/v1/completions"} 1.0' in lines

            async with asyncio.timeout(LIMIT):
                while not await gone():  # noqa: ASYNC110  # the router has no event for us
                    await asyncio.sleep(0.02)
            # What is held of it is what the kernel and two small buffers hold, and the connection is cut.
            assert sent <= taken + 1 and taken < 200_000
            sock.setblocking(False)
            loop = asyncio.get_running_loop()
            async with asyncio.timeout(LIMIT):
                with pytest.raises(ConnectionResetError):
                    while await loop.sock_recv(sock, 65536):
                        pass
        finally:
            sock.close()
