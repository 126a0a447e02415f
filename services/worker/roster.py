"""What a process knows of the mesh: one table per Bootstrap, merged.

Merging, by row: the latest incarnation counts. Among the tables that name it, DRAINING wins (it is the
worker's own word), then READY if any table says so, then JOINING, then LOST.

Old rows are kept. When a Bootstrap starts a new life, the rows of its former one stay for one TTL, until
the workers have registered again. When contact is lost, all its rows stay; after one TTL without contact
they count as LOST, which are tried last: with every Bootstrap gone, known workers go on being used.

Roster is pure; RosterWatcher feeds it from WatchRankTable.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import grpc
import msgspec

from engine_core.lifecycle.membership import MembershipState
from engine_core.types.errors import InvalidRequestError, Leg
from engine_core.types.request import Role
from pdmesh.bootstrap.v1 import bootstrap_service_pb2 as pb
from pdmesh.bootstrap.v1 import bootstrap_service_pb2_grpc
from services.runtime.channels import ChannelPool
from services.runtime.errors import from_rpc_error
from services.runtime.tasks import Backoff, TaskOwner
from services.wire.bootstrap import (
    LoadUpdate,
    RankRow,
    Revision,
    RowKey,
    Snapshot,
    WatchedService,
    WatchEvent,
    event_from_proto,
    revision_to_proto,
    service_to_proto,
)

log = logging.getLogger(__name__)
T = TypeVar("T")

_RANK = {
    MembershipState.DRAINING: 3,
    MembershipState.READY: 2,
    MembershipState.JOINING: 1,
    MembershipState.LOST: 0,
}


class _Table:
    """One Bootstrap's table as last seen."""

    __slots__ = ("former", "former_until", "lost_at", "revision", "rows", "stale")

    def __init__(self) -> None:
        self.revision: Revision | None = None
        self.rows: dict[RowKey, RankRow] = {}
        self.former: dict[RowKey, RankRow] = {}
        """Rows of the Bootstrap's former life, until `former_until`."""
        self.former_until = 0.0
        self.lost_at: float | None = 0.0
        """When contact was lost; None while there is contact."""
        self.stale = False
        """Contact was lost a TTL ago: rows count as LOST."""


