"""The decode workers from which this prefill worker takes sessions: those in its own watched rank table, no others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from engine_core.lifecycle.membership import MembershipState
from engine_core.types.errors import InvalidRequestError, Leg, UnavailableError
from engine_core.types.request import Role
from services.wire.bootstrap import RankRow


class DecodePeers:
    """Looks decode leaders up by incarnation. `row_of` reads the watched table; poke() says that it changed."""

    def __init__(self, row_of: Callable[[int], RankRow | None], wait: float = 1.0) -> None:
        self._row_of, self._wait = row_of, wait
        self._changed = asyncio.Event()

    def poke(self) -> None:
        """The rank table changed."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def find(self, incarnation: int) -> RankRow:
        """The row of a decode leader; awaited for up to `wait` seconds: it may have registered a moment ago.

        Raises UnavailableError (leg decode) when the table has no such worker, InvalidRequestError when the
        incarnation is not set.
        """
        if incarnation <= 0:
            raise InvalidRequestError("decode_incarnation is missing", leg=Leg.PREFILL, field="decode_incarnation")
        try:
            async with asyncio.timeout(self._wait):
                while (row := self._look(incarnation)) is None:
                    await self._changed.wait()
        except TimeoutError:
            raise UnavailableError(
                f"no decode worker with incarnation {incarnation} is in the rank table of this prefill worker",
                leg=Leg.DECODE,
                reason="PEER_UNKNOWN",
                peer_incarnation=incarnation,
            ) from None
        return row

    def _look(self, incarnation: int) -> RankRow | None:
        row = self._row_of(incarnation)
        known = row is not None and row.instance.role is Role.DECODE and row.state is not MembershipState.LEFT
        return row if known else None
