"""Rooms: recorded, looked up, routed."""

from __future__ import annotations

import pytest

from engine_core.lifecycle.membership import MembershipState
from engine_core.types.errors import UnavailableError
from engine_core.types.ids import RankCoord
from engine_core.types.request import Role
from services.bootstrap.rooms import RoomBook, route_room
from services.wire.bootstrap import RankRow, RoomRoute
from tests.support.rows import instance_spec, rank_row

READY, LOST = MembershipState.READY, MembershipState.LOST


def worker(name: str, role: Role, incarnation: int, state: MembershipState = READY, fingerprint: str = "fp") -> RankRow:
    parts = {"dtype": fingerprint, "rope": "same"}
    spec = instance_spec(name, role, fingerprint, fingerprint_parts=parts)
    return rank_row(spec=spec, name=name, incarnation=incarnation, state=state)


def test_rooms_are_bounded_and_read_in_bulk() -> None:
    book = RoomBook(kept=3)
    book.record([RoomRoute(1, request_id="a"), RoomRoute(2, request_id="b"), RoomRoute(3, request_id="b")])
    assert [route.room for route in book.lookup([9, 3], ["b", "nobody"])] == [3, 2]
    book.record([RoomRoute(1, attempt=1, request_id="a", decode_instance="d1"), RoomRoute(4)])
    assert len(book) == 3
    assert [route.room for route in book.lookup([1, 2, 3, 4])] == [1, 3, 4]
    assert [route.room for route in book.lookup([], ["b"])] == [3]
    book.record([RoomRoute(1, attempt=0, request_id="a", decode_instance="late")])
    assert [(route.attempt, route.decode_instance) for route in book.lookup([1])] == [(1, "d1")]


def test_room_modulo_ready_instances_per_role() -> None:
    rows = [worker(f"p{i}", Role.PREFILL, 10 + i) for i in range(2)] + [
        worker(f"d{i}", Role.DECODE, 20 + i) for i in range(3)
    ]
    got = []
    for room in range(1, 7):
        routed = route_room(room, RoomBook(), rows)
        assert not routed.recorded
        assert routed.prefill is not None
        got.append((routed.prefill.instance.name, routed.decode.instance.name))
        assert routed.route == RoomRoute(
            room, 0, "", routed.prefill.instance.name, 0, routed.prefill.incarnation,
            routed.decode.instance.name, 0, routed.decode.incarnation,
        )  # fmt: skip
    assert got == [("p1", "d1"), ("p0", "d2"), ("p1", "d0"), ("p0", "d1"), ("p1", "d2"), ("p0", "d0")]


def test_dp_ranks_of_an_instance_share_its_rooms() -> None:
    spec = instance_spec("m", Role.MIXED, dp_size=2, tp_size=2)
    rows = [rank_row(spec=spec, coord=RankCoord(dp, 0, tp), state=READY) for dp in range(2) for tp in range(2)]
    assert [route_room(room, RoomBook(), rows).decode.coord for room in (2, 3)] == [RankCoord(0), RankCoord(1)]


def test_pairs_have_one_fingerprint_and_lost_rows_come_last() -> None:
    rows = [
        worker("p0", Role.PREFILL, 1, fingerprint="a"),
        worker("p1", Role.PREFILL, 2, fingerprint="b"),
        worker("d0", Role.DECODE, 3, fingerprint="b"),
    ]
    routed = route_room(2, RoomBook(), rows)
    assert routed.prefill is not None
    assert (routed.prefill.instance.name, routed.decode.instance.name) == ("p1", "d0")
    with pytest.raises(UnavailableError, match="differ in dtype$"):
        route_room(2, RoomBook(), [rows[0], rows[2]])
    with pytest.raises(UnavailableError, match="no DECODE instance"):
        route_room(2, RoomBook(), rows[:2])
    lost = [worker("d0", Role.DECODE, 3, LOST), worker("d1", Role.DECODE, 4), worker("p0", Role.PREFILL, 1, LOST)]
    for room in (2, 3):
        routed = route_room(room, RoomBook(), lost)
        assert routed.prefill is not None
        assert (routed.prefill.instance.name, routed.decode.instance.name) == ("p0", "d1")


def test_a_recorded_route_counts_while_both_its_workers_live() -> None:
    rows = [worker("p0", Role.PREFILL, 1), worker("d0", Role.DECODE, 2), worker("d1", Role.DECODE, 3)]
    book = RoomBook()
    recorded = RoomRoute(4, 1, "r", "p0", 0, 1, "d1", 0, 3)
    book.record([recorded])
    routed = route_room(4, book, rows)
    assert (routed.recorded, routed.route, routed.decode.instance.name) == (True, recorded, "d1")
    restarted = [*rows[:2], worker("d1", Role.DECODE, 30)]
    routed = route_room(4, book, restarted)
    assert (routed.recorded, routed.decode.instance.name) == (False, "d0")


def test_a_mixed_instance_serves_alone() -> None:
    mixed = worker("m", Role.MIXED, 5)
    routed = route_room(1, RoomBook(), [mixed])
    assert (routed.prefill, routed.decode, routed.route.prefill_instance) == (None, mixed, "")
    book = RoomBook()
    book.record([routed.route])
    assert route_room(1, book, [mixed]).recorded
    with pytest.raises(UnavailableError, match="no PREFILL and no DECODE"):
        route_room(1, RoomBook(), [])