class Roster:
    """Pure: events in, rows out. `ttl` is a lease's length in seconds; `now` any forward clock."""

    def __init__(self, bootstraps: Sequence[str], ttl: float = 15.0) -> None:
        self._ttl = ttl
        self._tables = {bootstrap: _Table() for bootstrap in bootstraps}
        self._merged: dict[RowKey, RankRow] = {}
        self._ordered: list[RankRow] | None = []
        self._version = 0

    @property
    def version(self) -> int:
        """Counts changes of the merged rows, loads excluded."""
        return self._version

    @property
    def revision(self) -> Revision | None:
        """The revision of the latest table that there is contact with, or was; None before the first."""
        known = [table for table in self._tables.values() if table.revision is not None]
        live = [table for table in known if table.lost_at is None] or known
        return max((table.revision for table in live if table.revision is not None), default=None)

    @property
    def synced(self) -> bool:
        """True once any table has been read."""
        return any(table.revision is not None for table in self._tables.values())

    @property
    def in_contact(self) -> bool:
        """True while any watch is up."""
        return any(table.lost_at is None for table in self._tables.values())

    def contact(self, bootstrap: str) -> bool:
        """True while the watch of this Bootstrap is up."""
        return self._tables[bootstrap].lost_at is None

    def resume_after(self, bootstrap: str) -> Revision | None:
        """What to resume this Bootstrap's watch after."""
        return self._tables[bootstrap].revision

    # ---- reading ----------------------------------------------------------------------------------

    def rows(self, role: Role | None = None) -> list[RankRow]:
        """All rows (of a role), ordered by key."""
        if self._ordered is None:
            self._ordered = [self._merged[key] for key in sorted(self._merged)]
        return [row for row in self._ordered if role is None or row.instance.role is role]

    def get(self, key: RowKey) -> RankRow | None:
        """One row as it is now."""
        return self._merged.get(key)

    def leaders(self, role: Role) -> list[RankRow]:
        """Rows of a role that requests can be sent to, in whatever state."""
        return [row for row in self.rows(role) if row.is_leader]

    def ready(self, role: Role) -> list[RankRow]:
        """Leaders to place on: the READY ones; only when there are none, the LOST ones."""
        leaders = self.leaders(role)
        ready = [row for row in leaders if row.state is MembershipState.READY]
        return ready or [row for row in leaders if row.state is MembershipState.LOST]

    def find(self, endpoint: str, incarnation: int = 0) -> RankRow | None:
        """The leader at an endpoint, of that incarnation unless it is 0. An endpoint that two rows name
        belongs to the later incarnation."""
        found = [
            row
            for row in self._merged.values()
            if row.is_leader and row.endpoint == endpoint and incarnation in (0, row.incarnation)
        ]
        return max(found, key=lambda row: row.incarnation, default=None)

    def find_incarnation(self, incarnation: int) -> RankRow | None:
        """The leader that is this life of a process."""
        return next((row for row in self._merged.values() if row.is_leader and row.incarnation == incarnation), None)

    def others_serve(self, fingerprint: str, without: int) -> bool:
        """True when a pair, or a MIXED instance, of that fingerprint is there besides the incarnation `without`.

        READY rows count; with every Bootstrap silent, LOST ones too: they are most likely as alive as before.
        """
        states = {MembershipState.READY} if self.in_contact else {MembershipState.READY, MembershipState.LOST}
        roles = {
            row.instance.role
            for row in self._merged.values()
            if row.is_leader
            and row.state in states
            and row.instance.fingerprint == fingerprint
            and row.incarnation != without
        }
        return Role.MIXED in roles or {Role.PREFILL, Role.DECODE} <= roles

    # ---- writing ----------------------------------------------------------------------------------

    def apply(self, bootstrap: str, event: WatchEvent, now: float) -> bool:
        """Takes one event of a Bootstrap's watch; True when rows changed (loads don't count)."""
        table = self._tables[bootstrap]
        table.lost_at = None
        touched: set[RowKey] | None = None
        if isinstance(event, LoadUpdate):
            touched = set()
            for load in event.loads:
                row = table.rows.get(load.key)
                if row is not None and row.incarnation == load.incarnation:
                    table.rows[load.key] = msgspec.structs.replace(row, load=load.load)
                    touched.add(load.key)
        elif isinstance(event, Snapshot):
            if table.revision is not None and table.revision.table_epoch != event.revision.table_epoch:
                table.former, table.former_until = {**table.former, **table.rows}, now + self._ttl
            table.rows = {row.key: row for row in event.rows}
            for row in event.rows:
                self._supersede(table, row)
        elif event.row.state is MembershipState.LEFT:
            touched = {event.row.key}
            table.rows.pop(event.row.key, None)
            self._supersede(table, event.row)
        else:
            touched = {event.row.key}
            table.rows[event.row.key] = event.row
            self._supersede(table, event.row)
        table.revision = event.revision
        return self._merge(now, touched)

    def contact_lost(self, bootstrap: str, now: float) -> bool:
        """The watch broke; True when rows changed."""
        table = self._tables[bootstrap]
        if table.lost_at is None:
            table.lost_at = now
        return self._merge(now, set())

    def expire(self, now: float) -> bool:
        """Drops and demotes what has had its time; True when rows changed."""
        return self._merge(now, set())

    def _supersede(self, table: _Table, row: RankRow) -> None:
        """A former row is over once its worker, or a later one, is back; JOINING is not back yet."""
        former = table.former.get(row.key)
        if former is None or row.incarnation < former.incarnation:
            return
        if row.incarnation > former.incarnation or row.state is not MembershipState.JOINING:
            del table.former[row.key]

    def _merge(self, now: float, touched: set[RowKey] | None) -> bool:
        """Merges the rows of these keys anew; all of them for None, or when a table's time has come."""
        if self._age(now) or touched is None:
            tables = self._tables.values()
            touched = self._merged.keys() | {key for t in tables for rows in (t.rows, t.former) for key in rows}
        changed = False
        for key in touched:
            before, best = self._merged.get(key), self._best(key)
            if best is None:
                self._merged.pop(key, None)
            else:
                self._merged[key] = best
            changed |= (best and _identity(best)) != (before and _identity(before))
        if touched:
            self._ordered = None
        self._version += changed
        return changed

    def _age(self, now: float) -> bool:
        """Forgets former lives that had their time, marks tables without contact; True when any was."""
        aged = False
        for table in self._tables.values():
            if table.former and now >= table.former_until:
                table.former, aged = {}, True
            stale = table.lost_at is not None and now - table.lost_at >= self._ttl
            if stale != table.stale:
                table.stale, aged = stale, True
        return aged

    def _best(self, key: RowKey) -> RankRow | None:
        best: RankRow | None = None
        for table in self._tables.values():
            for row in (table.rows.get(key), table.former.get(key)):
                if row is None:
                    continue
                demoted = table.stale and row.state is not MembershipState.DRAINING
                seen = msgspec.structs.replace(row, state=MembershipState.LOST) if demoted else row
                best = _better(best, seen)
        return best


def _better(one: RankRow | None, other: RankRow) -> RankRow:
    if one is None:
        return other
    return max(one, other, key=lambda row: (row.incarnation, _RANK[row.state], row.revision))


