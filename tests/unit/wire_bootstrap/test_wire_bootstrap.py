"""Protos of bootstrap and transfer come back as they went, and nothing out of bounds passes."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from engine_core.lifecycle.machine import Move
from engine_core.lifecycle.membership import MembershipState
from engine_core.types.errors import InvalidRequestError
from engine_core.types.ids import RankCoord, SessionId
from engine_core.types.kv import GroupBlocks, KvLayout, ShardCount, ShardTicket, Ticket
from engine_core.types.request import Role
from pdmesh.bootstrap.v1 import bootstrap_service_pb2, rank_table_pb2
from pdmesh.common.v1 import identity_pb2
from pdmesh.transfer.v1 import ticket_pb2
from services.runtime.telemetry import RingEntry
from services.wire import bootstrap, common, transfer
from services.wire.bootstrap import LoadUpdate, Revision, RoomRoute, RowChange, RowLoad, Snapshot, WatchedService
from tests.support.rows import full_row, instance_spec, rank_row

TICKET = Ticket(
    5, 16, 40, (ShardTicket((0, 0, 1), (GroupBlocks(0, (3, 1)), GroupBlocks(2, ()))), ShardTicket((0, 0, 0), ()))
)


def test_rows_come_back_whole() -> None:
    row = msgspec.structs.replace(full_row(), state=MembershipState.DRAINING, revision=Revision((1 << 63) - 1, 4))
    wire = bootstrap.row_to_proto(row).SerializeToString()
    assert bootstrap.row_from_proto(rank_table_pb2.RankRow.FromString(wire)) == row
    plain = rank_row()
    assert bootstrap.row_from_proto(bootstrap.row_to_proto(plain)) == plain


@pytest.mark.parametrize(
    "event",
    [
        Snapshot(Revision(1, 2), ()),
        Snapshot(Revision(1, 2), (full_row(), rank_row())),
        RowChange(Revision(1, 3), rank_row(state=MembershipState.LEFT)),
        LoadUpdate(Revision(1, 3)),
        LoadUpdate(Revision(1, 3), (RowLoad(full_row().key, 9, full_row().load),)),
    ],
)
def test_watch_events_come_back_whole(event: bootstrap.WatchEvent) -> None:
    wire = bootstrap.event_to_proto(event).SerializeToString()
    assert bootstrap.event_from_proto(bootstrap_service_pb2.WatchRankTableResponse.FromString(wire)) == event


def test_small_things_come_back_whole() -> None:
    route = RoomRoute((1 << 63) - 1, 3, "r", "p", 1, 2, "d", 3, 4)
    assert bootstrap.route_from_proto(bootstrap.route_to_proto(route)) == route
    service = WatchedService("router", 5, "h", "127.0.0.1:8000")
    assert bootstrap.service_from_proto(bootstrap.service_to_proto(service)) == service
    assert transfer.ticket_from_proto(transfer.ticket_to_proto(TICKET)) == TICKET
    for count in (
        ShardCount((1, 0, 2), 1 << 40, 3),
        ShardCount((0, 0, 0), 1, 1, checksum=0),
        ShardCount((0, 0, 0), 1, 1, 9),
    ):
        assert transfer.shard_count_from_proto(transfer.shard_count_to_proto(count)) == count
    for role in Role:
        assert common.role_from_proto(common.role_to_proto(role)) is role
    move = Move("m", SessionId(4, 1), "A", "B", "why", 1.0, 0.5)
    sent = common.move_to_proto(RingEntry(9.5, move))
    assert (sent.unix_seconds, sent.session.room, sent.from_state, sent.to_state, sent.reason, sent.seconds) == (
        9.5, 4, "A", "B", "why", 0.5,
    )  # fmt: skip


def broken_row(change: Callable[[rank_table_pb2.RankRow], object]) -> rank_table_pb2.RankRow:
    message = bootstrap.row_to_proto(full_row())
    change(message)
    return message


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda m: m.instance.ClearField("name"), "row.instance.name"),
        (lambda m: m.instance.ClearField("role"), "row.instance.role"),
        (lambda m: m.instance.ClearField("fingerprint"), "row.instance.fingerprint"),
        (lambda m: setattr(m.instance, "name", "x" * 257), "row.instance.name"),
        (lambda m: setattr(m.instance, "dp_size", 0), "row.instance.dp_size"),
        (lambda m: setattr(m.instance, "tp_size", 4096), "row.instance"),
        (lambda m: setattr(m.coord, "dp", 2), "row.coord.dp"),
        (lambda m: setattr(m.coord, "tp", -1), "row.coord.tp"),
        (lambda m: setattr(m, "incarnation", 0), "row.incarnation"),
        (lambda m: m.ClearField("endpoint"), "row.endpoint"),
        (lambda m: setattr(m.layout.groups[0], "dtype", "int3"), "row.layout.groups[0].dtype"),
        (lambda m: setattr(m.layout, "region_bytes", 10), "row.layout.groups[0]"),
        (lambda m: setattr(m.layout.groups[0], "offset", -1), "row.layout.groups[0].offset"),
        (lambda m: setattr(m.layout.groups[0], "kv_size", 3), "row.layout.groups[0].kv_size"),
        (lambda m: setattr(m.descriptors[1], "nonce", b"x" * 257), "row.descriptors[1].nonce"),
        (lambda m: m.instance.eos_token_ids.append(-1), "row.instance.eos_token_ids"),
        (lambda m: m.instance.eos_token_ids.extend([2] * 1025), "row.instance.eos_token_ids"),
        (lambda m: m.instance.served_model_names.extend(["x"] * 65), "row.instance.served_model_names"),
        (lambda m: setattr(m, "endpoint", "x" * 513), "row.endpoint"),
        (lambda m: m.descriptors.extend([m.descriptors[0]] * 16), "row.descriptors"),
        (lambda m: setattr(m.load, "running", -1), "row.load.running"),
        (lambda m: setattr(m.load.kv, "free", -1), "row.load.kv.free"),
    ],
)
def test_a_bad_row_is_refused_by_field(change: Callable[[rank_table_pb2.RankRow], object], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        bootstrap.row_from_proto(broken_row(change))
    assert caught.value.field == field
    assert field in caught.value.message


def null_block(message: ticket_pb2.Ticket) -> None:
    message.shards[0].groups[0].block_ids[0] = 0


def twice(message: ticket_pb2.Ticket) -> None:
    message.shards[0].groups[0].block_ids[0] = 1


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (null_block, "ticket.shards[0].groups[0].block_ids"),
        (twice, "ticket.shards[0].groups[0].block_ids"),
        (lambda m: setattr(m, "first_token", 41), "ticket.first_token"),
        (lambda m: setattr(m, "num_tokens", 0), "ticket.num_tokens"),
        (lambda m: setattr(m, "link_id", 0), "ticket.link_id"),
        (lambda m: m.shards[1].CopyFrom(m.shards[0]), "ticket.shards"),
        (lambda m: setattr(m.shards[0].groups[1], "group_id", 0), "ticket.shards[0].groups"),
        (lambda m: setattr(m.shards[0].groups[1], "group_id", 64), "ticket.shards[0].groups[1].group_id"),
    ],
)
def test_a_bad_ticket_is_refused_by_field(change: Callable[[ticket_pb2.Ticket], object], field: str) -> None:
    message = transfer.ticket_to_proto(TICKET)
    change(message)
    with pytest.raises(InvalidRequestError) as caught:
        transfer.ticket_from_proto(message)
    assert caught.value.field == field


def test_rooms_and_sessions_are_positive() -> None:
    with pytest.raises(InvalidRequestError, match="session.room"):
        common.session_from_proto(identity_pb2.SessionId(room=0, attempt=0))
    with pytest.raises(InvalidRequestError, match="session.attempt"):
        common.session_from_proto(identity_pb2.SessionId(room=1, attempt=-1))
    with pytest.raises(InvalidRequestError, match=r"rooms\[1\].room"):
        bootstrap.routes_from_proto([rank_table_pb2.RoomRoute(room=1), rank_table_pb2.RoomRoute(room=-5)])
    with pytest.raises(InvalidRequestError, match="event"):
        bootstrap.event_from_proto(bootstrap_service_pb2.WatchRankTableResponse())


def test_a_layout_that_just_fits_passes() -> None:
    layout = full_row().layout
    assert isinstance(layout, KvLayout)
    group = layout.groups[0]
    exact = msgspec.structs.replace(layout, region_bytes=group.offset + group.num_blocks * group.block_bytes)
    assert transfer.layout_from_proto(transfer.layout_to_proto(exact)) == exact


def test_differing_parts_are_named() -> None:
    one = instance_spec(fingerprint="a", fingerprint_parts={"dtype": "x", "rope": "r"})
    other = instance_spec(fingerprint="b", fingerprint_parts={"dtype": "y", "rope": "r", "draft": "d"})
    assert bootstrap.differing_parts(one, other) == ("draft", "dtype")
    assert bootstrap.differing_parts(one, one) == ()
    assert bootstrap.differing_parts(one, instance_spec(fingerprint="z", fingerprint_parts=one.fingerprint_parts)) == (
        "fingerprint",
    )


def test_leaders_are_told_from_followers() -> None:
    spec = instance_spec(dp_size=2, tp_size=2)
    assert rank_row(spec=spec, coord=RankCoord(dp=1)).is_leader
    assert not rank_row(spec=spec, coord=RankCoord(dp=1, tp=1)).is_leader
