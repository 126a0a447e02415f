"""A TCP proxy between two processes of a test mesh, which can be told to misbehave.

async with Proxy(target_port) as proxy:       # peers dial proxy.port
    proxy.delay(0.2)                          # what passes is held for so long, in order
    proxy.stall()                             # nothing passes, nothing closes: a network that drops everything
    proxy.reset()                             # every connection ends with a RST; new ones are taken
    proxy.heal()
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from types import TracebackType

from services.runtime.tasks import TaskOwner

_CHUNK = 65_536
_LINGER_RST = struct.pack("ii", 1, 0)


def free_port() -> int:
    """A port of loopback that nothing listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Proxy:
    """One listening port in front of another; use it as an async context manager."""

    def __init__(self, target: int, port: int = 0) -> None:
        self._target, self.port = target, port
        self._tasks = TaskOwner("proxy")
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._open = asyncio.Event()
        self._open.set()
        self._delay = 0.0
        self.passed = 0
        """Bytes, both ways."""

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._take, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        await self._tasks.close()
        for writer in list(self._writers):
            writer.close()

    def delay(self, seconds: float) -> None:
        """Holds back each piece for so long."""
        self._delay = seconds

    def stall(self) -> None:
        """Lets nothing pass, in either direction, until heal()."""
        self._open.clear()

    def reset(self) -> None:
        """Ends all connections of now with a RST on both sides."""
        for writer in list(self._writers):
            sock = writer.get_extra_info("socket")
            if sock is not None:
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_RST)
            writer.transport.abort()

    def heal(self) -> None:
        """Passes everything on at once again, also what was held back."""
        self._delay = 0.0
        self._open.set()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, far_writer}
        self._tasks.spawn(self._pump(reader, far_writer), "out")
        self._tasks.spawn(self._pump(far_reader, writer), "in")

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(_CHUNK):
                if self._delay:
                    await asyncio.sleep(self._delay)
                await self._open.wait()
                writer.write(data)
                await writer.drain()
                self.passed += len(data)
        except OSError:
            pass
        finally:
            self._writers.discard(writer)
            writer.close()
