"""What a service tells the manager that started it: systemd's notification protocol (sd_notify).

    READY=1          once, when the service serves
    STATUS=…         in words: serving, draining, or what stands still
    STOPPING=1       when a drain begins
    WATCHDOG=1       twice per interval, for as long as `healthy()` says that work progresses or there is none

Each message is one datagram of NAME=value lines to the unix socket that $NOTIFY_SOCKET names. Without one every
call does nothing; an unreachable one is logged once, never raised.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass

from services.runtime.tasks import Stop

log = logging.getLogger(__name__)

_PINGS_PER_INTERVAL = 2
_DEFAULT_LOOK = 1.0
"""Seconds between two looks at `healthy` when the manager set no watchdog: the status tells of it still."""


@dataclass(frozen=True)
class ManagerAddress:
    """Where the manager listens, and how often it wants to hear from this process.

    `socket_path` is a path, "@name" in the abstract namespace, or "" for no manager. `watchdog_seconds` is 0 for no
    watchdog.
    """

    socket_path: str = ""
    watchdog_seconds: float = 0.0


class ServiceManager:
    """The manager of this process, or nobody."""

    def __init__(self, address: ManagerAddress) -> None:
        self._path, self._interval = address.socket_path, address.watchdog_seconds
        self._unreachable = False

    def tell(self, **what: str | int) -> bool:
        """Sends one message, such as tell(READY=1, STATUS="serving"). False when nobody got it. Never blocks."""
        if not self._path:
            return False
        text = "\n".join(f"{name}={' '.join(str(value).split())}" for name, value in what.items())
        target = "\0" + self._path[1:] if self._path.startswith("@") else self._path
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
                sock.setblocking(False)
                sock.sendto(text.encode(), target)
        except OSError as exc:
            if not self._unreachable:
                log.warning("the service manager at %s can't be told anything: %s", self._path, exc.strerror or exc)
            self._unreachable = True
            return False
        self._unreachable = False
        return True

    async def accompany(self, stop: Stop, healthy: Callable[[], bool] = lambda: True, status: str = "serving") -> None:
        """Says READY, then pings for as long as `healthy()` holds, and STOPPING once `stop.draining` is set.

        Runs until it is cancelled: a drain has to show progress too. While `healthy()` is false no ping goes out, so
        the manager ends this process one interval later; a ping shows besides that the event loop runs.
        """
        self.tell(READY=1, STATUS=status)
        wait = self._interval / _PINGS_PER_INTERVAL or _DEFAULT_LOOK
        progressing, stopping = True, False
        try:
            while self._path:
                if stop.draining.is_set() and not stopping:
                    stopping, status = True, "draining"
                    self.tell(STOPPING=1, STATUS=status)
                if healthy() != progressing:
                    progressing = not progressing
                    self.tell(STATUS=status if progressing else "the engine makes no progress")
                if progressing and self._interval:
                    self.tell(WATCHDOG=1)
                await _set_within(stop.draining, wait, already=stopping)
        finally:
            if not stopping:
                self.tell(STOPPING=1)


async def _set_within(event: asyncio.Event, seconds: float, *, already: bool) -> None:
    """Waits until the event is set, but at most `seconds`; the whole time when it was set `already`."""
    if already:
        await asyncio.sleep(seconds)
        return
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
