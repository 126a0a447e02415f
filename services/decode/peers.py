"""The prefill workers that this decode worker may dial: those in its own watched rank table, no others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from engine_core.lifecycle.membership import MembershipState
from engine_core.types.errors import FencedError, InvalidRequestError, Leg, UnavailableError
from engine_core.types.request import Role
from services.wire.bootstrap import RankRow
from services.worker.identity import WorkerIdentity


class PrefillPeers:
    """Looks prefill leaders up by incarnation. `rows` reads the watched table; poke() says it changed."""

    def __init__(self, identity: WorkerIdentity, rows: Callable[[], Iterable[RankRow]], wait: float = 1.0) -> None:
        self._identity, self._rows, self._wait = identity, rows, wait
        self._changed = asyncio.Event()

    def poke(self) -> None:
        """The rank table changed."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def find(self, endpoint: str, incarnation: int) -> RankRow:
        """The row of a prefill leader; awaited for up to `wait` seconds when it is not in the table yet.

        Raises (all leg prefill) FencedError when another incarnation serves at the endpoint or the
        fingerprint differs, UnavailableError when nobody is known there or it is LEFT,
        InvalidRequestError when the incarnation is not set.
        """
        if incarnation <= 0:
            raise InvalidRequestError("prefill.incarnation is missing", leg=Leg.DECODE, field="prefill.incarnation")
        try:
            async with asyncio.timeout(self._wait):
                while (row := self._look(endpoint, incarnation)) is None:
                    await self._changed.wait()
        except TimeoutError:
            raise self._unknown(endpoint, incarnation) from None
        if row.instance.fingerprint != self._identity.fingerprint:
            what = self._identity.difference(row.instance.fingerprint, row.instance.fingerprint_parts)
            raise FencedError(
                f"prefill {row.instance.name} has another fingerprint: {what}",
                leg=Leg.PREFILL,
                reason="FINGERPRINT_MISMATCH",
                field="fingerprint",
                peer_incarnation=incarnation,
            )
        return row

    def _look(self, endpoint: str, incarnation: int) -> RankRow | None:
        for row in self._leaders():
            if row.incarnation == incarnation and row.endpoint == endpoint:
                return row
        return None

    def _leaders(self) -> list[RankRow]:
        return [
            row
            for row in self._rows()
            if row.instance.role is Role.PREFILL and row.is_leader and row.state is not MembershipState.LEFT
        ]

    def _unknown(self, endpoint: str, incarnation: int) -> FencedError | UnavailableError:
        for row in self._leaders():
            if row.endpoint == endpoint:
                return FencedError(
                    f"prefill at {endpoint} is incarnation {row.incarnation}; incarnation {incarnation} was meant",
                    leg=Leg.PREFILL,
                    reason="INCARNATION_MISMATCH",
                    peer_incarnation=row.incarnation,
                )
        return UnavailableError(
            f"no prefill worker with incarnation {incarnation} at {endpoint} is in the rank table",
            leg=Leg.PREFILL,
            reason="PEER_UNKNOWN",
            peer_incarnation=incarnation,
        )
