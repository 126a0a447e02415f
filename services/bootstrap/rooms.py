"""Rooms: where each really ran, and where one should run for callers that keep no table."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import msgspec

from engine_core.lifecycle.membership import MembershipState
from engine_core.types.errors import Leg, UnavailableError
from engine_core.types.request import Role
from services.wire.bootstrap import RankRow, RoomRoute, differing_parts


class RoomBook:
    """The last `kept` rooms that were recorded, by room and by request id."""

    def __init__(self, kept: int = 100_000) -> None:
        self._kept = kept
        self._routes: OrderedDict[int, RoomRoute] = OrderedDict()
        self._by_request: dict[str, dict[int, None]] = {}

    def __len__(self) -> int:
        return len(self._routes)

    def record(self, routes: Iterable[RoomRoute]) -> None:
        """Stores routes; a lower attempt than the recorded one is ignored."""
        for route in routes:
            old = self._routes.get(route.room)
            if old is not None and route.attempt < old.attempt:
                continue
            if old is not None:
                self._forget(old)
            self._routes[route.room] = route
            if route.request_id:
                self._by_request.setdefault(route.request_id, {})[route.room] = None
            if len(self._routes) > self._kept:
                self._forget(next(iter(self._routes.values())))

    def get(self, room: int) -> RoomRoute | None:
        """The recorded route of a room."""
        return self._routes.get(room)

    def lookup(self, rooms: Iterable[int], request_ids: Iterable[str] = ()) -> list[RoomRoute]:
        """Known routes of rooms and requests, each once; a request with several samples has several."""
        wanted = dict.fromkeys(rooms)
        for request_id in request_ids:
            wanted.update(self._by_request.get(request_id, {}))
        return [self._routes[room] for room in wanted if room in self._routes]

    def _forget(self, route: RoomRoute) -> None:
        del self._routes[route.room]
        rooms = self._by_request.get(route.request_id)
        if rooms is not None:
            rooms.pop(route.room, None)
            if not rooms:
                del self._by_request[route.request_id]


class Routed(msgspec.Struct, frozen=True):
    """Where a room should run; `prefill` is None for a MIXED instance."""

    route: RoomRoute
    recorded: bool
    prefill: RankRow | None
    decode: RankRow


def route_room(room: int, book: RoomBook, rows: Sequence[RankRow]) -> Routed:
    """The recorded route while both its workers are there in the same life; else room modulo instances.

    Computed routes take READY leaders of one fingerprint, LOST ones when a role has no other; a PD pair
    goes before a MIXED instance. Raises UnavailableError that says what is missing.
    """
    recorded = book.get(room)
    if recorded is not None:
        routed = _recorded(recorded, rows)
        if routed is not None:
            return routed
    by_role = {role: _candidates(rows, role) for role in Role}
    prefills, decodes, mixed = by_role[Role.PREFILL], by_role[Role.DECODE], by_role[Role.MIXED]
    prints = sorted(
        {row.instance.fingerprint for row in prefills} & {row.instance.fingerprint for row in decodes}
    )  # the first one, so that every caller gets the same answer
    if prints:
        prefill, decode = _choose(room, prefills, prints[0]), _choose(room, decodes, prints[0])
        return Routed(_route(room, prefill, decode), recorded=False, prefill=prefill, decode=decode)
    if mixed:
        decode = _choose(room, mixed, min(row.instance.fingerprint for row in mixed))
        return Routed(_route(room, None, decode), recorded=False, prefill=None, decode=decode)
    raise UnavailableError(_what_is_missing(prefills, decodes), leg=Leg.BOOTSTRAP, retry_after=1.0)


def _candidates(rows: Sequence[RankRow], role: Role) -> list[RankRow]:
    leaders = [row for row in rows if row.instance.role is role and row.is_leader]
    ready = [row for row in leaders if row.state is MembershipState.READY]
    return ready or [row for row in leaders if row.state is MembershipState.LOST]


def _choose(room: int, rows: Sequence[RankRow], fingerprint: str) -> RankRow:
    """Instance by room modulo instances, then the DP rank by what is left of the room."""
    fitting = sorted((row for row in rows if row.instance.fingerprint == fingerprint), key=lambda row: row.key)
    names = sorted({row.instance.name for row in fitting})
    leaders = [row for row in fitting if row.instance.name == names[room % len(names)]]
    return leaders[room // len(names) % len(leaders)]


def _route(room: int, prefill: RankRow | None, decode: RankRow) -> RoomRoute:
    return RoomRoute(
        room=room,
        prefill_instance="" if prefill is None else prefill.instance.name,
        prefill_dp=0 if prefill is None else prefill.coord.dp,
        prefill_incarnation=0 if prefill is None else prefill.incarnation,
        decode_instance=decode.instance.name,
        decode_dp=decode.coord.dp,
        decode_incarnation=decode.incarnation,
    )


def _recorded(route: RoomRoute, rows: Sequence[RankRow]) -> Routed | None:
    leaders = {(row.instance.name, row.coord.dp, row.incarnation): row for row in rows if row.is_leader}
    decode = leaders.get((route.decode_instance, route.decode_dp, route.decode_incarnation))
    prefill = leaders.get((route.prefill_instance, route.prefill_dp, route.prefill_incarnation))
    if decode is None or (prefill is None and route.prefill_instance):
        return None
    return Routed(route, recorded=True, prefill=prefill, decode=decode)


def _what_is_missing(prefills: Sequence[RankRow], decodes: Sequence[RankRow]) -> str:
    if prefills and decodes:
        parts = sorted({part for p in prefills for d in decodes for part in differing_parts(p.instance, d.instance)})
        return f"no prefill and decode instance fit together: they differ in {', '.join(parts)}"
    missing = [role.value for role, rows in ((Role.PREFILL, prefills), (Role.DECODE, decodes)) if not rows]
    return f"no {' and no '.join(missing)} instance is registered"
