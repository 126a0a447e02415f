"""BootstrapService over a RankTable and a RoomBook.

Watchers keep a cursor into the table's change log instead of a queue of their own: one that reads
slowly costs no memory, and once the log has moved on without it, it gets a snapshot.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from typing import Any

from engine_core.types.errors import InvalidRequestError, UnavailableError
from pdmesh.bootstrap.v1 import bootstrap_service_pb2 as pb
from pdmesh.bootstrap.v1 import bootstrap_service_pb2_grpc
from services.bootstrap.rank_table import RankTable
from services.bootstrap.rooms import RoomBook, route_room
from services.wire.bootstrap import (
    MAX_REQUEST_ID,
    MAX_ROOMS,
    LoadUpdate,
    Revision,
    RowChange,
    Snapshot,
    WatchedService,
    WatchEvent,
    event_to_proto,
    peer_to_proto,
    revision_from_proto,
    revision_to_proto,
    route_to_proto,
    routes_from_proto,
    row_from_proto,
    row_to_proto,
    service_from_proto,
    service_to_proto,
    spec_from_proto,
)
from services.wire.common import checked_int, checked_size, checked_text, load_from_proto

log = logging.getLogger(__name__)

SERVICE_NAME = "pdmesh.bootstrap.v1.BootstrapService"
LOAD_INTERVAL = 1.0
"""Loads are sent to watchers at most this often, in seconds."""


_MESSAGES_KEPT = 256
_BEHIND = 32
"""Changes that a watcher is sent one by one, at least."""
_ROWS_PER_MESSAGE = 64
"""Rows of a snapshot that cost about as much as a message of their own."""


class _Watch:
    """One watch stream: who, how far it has read, and a flag that there may be more."""

    def __init__(self, service: WatchedService, *, loads: bool = True) -> None:
        self.service, self.loads = service, loads
        self.wake = asyncio.Event()
        self.seen: Revision | None = None
        self.load_seq = 0


class _Messages:
    """Events as messages, made once for all watchers: what goes to one mostly goes to all."""

    def __init__(self) -> None:
        self._made: OrderedDict[int, tuple[WatchEvent, pb.WatchRankTableResponse]] = OrderedDict()

    def of(self, event: WatchEvent) -> pb.WatchRankTableResponse:
        """The message of an event; one object for events of one row, or for one event."""
        key = id(event.row if isinstance(event, RowChange) else event)  # which the entry keeps alive
        made = self._made.get(key)
        if made is None:
            made = self._made[key] = (event, event_to_proto(event))
            if len(self._made) > _MESSAGES_KEPT:
                self._made.popitem(last=False)
        return made[1]


class BootstrapServicer(bootstrap_service_pb2_grpc.BootstrapServiceServicer):
    """The service. Its owner also runs expire_forever() and publish_loads_forever() as tasks."""

    def __init__(
        self,
        table: RankTable,
        rooms: RoomBook,
        me: WatchedService,
        clock: Callable[[], float],
        *,
        load_interval: float = LOAD_INTERVAL,
    ) -> None:
        self._table, self._rooms, self._me, self._clock = table, rooms, me, clock
        self._load_interval = load_interval
        self._watches: set[_Watch] = set()
        self._messages = _Messages()
        self._last_loads: tuple[tuple[int, int, Revision], LoadUpdate] | None = None
        self._last_snapshot: tuple[tuple[int, Revision], Snapshot] | None = None
        self._woken: Revision | None = None
        self._published_loads = 0
        self._timer = asyncio.Event()
        self._closing = False

    def introduce(self, me: WatchedService) -> None:
        """What is told of this process from now on."""
        self._me = me

    @property
    def watchers(self) -> int:
        """Open watch streams."""
        return len(self._watches)

    def close(self) -> None:
        """Ends all watches; watchers see UNAVAILABLE and come back to the next life."""
        self._closing = True
        self._wake_all()

    async def expire_forever(self) -> None:
        """Lets leases lapse on time."""
        while True:
            self._timer.clear()
            self._table.expire(self._clock())
            self._wake_stale()  # a refused call may have moved rows too
            wait = self._table.next_due - self._clock()
            try:
                await asyncio.wait_for(self._timer.wait(), None if math.isinf(wait) else max(wait, 0.001))
            except TimeoutError:
                continue

    async def publish_loads_forever(self) -> None:
        """Sends reported loads on to the watchers, together and not too often."""
        while True:
            await asyncio.sleep(self._load_interval)
            if self._table.load_seq != self._published_loads:
                self._published_loads = self._table.load_seq
                self._wake_all()

    # ---- leases -----------------------------------------------------------------------------------

    async def RegisterInstance(self, request: pb.RegisterInstanceRequest, context: Any) -> pb.RegisterInstanceResponse:
        """Announces an instance."""
        incarnation = checked_int(request.incarnation, "incarnation", 1)
        revision = self._table.register_instance(spec_from_proto(request.instance), incarnation, self._clock())
        self._changed()
        return pb.RegisterInstanceResponse(revision=revision_to_proto(revision))

    async def RegisterRank(self, request: pb.RegisterRankRequest, context: Any) -> pb.RegisterRankResponse:
        """Puts a row under a lease."""
        row = row_from_proto(request.row)
        if math.isnan(request.ttl_seconds):  # would never lapse
            raise InvalidRequestError("ttl_seconds is no number", field="ttl_seconds")
        grant = self._table.register_rank(row, request.ttl_seconds, self._clock())
        self._changed()
        log.info("%s %s rank %s registered at %s", row.instance.role, row.instance.name, row.coord, row.endpoint)
        return pb.RegisterRankResponse(
            lease_id=grant.lease_id,
            ttl_seconds=grant.ttl,
            renew_seconds=grant.renew,
            revision=revision_to_proto(grant.revision),
        )

    async def RenewLease(self, request: pb.RenewLeaseRequest, context: Any) -> pb.RenewLeaseResponse:
        """Keeps a row."""
        load = load_from_proto(request.load) if request.HasField("load") else None
        ttl = self._table.renew(request.lease_id, request.incarnation, load, self._clock())
        self._changed()
        return pb.RenewLeaseResponse(ttl_seconds=ttl)

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainResponse:
        """Takes a row out of placement."""
        revision = self._table.drain(request.lease_id, request.incarnation, self._clock())
        self._changed()
        return pb.DrainResponse(revision=revision_to_proto(revision))

    async def Deregister(self, request: pb.DeregisterRequest, context: Any) -> pb.DeregisterResponse:
        """Removes a row."""
        revision = self._table.deregister(request.lease_id, request.incarnation, self._clock())
        self._changed()
        return pb.DeregisterResponse(revision=revision_to_proto(revision))

    # ---- reading ----------------------------------------------------------------------------------

    async def GetRankTable(self, request: pb.GetRankTableRequest, context: Any) -> pb.GetRankTableResponse:
        """The table, and the processes that watch it, each once."""
        self._table.expire(self._clock())
        self._changed()
        services = dict.fromkeys([self._me, *(watch.service for watch in self._watches if watch.service.name)])
        return pb.GetRankTableResponse(
            revision=revision_to_proto(self._table.revision),
            rows=[row_to_proto(row) for row in self._table.rows()],
            services=[
                service_to_proto(service)
                for service in sorted(services, key=lambda service: (service.name, service.host, service.pid))
            ],
        )

    async def WatchRankTable(
        self, request: pb.WatchRankTableRequest, context: Any
    ) -> AsyncIterator[pb.WatchRankTableResponse]:
        """Follows the table. The first message comes at once, an empty load update when nothing changed."""
        watch = _Watch(service_from_proto(request.watcher), loads=not request.without_loads)
        if request.HasField("after"):
            watch.seen = revision_from_proto(request.after, "after")
        self._watches.add(watch)
        try:
            first = True
            while not self._closing:
                watch.wake.clear()
                events = self._events_for(watch)
                if first and not events:
                    events = [LoadUpdate(self._table.revision)]
                first = False
                for event in events:
                    yield self._messages.of(event)
                await watch.wake.wait()  # bounded by keepalive: a dead peer ends the call
            raise UnavailableError("bootstrap is stopping")
        finally:
            self._watches.discard(watch)

    def _events_for(self, watch: _Watch) -> list[WatchEvent]:
        changes = None if watch.seen is None else self._table.changes_after(watch.seen)
        if changes is not None and len(changes) > max(_BEHIND, len(self._table) // _ROWS_PER_MESSAGE):
            changes = None  # one snapshot costs less, and so a crowd of changes can't bury the watchers
        events: list[WatchEvent]
        if changes is None:
            events = [self._snapshot()]
            watch.load_seq = self._table.load_seq
        else:
            events = list(changes)
        watch.seen = self._table.revision
        if watch.loads and watch.load_seq < self._published_loads:
            events.append(self._loads_since(watch.load_seq))
            watch.load_seq = self._table.load_seq
        return events

    def _snapshot(self) -> Snapshot:
        """One object for all that ask at the same state of the table: after a restart, that is everybody."""
        key = (self._table.load_seq, self._table.revision)
        if self._last_snapshot is None or self._last_snapshot[0] != key:
            self._last_snapshot = (key, self._table.snapshot())
        return self._last_snapshot[1]

    def _loads_since(self, seq: int) -> LoadUpdate:
        """One object for all watchers that have read as far."""
        key = (seq, self._table.load_seq, self._table.revision)
        if self._last_loads is None or self._last_loads[0] != key:
            self._last_loads = (key, LoadUpdate(self._table.revision, self._table.loads_after(seq)))
        return self._last_loads[1]

    # ---- rooms ------------------------------------------------------------------------------------

    async def RecordRooms(self, request: pb.RecordRoomsRequest, context: Any) -> pb.RecordRoomsResponse:
        """Stores where rooms ran."""
        self._rooms.record(routes_from_proto(request.rooms))
        return pb.RecordRoomsResponse()

    async def LookupRooms(self, request: pb.LookupRoomsRequest, context: Any) -> pb.LookupRoomsResponse:
        """Reads where rooms ran."""
        checked_size(request.rooms, "rooms", MAX_ROOMS)
        checked_size(request.request_ids, "request_ids", MAX_ROOMS)
        for i, request_id in enumerate(request.request_ids):
            checked_text(request_id, f"request_ids[{i}]", MAX_REQUEST_ID)
        found = self._rooms.lookup(request.rooms, request.request_ids)
        return pb.LookupRoomsResponse(rooms=[route_to_proto(route) for route in found])

    async def RouteRoom(self, request: pb.RouteRoomRequest, context: Any) -> pb.RouteRoomResponse:
        """Answers callers that keep no table."""
        self._table.expire(self._clock())
        self._changed()
        routed = route_room(checked_int(request.room, "room", 1), self._rooms, self._table.rows())
        return pb.RouteRoomResponse(
            route=route_to_proto(routed.route),
            recorded=routed.recorded,
            prefill=None if routed.prefill is None else peer_to_proto(routed.prefill),
            decode=peer_to_proto(routed.decode),
        )

    # ---- inside -----------------------------------------------------------------------------------

    def _changed(self) -> None:
        """Tells watchers when the table moved, and the timer that the next lapse may be nearer."""
        self._wake_stale()
        self._timer.set()

    def _wake_stale(self) -> None:
        revision = self._table.revision
        if revision == self._woken:
            return
        self._woken = revision
        for watch in self._watches:
            if watch.seen != revision:
                watch.wake.set()

    def _wake_all(self) -> None:
        for watch in self._watches:
            watch.wake.set()
