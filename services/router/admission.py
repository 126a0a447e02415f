"""How many samples run at once, and how many may wait for that.

A request is admitted with all its samples or refused at once (429); each admitted sample then waits its
turn, first come first served, and holds a slot while it runs.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from engine_core.types.errors import Leg, QueueFullError

_RETRY_AFTER = 1.0


class Admission:
    """Slots and a bounded queue. Used on one event loop only."""

    def __init__(self, max_in_flight: int, max_queued: int) -> None:
        self._max_in_flight, self._max_queued = max_in_flight, max_queued
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._in_flight = 0
        self._pending = 0

    @property
    def in_flight(self) -> int:
        """Samples that hold a slot."""
        return self._in_flight

    @property
    def queued(self) -> int:
        """Samples that are admitted and hold no slot yet."""
        return self._pending

    def admit(self, samples: int) -> Ticket:
        """Admits a request. Raises QueueFullError when slots and queue can't take all its samples; a
        request that is larger than both is taken while nothing else is there."""
        busy = self._in_flight + self._pending
        if busy and busy + samples > self._max_in_flight + self._max_queued:
            raise QueueFullError(
                f"{self._in_flight} requests are served and {self._pending} wait; try again later",
                leg=Leg.ROUTER,
                retry_after=_RETRY_AFTER,
            )
        self._pending += samples
        return Ticket(self, samples)

    async def _enter(self, timeout: float) -> None:
        if self._in_flight < self._max_in_flight and not self._waiters:
            self._in_flight += 1
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout(timeout):
                await waiter
        except BaseException as exc:
            if waiter.done() and not waiter.cancelled():
                self._leave()  # the slot came and the wait was given up in the same moment
            elif waiter in self._waiters:
                self._waiters.remove(waiter)
            if isinstance(exc, TimeoutError):
                raise QueueFullError(
                    f"no slot became free within {timeout:.0f} s",
                    leg=Leg.ROUTER,
                    reason="QUEUE_TIMEOUT",
                    retry_after=_RETRY_AFTER,
                ) from None
            raise

    def _leave(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)  # the slot changes hands
                return
        self._in_flight -= 1


class Ticket:
    """One admitted request. Close it when the request ends, whatever became of its samples."""

    def __init__(self, admission: Admission, samples: int) -> None:
        self._admission, self._left = admission, samples

    @asynccontextmanager
    async def slot(self, timeout: float) -> AsyncIterator[None]:
        """Holds a slot for one sample. Raises QueueFullError after `timeout` seconds of waiting."""
        await self._admission._enter(timeout)
        self._take(1)
        try:
            yield
        finally:
            self._admission._leave()

    def close(self) -> None:
        """Gives back the places of samples that never ran."""
        self._take(self._left)

    def _take(self, samples: int) -> None:
        samples = min(samples, self._left)
        self._left -= samples
        self._admission._pending -= samples