def _identity(row: RankRow) -> tuple[object, ...]:
    """What makes a change: everything but load, and revisions, which differ between tables."""
    return (row.incarnation, row.state, row.endpoint, row.engine_pid, row.instance, row.layout, row.descriptors)


class RosterWatcher:
    """Keeps a Roster by watching every Bootstrap; resumes where a watch broke. One event loop only.

    Without `loads` the rows keep the load that they were first seen with: for processes that place nothing.
    """

    def __init__(
        self,
        bootstraps: Sequence[str],
        service: WatchedService,
        channels: ChannelPool,
        *,
        ttl: float = 15.0,
        loads: bool = True,
        first_timeout: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self.roster = Roster(bootstraps, ttl)
        self._bootstraps, self._service, self._channels = tuple(bootstraps), service, channels
        self._ttl, self._loads, self._first_timeout, self._clock = ttl, loads, first_timeout, clock
        self._rng = rng or random.Random()
        self._tasks = TaskOwner("roster")
        self._pulse = asyncio.Event()
        self._callbacks: list[Callable[[], None]] = []

    def start(self) -> None:
        """Begins to watch; returns at once."""
        for bootstrap in self._bootstraps:
            self._tasks.spawn(self._follow(bootstrap), f"watch {bootstrap}")
        self._tasks.spawn(self._expire(), "expire")

    async def close(self) -> None:
        """Ends all watches."""
        await self._tasks.close()

    @property
    def changed(self) -> asyncio.Event:
        """Set at the next change of rows; each change has a new event."""
        return self._pulse

    def on_change(self, callback: Callable[[], None]) -> None:
        """Calls back after each change of rows, on the event loop."""
        self._callbacks.append(callback)

    async def wait_for(self, look: Callable[[Roster], T | None], timeout: float) -> T | None:
        """What `look` finds, now or after a change within `timeout` seconds; else None."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while True:
            pulse = self._pulse
            found = look(self.roster)
            remaining = deadline - loop.time()
            if found is not None or remaining <= 0:
                return found
            try:
                await asyncio.wait_for(pulse.wait(), remaining)
            except TimeoutError:
                continue  # one last look

    async def wait_synced(self, timeout: float) -> bool:
        """True once any Bootstrap's table has been read."""
        return bool(await self.wait_for(lambda roster: roster.synced or None, timeout))

    # ---- inside -----------------------------------------------------------------------------------

    async def _follow(self, bootstrap: str) -> None:
        backoff = Backoff(self._rng, 1.0)
        said = ""
        while True:
            try:
                with self._channels.use(bootstrap) as channel:
                    await self._watch(bootstrap, channel, backoff)
                problem = "the watch ended"
            except grpc.aio.AioRpcError as exc:
                problem = str(from_rpc_error(exc, Leg.BOOTSTRAP))
            except TimeoutError:
                problem = f"no answer within {self._first_timeout:.1f} s"
            self._note(self.roster.contact_lost(bootstrap, self._clock()))
            if problem != said:
                said = problem
                log.warning("bootstrap %s: %s; keeping what is known", bootstrap, problem)
            await asyncio.sleep(backoff.next())

    async def _watch(self, bootstrap: str, channel: grpc.aio.Channel, backoff: Backoff) -> None:
        after = self.roster.resume_after(bootstrap)
        request = pb.WatchRankTableRequest(
            after=None if after is None else revision_to_proto(after),
            watcher=service_to_proto(self._service),
            without_loads=not self._loads,
        )
        # No deadline on the whole: the channel's keepalive ends the watch of a Bootstrap that is gone.
        call = bootstrap_service_pb2_grpc.BootstrapServiceStub(channel).WatchRankTable(request)
        try:
            message = await asyncio.wait_for(call.read(), self._first_timeout)
            while message is not grpc.aio.EOF:  # type: ignore[attr-defined]  # missing in the stubs
                backoff.reset()
                self._take(bootstrap, message)
                message = await call.read()
        finally:
            call.cancel()

    def _take(self, bootstrap: str, message: pb.WatchRankTableResponse) -> None:
        synced = self.roster.synced
        try:
            event = event_from_proto(message)
        except InvalidRequestError as exc:
            log.error("bootstrap %s sent what cannot be read, skipped: %s", bootstrap, exc)
            return
        changed = self.roster.apply(bootstrap, event, self._clock())
        self._note(changed or not synced)

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self._ttl / 4))
            self._note(self.roster.expire(self._clock()))

    def _note(self, changed: bool) -> None:  # noqa: FBT001  # what the roster's methods return
        if not changed:
            return
        pulse, self._pulse = self._pulse, asyncio.Event()
        pulse.set()
        for callback in self._callbacks:
            callback()
