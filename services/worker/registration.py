"""A worker's row in every Bootstrap.

The life of a registration, per Bootstrap and independent of the others:

1. Register the row; retry with jittered back-off for as long as nobody answers.
2. Renew the lease with the load, while the engine progresses. When it does not, let the lease lapse.
3. A lapse, a restarted or unreachable Bootstrap: register again. Sessions are never touched: a lease
   governs placement alone.
4. Refused because of a later incarnation: on_fenced when this process has held the row there (it has
   been replaced and should exit), on_outranked when it never has (a clock was set back: the worker has
   to come back with an incarnation minted above the holder's).
5. drain() tells all, again until they have heard; a Bootstrap that forgot the row learns of it as
   DRAINING. deregister() leaves all, and registers nowhere anew.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import msgspec

from engine_core.lifecycle.membership import MembershipState
from engine_core.types.errors import FencedError, Leg, NotFoundError, PdmeshError
from engine_core.types.ids import Incarnation, mint_incarnation
from pdmesh.bootstrap.v1 import bootstrap_service_pb2 as pb
from pdmesh.bootstrap.v1 import bootstrap_service_pb2_grpc
from services.runtime.channels import ChannelPool
from services.runtime.errors import from_rpc_error
from services.runtime.tasks import Backoff, TaskOwner
from services.wire.bootstrap import Load, RankRow, RowKey, row_from_proto, row_to_proto
from services.wire.common import load_to_proto

log = logging.getLogger(__name__)


class _Seat:
    """The row in one Bootstrap."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.lease_id = 0
        self.renew_every = 0.0
        self.held = False
        self.draining = False
        """True once this Bootstrap knows that the row drains."""
        self.renewed_at = 0.0


