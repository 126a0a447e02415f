"""The watched rank table as placement needs it: rows now, and a way to wait for others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from services.wire.bootstrap import RankRow
from services.worker.roster import Roster


class WatchedTable:
    """A roster whose watcher calls notify() when rows change."""

    def __init__(self, roster: Roster) -> None:
        self.roster = roster
        self._changed = asyncio.Event()
        self._listeners: list[Callable[[], None]] = []

    def rows(self) -> Sequence[RankRow]:
        """All rows now."""
        return self.roster.rows()

    def notify(self) -> None:
        """Wakes all that wait for a change."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        for listener in self._listeners:
            listener()

    def on_change(self, listener: Callable[[], None]) -> None:
        """Calls `listener` after every change from now on."""
        self._listeners.append(listener)

    async def wait_change(self, timeout: float) -> bool:
        """Waits until rows change, at most `timeout` seconds; False when nothing did."""
        changed = self._changed
        try:
            async with asyncio.timeout(timeout):
                await changed.wait()
        except TimeoutError:
            return False
        return True
