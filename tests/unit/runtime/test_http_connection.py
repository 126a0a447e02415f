"""Connections without a router: what a client does not take, and limits of files."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn

from services.runtime.http_connection import Connections, HttpLimits, allow_files
from services.runtime.http_server import HttpServer
from services.runtime.tasks import TaskOwner

App = Callable[[Any, Any, Any], Awaitable[None]]
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
LIMIT = 30.0
SIZE = 8 * 1024 * 1024


@asynccontextmanager
async def serving(app: App, limits: HttpLimits) -> AsyncIterator[tuple[Connections, Counter[str], int]]:
    """A server of this application; its connections, what they refused, and its port."""
    refused: Counter[str] = Counter()
    connections = Connections(limits, lambda reason: refused.update([reason]))
    config = uvicorn.Config(
        app,
        http=connections.protocol,  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=None,
        timeout_graceful_shutdown=5,
    )
    server, tasks = HttpServer(config), TaskOwner("server")
    listener = socket.create_server(("127.0.0.1", 0))
    tasks.spawn(connections.watch(), "watch")
    running = tasks.spawn(server.serve([listener]), "server")
    try:
        await server.listening.wait()
        yield connections, refused, listener.getsockname()[1]
    finally:
        server.should_exit = True
        await asyncio.wait({running}, timeout=LIMIT)
        await tasks.close()
        listener.close()


async def large(scope: Any, receive: Any, send: Any) -> None:
    headers = [(b"content-length", b"%d" % SIZE)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"a" * SIZE})


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_an_answer_that_nobody_takes_is_dropped() -> None:
    async with serving(large, HttpLimits(stall_seconds=0.3)) as (connections, refused, port):
        with (
            socket.create_connection(("127.0.0.1", port)) as idle,
            socket.create_connection(("127.0.0.1", port)) as sock,
        ):
            sock.sendall(GET)
            await until(lambda: refused["stalled"] == 1)
            await until(lambda: len(connections.all) == 1)  # the other one has done nothing wrong
            idle.setblocking(False)
            with pytest.raises(BlockingIOError):
                idle.recv(1)
            sock.settimeout(LIMIT)
            got = 0
            with pytest.raises(ConnectionResetError):  # noqa: PT012
                while data := await asyncio.to_thread(sock.recv, 1 << 20):
                    got += len(data)
            assert got < SIZE


async def small(scope: Any, receive: Any, send: Any) -> None:
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def test_time_is_taken_per_request() -> None:
    """Looks at any moment between two bytes end nobody before the time of this head is over."""
    limits = HttpLimits(head_seconds=100.0, stall_seconds=1000.0)
    async with serving(small, limits) as (connections, refused, port):
        loop = asyncio.get_running_loop()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        post = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc"
        await until(lambda: len(connections.all) == 1)
        (connection,) = connections.all
        for _ in range(3):
            connections.look(loop.time() + 99.0)
            for at in range(len(post)):
                writer.write(post[at : at + 1])
                await until(lambda: not connection.idle)
                connections.look(loop.time())
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
            await until(lambda: connection.idle)
            connections.look(loop.time() + 10_000.0)  # between requests there is another limit
        writer.write(post[:20])
        await until(lambda: not connection.idle)
        connections.look(loop.time() + 99.0)
        assert not refused
        connections.look(loop.time() + 101.0)
        assert (await reader.readuntil(b"}}")).startswith(b"HTTP/1.1 408") and refused == {"head_time": 1}
        writer.close()


async def test_a_slow_reader_is_no_stalled_one() -> None:
    """It takes a little, much less often than all the time, and gets all of it."""
    async with serving(large, HttpLimits(stall_seconds=5.0)) as (_, refused, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)
        writer.write(GET)
        await reader.readuntil(b"\r\n\r\n")
        got = 0
        while got < SIZE:
            got += len(await reader.read(1 << 18))
            await asyncio.sleep(0.01)
        assert got == SIZE and not refused
        writer.close()


def test_the_limit_of_files_is_raised_as_far_as_it_may_be() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = hard if hard != resource.RLIM_INFINITY else soft + 7
    try:
        assert allow_files(most) >= min(most, soft) and resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= soft
        assert allow_files(1) == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if hard != resource.RLIM_INFINITY:
            assert allow_files(hard + 1) == hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
