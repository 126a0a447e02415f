"""Which links the engine has up, who waits for one, and who wants to hear of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from engine_core.host.frames import LinkDown, LinkUp
from engine_core.types.errors import Leg, PdmeshError, UnavailableError

LinkListener = Callable[[LinkUp | LinkDown], None]


class LinkBook:
    """Fed with LinkUp and LinkDown frames; one event loop only."""

    def __init__(self) -> None:
        self._up: dict[int, LinkUp] = {}
        self._waiters: dict[int, asyncio.Future[LinkUp]] = {}
        self._listeners: list[LinkListener] = []

    def add_listener(self, listener: LinkListener) -> None:
        """Calls `listener` on each frame, on the loop."""
        self._listeners.append(listener)

    def get(self, link_id: int) -> LinkUp | None:
        """The link's LinkUp while it is up."""
        return self._up.get(link_id)

    def expect(self, link_id: int) -> asyncio.Future[LinkUp]:
        """What wait() waits for; to be called before whatever brings the link up."""
        waiter = self._waiters.get(link_id)
        if waiter is None:
            waiter = asyncio.get_running_loop().create_future()
            waiter.add_done_callback(_retrieve)
            self._waiters[link_id] = waiter
        return waiter

    async def wait(self, link_id: int, waiter: asyncio.Future[LinkUp], timeout: float) -> LinkUp:
        """Raises UnavailableError (leg transfer) when the link went down or is not up in time."""
        try:
            async with asyncio.timeout(timeout):
                return await asyncio.shield(waiter)
        except TimeoutError:
            self._waiters.pop(link_id, None)
            raise UnavailableError(
                f"link {link_id:x} was not up within {timeout:g} s", leg=Leg.TRANSFER, reason="LINK_TIMEOUT"
            ) from None

    def take(self, frame: LinkUp | LinkDown) -> None:
        """Takes one frame."""
        waiter = self._waiters.pop(frame.link_id, None)
        if isinstance(frame, LinkUp):
            self._up[frame.link_id] = frame
            if waiter is not None and not waiter.done():
                waiter.set_result(frame)
        else:
            self._up.pop(frame.link_id, None)
            if waiter is not None and not waiter.done():
                waiter.set_exception(
                    UnavailableError(
                        f"link {frame.link_id:x} is down: {frame.reason}",
                        leg=Leg.TRANSFER,
                        reason="LINK_DOWN",
                        peer_incarnation=frame.peer_incarnation,
                    )
                )
        for listener in self._listeners:
            listener(frame)

    def fail(self, error: Callable[[], PdmeshError]) -> None:
        """The engine is gone: nothing is up, and every waiter gets an error."""
        self._up.clear()
        waiters, self._waiters = list(self._waiters.values()), {}
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(error())


def _retrieve(future: asyncio.Future[LinkUp]) -> None:
    """Marks a failure as seen: with no waiter left, nobody is owed it."""
    if not future.cancelled():
        future.exception()
