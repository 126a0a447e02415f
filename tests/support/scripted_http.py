"""A server that answers each POST as a test scripts it, byte by byte: for clients that must face every answer.

    async with ScriptedServer(answer) as server:        # async def answer(exchange) -> None
        ...                                             # server.url, server.requests

Every connection serves one request and is closed, as the answers say.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any

_LIMIT = 30.0


class Exchange:
    """One request, and the way back."""

    def __init__(self, number: int, head: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self.number, self.head, self.body, self._writer = number, head, body, writer

    @property
    def path(self) -> str:
        """As the request line has it."""
        return self.head.split(" ", 2)[1]

    def header(self, name: str) -> str:
        """A header's value; empty without it."""
        for line in self.head.split("\r\n")[1:]:
            key, _, value = line.partition(":")
            if key.lower() == name.lower():
                return value.strip()
        return ""

    async def reply(self, status: int, body: Any, **headers: str) -> None:
        """A whole answer as JSON; `retry_after="2"` is the header Retry-After."""
        data = json.dumps(body).encode()
        named = "".join(f"{n.replace('_', '-')}: {v}\r\n" for n, v in headers.items())
        await self.raw(
            f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n"
            f"connection: close\r\n{named}\r\n".encode()
            + data
        )

    async def start(self) -> None:
        """The head of a stream, which ends with the connection."""
        await self.raw(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")

    async def event(self, data: Any) -> None:
        """One event."""
        await self.raw(b"data: " + json.dumps(data).encode() + b"\n\n")

    async def text(self, text: str, **more: Any) -> None:
        """An event of /v1/completions."""
        await self.event({"choices": [{"index": 0, "text": text, "finish_reason": None, **more}]})

    async def done(self, prompt_tokens: int, output_tokens: int) -> None:
        """The usage, and [DONE]."""
        await self.event(
            {
                "choices": [],
                "usage": {
                    "prompt_tokens": prompt_tokens,
                    "completion_tokens": output_tokens,
                    "prompt_tokens_details": {"cached_tokens": 1},
                },
            }
        )
        await self.raw(b"data: [DONE]\n\n")

    async def raw(self, data: bytes) -> None:
        """Any bytes."""
        self._writer.write(data)
        await self._writer.drain()

    def reset(self) -> None:
        """Breaks the connection."""
        self._writer.transport.abort()


class ScriptedServer:
    """The server; an async context manager."""

    def __init__(self, answer: Callable[[Exchange], Awaitable[None]]) -> None:
        self._answer, self._server = answer, None
        self.requests: list[Exchange] = []
        self.url = ""
        """Without /v1."""

    async def __aenter__(self) -> ScriptedServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()[:2]
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_LIMIT):
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                exchange = Exchange(len(self.requests), head, {}, writer)
                if length := int(exchange.header("content-length") or 0):
                    exchange.body = json.loads(await reader.readexactly(length))
                self.requests.append(exchange)
                await self._answer(exchange)
        except (ConnectionError, asyncio.IncompleteReadError):  # the client went away
            pass
        finally:
            writer.close()
