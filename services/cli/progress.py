"""What `pdmesh serve` tells of itself: to who looks at its output, and to the service manager, where there is one.

    step(…) while it starts, every 10 s who is awaited → serving(…): READY → changed(…): who is down → STOPPING

Its children tell the manager nothing: they don't know of it (see config.child_environment).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from services.runtime.notify import ServiceManager
from services.runtime.tasks import Stop, TaskOwner

_PATIENCE = 10.0
"""Seconds of a start without a word."""


class Progress:
    """Of one run of `pdmesh serve`. Close it."""

    def __init__(self, say: Callable[[str], None], manager: ServiceManager, stop: Stop) -> None:
        self._say, self._manager, self._stop = say, manager, stop
        self._tasks = TaskOwner("progress")
        self._serving = ""

    def step(self, what: str) -> None:
        """The start has come so far."""
        self._say(what)
        self._manager.tell(STATUS=what)

    async def name_who_is_awaited(self, down: Callable[[], Sequence[str]]) -> None:
        """Says now and then what the start waits for; cancelled by its owner."""
        while True:
            await asyncio.sleep(_PATIENCE)
            names = down()
            self._say(f"waits for {', '.join(names)}" if names else "waits until the router can place requests")

    def serving(self, what: str) -> None:
        """Requests are answered: READY, and from now on what the watchdog wants to hear."""
        self._serving = what
        self._tasks.spawn(self._manager.accompany(self._stop, status=f"serving {what}"), "service manager")

    def changed(self, down: Sequence[str]) -> None:
        """These children are not ready; before the mesh serves, and on the way down, that is nothing new."""
        if self._serving and not self._stop.draining.is_set():
            self._manager.tell(STATUS=f"serving {self._serving}{' without ' if down else ''}{', '.join(down)}")

    def failed(self, why: str) -> None:
        """It could not start."""
        self._manager.tell(STATUS=f"could not start: {why}")

    def ending(self) -> None:
        """The children are about to be ended; where it has served, the signal to drain has said so."""
        if not self._serving:
            self._manager.tell(STOPPING=1)

    async def close(self) -> None:
        """No child is left: a drain shows progress to its end."""
        await self._tasks.close()
