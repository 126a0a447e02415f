"""uvicorn inside a process that has its own way to stop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn


class HttpServer(uvicorn.Server):
    """uvicorn without signal handlers of its own; says when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to the process's Stop."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to listen."""
        await super().startup(sockets)
        self.listening.set()
