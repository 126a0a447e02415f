"""What a service tells the process that started it, as JSON lines on an inherited descriptor (--ready-fd N).

    {"event": "ready", "name": "decode", "pid": 7, "endpoint": "127.0.0.1:8100", ...}     once, when it serves
    {"event": "alive"}                                                  every BEAT seconds while its loop runs
    {"event": "failed", "message": "...", "exit_code": 2}               instead of ready, or at a fatal error

End-of-file means that the process is gone. `ready` holds what the service gave on_ready; every service
gives `endpoint`, host:port of its gRPC or HTTP server.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import sys
from typing import Any

BEAT = 2.0


class Reporter:
    """Writes events to a descriptor; does nothing without one, or when nobody reads any more."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        if fd is not None:
            os.set_inheritable(fd, False)
            os.set_blocking(fd, False)

    def ready(self, info: dict[str, Any]) -> None:
        """The service serves."""
        self._write({"event": "ready", **info})

    def failed(self, message: str, exit_code: int) -> bool:
        """The service ends because of this; False when nobody was told."""
        return self._write({"event": "failed", "message": message, "exit_code": exit_code})

    async def beat(self) -> None:
        """Tells every BEAT seconds that the event loop runs; cancelled by its owner."""
        while self._fd is not None:
            self._write({"event": "alive"})
            await asyncio.sleep(BEAT)

    def _write(self, event: dict[str, Any]) -> bool:
        if self._fd is None:
            return False
        try:
            os.write(self._fd, json.dumps(event).encode() + b"\n")
        except BlockingIOError:
            return False  # the reader is held up; it will see the next one
        except OSError:
            self._fd = None
        return self._fd is not None


def parse(line: bytes) -> dict[str, Any] | None:
    """One event; None for what is not one."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "event" in event else None


def die_with(parent: int) -> bool:
    """Asks the kernel to end this process when `parent` dies. False when it is dead already.

    Without Linux only the check is made.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    return os.getppid() == parent