class Registration:
    """Keeps one row registered with all Bootstraps. Callbacks run on the event loop and must not block."""

    def __init__(
        self,
        bootstraps: Sequence[str],
        row: RankRow,
        channels: ChannelPool,
        *,
        healthy: Callable[[], bool],
        load: Callable[[], Load],
        on_fenced: Callable[[FencedError], None],
        on_outranked: Callable[[FencedError], None],
        ttl: float = 0.0,
        call_timeout: float = 2.0,
        rng: random.Random | None = None,
    ) -> None:
        self._row, self._channels, self._ttl = row, channels, ttl
        self._healthy, self._load = healthy, load
        self._on_fenced, self._on_outranked = on_fenced, on_outranked
        self._timeout = call_timeout
        self._rng = rng or random.Random()
        self._seats = [_Seat(endpoint) for endpoint in bootstraps]
        self._tasks = TaskOwner("registration")
        self._registered = asyncio.Event()
        self._draining = False
        self._refused = False
        self.lapses = 0
        """Leases that a Bootstrap knew no more."""

    def start(self) -> None:
        """Begins to register; returns at once."""
        for seat in self._seats:
            self._tasks.spawn(self._keep(seat), seat.endpoint)

    @property
    def leases(self) -> dict[str, int]:
        """Bootstraps that hold the row now, with the lease ids."""
        return {seat.endpoint: seat.lease_id for seat in self._seats if seat.lease_id}

    def lease_ages(self) -> tuple[tuple[str, float], ...]:
        """Bootstraps that hold the row, with the seconds since each last renewed its lease."""
        now = time.monotonic()
        return tuple((seat.endpoint, now - seat.renewed_at) for seat in self._seats if seat.lease_id)

    async def wait_registered(self, timeout: float) -> bool:
        """True once one Bootstrap holds the row; False after `timeout` seconds."""
        try:
            await asyncio.wait_for(self._registered.wait(), timeout)
        except TimeoutError:
            return False
        return True

    async def drain(self) -> None:
        """Takes the row out of placement everywhere, best effort; the leases go on being renewed."""
        self._draining = True
        await asyncio.gather(*(self._tell(seat, "Drain") for seat in self._seats if seat.lease_id))

    async def deregister(self) -> None:
        """Removes the row everywhere, best effort, and ends all renewals."""
        self._draining = True
        await self._tasks.close()
        await asyncio.gather(*(self._tell(seat, "Deregister") for seat in self._seats if seat.lease_id))
        for seat in self._seats:
            seat.lease_id = 0

    async def close(self) -> None:
        """Ends renewals without a word; the leases lapse."""
        await self._tasks.close()

    # ---- inside -----------------------------------------------------------------------------------

    async def _keep(self, seat: _Seat) -> None:
        backoff = Backoff(self._rng)
        said = ""
        while not self._refused:
            try:
                if not self._healthy():
                    wait = min(seat.renew_every or 0.2, 1.0)
                elif seat.lease_id:
                    await self._renew(seat)
                    if self._draining and not seat.draining:
                        await self._tell(seat, "Drain")
                    wait = seat.renew_every * (0.9 + 0.1 * self._rng.random())
                else:
                    await self._register(seat)
                    wait = seat.renew_every * self._rng.random()  # the first renewal spreads a restart's herd
                said = ""
                backoff.reset()
            except FencedError as exc:
                self._refuse(seat, exc)
                return
            except NotFoundError:
                seat.lease_id = 0
                self.lapses += 1
                wait = backoff.next()
            except PdmeshError as exc:
                # The lease may still stand: the next try renews it, and NOT_FOUND says when it does not.
                wait = backoff.next()
                if str(exc) != said:
                    said = str(exc)
                    log.warning("bootstrap %s: %s; trying again", seat.endpoint, exc)
            await asyncio.sleep(wait)

    async def _register(self, seat: _Seat) -> None:
        draining = self._draining
        row = msgspec.structs.replace(self._row, state=MembershipState.DRAINING) if draining else self._row
        request = pb.RegisterRankRequest(row=row_to_proto(row), ttl_seconds=self._ttl)
        try:
            response = await self._stub(seat).RegisterRank(request, timeout=self._timeout)
        except grpc.aio.AioRpcError as exc:
            raise from_rpc_error(exc, Leg.BOOTSTRAP) from exc
        seat.lease_id, seat.renew_every = response.lease_id, max(response.renew_seconds, 0.01)
        seat.held, seat.renewed_at = True, time.monotonic()
        self._registered.set()
        log.info("registered with %s for %.1f s", seat.endpoint, response.ttl_seconds)
        seat.draining = draining
        if self._draining and not seat.draining:
            await self._tell(seat, "Drain")

    async def _renew(self, seat: _Seat) -> None:
        request = pb.RenewLeaseRequest(
            lease_id=seat.lease_id, incarnation=self._row.incarnation, load=load_to_proto(self._load())
        )
        try:
            await self._stub(seat).RenewLease(request, timeout=self._timeout)
        except grpc.aio.AioRpcError as exc:
            raise from_rpc_error(exc, Leg.BOOTSTRAP) from exc
        seat.renewed_at = time.monotonic()

    async def _tell(self, seat: _Seat, what: str) -> None:
        stub, incarnation = self._stub(seat), self._row.incarnation
        try:
            if what == "Drain":
                await stub.Drain(
                    pb.DrainRequest(lease_id=seat.lease_id, incarnation=incarnation), timeout=self._timeout
                )
                seat.draining = True
            else:
                await stub.Deregister(
                    pb.DeregisterRequest(lease_id=seat.lease_id, incarnation=incarnation), timeout=self._timeout
                )
        except grpc.aio.AioRpcError as exc:
            log.warning("bootstrap %s did not take %s: %s", seat.endpoint, what, from_rpc_error(exc, Leg.BOOTSTRAP))

    def _refuse(self, seat: _Seat, exc: FencedError) -> None:
        seat.lease_id = 0
        if self._refused or exc.peer_incarnation <= self._row.incarnation:
            return  # said already, or our own late words after deregister()
        self._refused = True
        log.error("bootstrap %s: %s", seat.endpoint, exc)
        (self._on_fenced if seat.held else self._on_outranked)(exc)

    def _stub(self, seat: _Seat) -> Any:
        return bootstrap_service_pb2_grpc.BootstrapServiceStub(self._channels.get(seat.endpoint))


async def mint_above_holders(
    bootstraps: Sequence[str], key: RowKey, channels: ChannelPool, timeout: float = 2.0
) -> Incarnation:
    """A new incarnation, above that of whoever holds the row now in a Bootstrap that answers in time.

    For a start after the clock was set back, before anything has seen the incarnation.
    """

    async def holder(endpoint: str) -> int:
        stub = bootstrap_service_pb2_grpc.BootstrapServiceStub(channels.get(endpoint))
        try:
            table = await stub.GetRankTable(pb.GetRankTableRequest(), timeout=timeout)
            rows = [row_from_proto(row) for row in table.rows]
        except (grpc.aio.AioRpcError, PdmeshError):
            return 0
        return max((row.incarnation for row in rows if row.key == key), default=0)

    held = await asyncio.gather(*(holder(endpoint) for endpoint in bootstraps))
    return mint_incarnation(above=max(held, default=0))
