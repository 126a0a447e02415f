"""pdmesh.bootstrap.v1: rows, revisions, rooms, and what a watch says."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine_core.lifecycle.membership import MembershipState
from engine_core.types.errors import InvalidRequestError
from engine_core.types.ids import RankCoord
from engine_core.types.kv import KvLayout, TransferDescriptor
from engine_core.types.request import Role
from pdmesh.bootstrap.v1 import bootstrap_service_pb2, rank_table_pb2
from pdmesh.common.v1 import identity_pb2
from services.wire.common import (
    MAX_ENDPOINT,
    MAX_INT32,
    MAX_PARALLEL,
    Load,
    checked_int,
    checked_size,
    checked_text,
    coord_from_proto,
    coord_to_proto,
    load_from_proto,
    load_to_proto,
    role_from_proto,
    role_to_proto,
)
from services.wire.transfer import (
    MAX_DESCRIPTORS,
    descriptor_from_proto,
    descriptor_to_proto,
    layout_from_proto,
    layout_to_proto,
)

__all__ = [
    "InstanceSpec",
    "Load",
    "LoadUpdate",
    "RankRow",
    "Revision",
    "RoomRoute",
    "RowChange",
    "RowKey",
    "Snapshot",
    "WatchEvent",
    "WatchedService",
]

MAX_ROOMS = 100_000
"""Rooms in one RecordRooms or LookupRooms."""
MAX_ROWS = 65_536
"""Rows of one rank table."""
MAX_REQUEST_ID = 512


class Revision(msgspec.Struct, frozen=True, order=True):
    """Orders the changes of one table: its life, and a count within it."""

    table_epoch: int
    n: int


class InstanceSpec(msgspec.Struct, frozen=True):
    """What all ranks of an instance share. Names are unique per role."""

    name: str
    role: Role
    fingerprint: str
    fingerprint_parts: dict[str, str] = {}
    served_model_names: tuple[str, ...] = ()
    max_model_len: int = 0
    version: str = ""
    tokenizer_digest: str = ""
    kv_capacity_tokens: int = 0
    eos_token_ids: tuple[int, ...] = ()
    dp_size: int = 1
    cp_size: int = 1
    tp_size: int = 1
    max_running: int = 0

    @property
    def world_size(self) -> int:
        """Ranks of the instance."""
        return self.dp_size * self.cp_size * self.tp_size


class RowKey(msgspec.Struct, frozen=True, order=True):
    """Names a row, whoever holds it."""

    instance: str
    role: Role
    coord: RankCoord


class RankRow(msgspec.Struct, frozen=True):
    """One rank. `endpoint` is its DP leader's; `layout` is None on ranks that report none."""

    instance: InstanceSpec
    coord: RankCoord
    endpoint: str
    incarnation: int
    layout: KvLayout | None = None
    descriptors: tuple[TransferDescriptor, ...] = ()
    state: MembershipState = MembershipState.JOINING
    load: Load = Load()
    host: str = ""
    pid: int = 0
    engine_pid: int = 0
    revision: Revision = Revision(0, 0)
    metrics_endpoint: str = ""

    @property
    def key(self) -> RowKey:
        """The row's name."""
        return RowKey(self.instance.name, self.instance.role, self.coord)

    @property
    def is_leader(self) -> bool:
        """True for the rank that schedules for its DP group: the one to send requests to."""
        return self.coord.cp == 0 and self.coord.tp == 0


class WatchedService(msgspec.Struct, frozen=True):
    """A process that watches the table. `http_endpoint` is host:port, or https://host:port with TLS: http_url()."""

    name: str
    pid: int
    host: str
    http_endpoint: str = ""
    metrics_endpoint: str = ""


def http_url(endpoint: str) -> str:
    """The URL of a process's HTTP address: what is no URL already (https://host:port) is host:port without TLS."""
    return endpoint if "://" in endpoint else f"http://{endpoint}"


class RoomRoute(msgspec.Struct, frozen=True):
    """Where a room really ran; the prefill side is empty when decode did all by itself."""

    room: int
    attempt: int = 0
    request_id: str = ""
    prefill_instance: str = ""
    prefill_dp: int = 0
    prefill_incarnation: int = 0
    decode_instance: str = ""
    decode_dp: int = 0
    decode_incarnation: int = 0


class Snapshot(msgspec.Struct, frozen=True):
    """Replaces all that the watcher knew of this table."""

    revision: Revision
    rows: tuple[RankRow, ...]


class RowChange(msgspec.Struct, frozen=True):
    """One row after a change; LEFT means removed."""

    revision: Revision
    row: RankRow


class RowLoad(msgspec.Struct, frozen=True):
    """New load of a row, if that incarnation still holds it."""

    key: RowKey
    incarnation: int
    load: Load


class LoadUpdate(msgspec.Struct, frozen=True):
    """New load figures; the revision does not move. Empty ones only say that the watch is alive."""

    revision: Revision
    loads: tuple[RowLoad, ...] = ()


WatchEvent = Snapshot | RowChange | LoadUpdate

_STATE_TO_PROTO: dict[MembershipState, rank_table_pb2.MembershipState] = {
    MembershipState.JOINING: rank_table_pb2.MEMBERSHIP_STATE_JOINING,
    MembershipState.READY: rank_table_pb2.MEMBERSHIP_STATE_READY,
    MembershipState.DRAINING: rank_table_pb2.MEMBERSHIP_STATE_DRAINING,
    MembershipState.LEFT: rank_table_pb2.MEMBERSHIP_STATE_LEFT,
    MembershipState.LOST: rank_table_pb2.MEMBERSHIP_STATE_LOST,
}
_STATE_FROM_PROTO: dict[int, MembershipState] = {number: state for state, number in _STATE_TO_PROTO.items()}


def differing_parts(one: InstanceSpec, other: InstanceSpec) -> tuple[str, ...]:
    """Names of the fingerprint parts in which two instances differ; empty when they may be paired."""
    if one.fingerprint == other.fingerprint:
        return ()
    names = sorted(one.fingerprint_parts.keys() | other.fingerprint_parts.keys())
    parts = tuple(n for n in names if one.fingerprint_parts.get(n) != other.fingerprint_parts.get(n))
    return parts or ("fingerprint",)


def revision_to_proto(revision: Revision) -> rank_table_pb2.Revision:
    """Revision as a message."""
    return rank_table_pb2.Revision(table_epoch=revision.table_epoch, n=revision.n)


def revision_from_proto(message: rank_table_pb2.Revision, field: str = "revision") -> Revision:
    """Both parts are not negative."""
    return Revision(checked_int(message.table_epoch, f"{field}.table_epoch"), checked_int(message.n, f"{field}.n"))


def spec_to_proto(spec: InstanceSpec) -> rank_table_pb2.InstanceSpec:
    """InstanceSpec as a message."""
    return rank_table_pb2.InstanceSpec(
        name=spec.name,
        role=role_to_proto(spec.role),
        dp_size=spec.dp_size,
        cp_size=spec.cp_size,
        tp_size=spec.tp_size,
        fingerprint=spec.fingerprint,
        fingerprint_parts=spec.fingerprint_parts,
        served_model_names=spec.served_model_names,
        max_model_len=spec.max_model_len,
        version=spec.version,
        tokenizer_digest=spec.tokenizer_digest,
        kv_capacity_tokens=spec.kv_capacity_tokens,
        eos_token_ids=spec.eos_token_ids,
        max_running=spec.max_running,
    )


def spec_from_proto(message: rank_table_pb2.InstanceSpec, field: str = "instance") -> InstanceSpec:
    """Refuses nameless instances, missing roles and fingerprints, and absurd sizes."""
    checked_size(message.fingerprint_parts, f"{field}.fingerprint_parts", 64)
    checked_size(message.served_model_names, f"{field}.served_model_names", 64)
    checked_size(message.eos_token_ids, f"{field}.eos_token_ids", 1024)
    spec = InstanceSpec(
        name=checked_text(message.name, f"{field}.name", empty=False),
        role=role_from_proto(message.role, f"{field}.role"),
        dp_size=checked_int(message.dp_size, f"{field}.dp_size", 1, MAX_PARALLEL),
        cp_size=checked_int(message.cp_size, f"{field}.cp_size", 1, MAX_PARALLEL),
        tp_size=checked_int(message.tp_size, f"{field}.tp_size", 1, MAX_PARALLEL),
        fingerprint=checked_text(message.fingerprint, f"{field}.fingerprint", empty=False),
        fingerprint_parts={
            checked_text(name, f"{field}.fingerprint_parts", 64): checked_text(
                value, f"{field}.fingerprint_parts[{name}]", 1024
            )
            for name, value in message.fingerprint_parts.items()
        },
        served_model_names=tuple(
            checked_text(name, f"{field}.served_model_names", 512) for name in message.served_model_names
        ),
        max_model_len=checked_int(message.max_model_len, f"{field}.max_model_len"),
        version=checked_text(message.version, f"{field}.version", 64),
        tokenizer_digest=checked_text(message.tokenizer_digest, f"{field}.tokenizer_digest"),
        kv_capacity_tokens=checked_int(message.kv_capacity_tokens, f"{field}.kv_capacity_tokens"),
        eos_token_ids=tuple(
            checked_int(token, f"{field}.eos_token_ids", 0, MAX_INT32) for token in message.eos_token_ids
        ),
        max_running=checked_int(message.max_running, f"{field}.max_running"),
    )
    if spec.world_size > MAX_PARALLEL:
        raise InvalidRequestError(
            f"{field} has {spec.world_size} ranks, at most {MAX_PARALLEL} are allowed", field=field
        )
    return spec


def row_to_proto(row: RankRow) -> rank_table_pb2.RankRow:
    """RankRow as a message."""
    return rank_table_pb2.RankRow(
        instance=spec_to_proto(row.instance),
        coord=coord_to_proto(row.coord),
        endpoint=row.endpoint,
        incarnation=row.incarnation,
        layout=None if row.layout is None else layout_to_proto(row.layout),
        descriptors=[descriptor_to_proto(descriptor) for descriptor in row.descriptors],
        state=_STATE_TO_PROTO[row.state],
        load=load_to_proto(row.load),
        host=row.host,
        pid=row.pid,
        engine_pid=row.engine_pid,
        revision=revision_to_proto(row.revision),
        metrics_endpoint=row.metrics_endpoint,
    )


def row_from_proto(message: rank_table_pb2.RankRow, field: str = "row") -> RankRow:
    """Refuses rows outside their instance. An unset state is JOINING."""
    spec = spec_from_proto(message.instance, f"{field}.instance")
    coord = coord_from_proto(message.coord, f"{field}.coord")
    for name, rank, size in (
        ("dp", coord.dp, spec.dp_size),
        ("cp", coord.cp, spec.cp_size),
        ("tp", coord.tp, spec.tp_size),
    ):
        checked_int(rank, f"{field}.coord.{name}", 0, size - 1)
    checked_size(message.descriptors, f"{field}.descriptors", MAX_DESCRIPTORS)
    return RankRow(
        instance=spec,
        coord=coord,
        endpoint=checked_text(message.endpoint, f"{field}.endpoint", MAX_ENDPOINT, empty=False),
        incarnation=checked_int(message.incarnation, f"{field}.incarnation", 1),
        layout=layout_from_proto(message.layout, f"{field}.layout") if message.HasField("layout") else None,
        descriptors=tuple(
            descriptor_from_proto(descriptor, f"{field}.descriptors[{i}]")
            for i, descriptor in enumerate(message.descriptors)
        ),
        state=_STATE_FROM_PROTO.get(message.state, MembershipState.JOINING),
        load=load_from_proto(message.load, f"{field}.load"),
        host=checked_text(message.host, f"{field}.host"),
        pid=checked_int(message.pid, f"{field}.pid", 0, MAX_INT32),
        engine_pid=checked_int(message.engine_pid, f"{field}.engine_pid", 0, MAX_INT32),
        revision=revision_from_proto(message.revision, f"{field}.revision"),
        metrics_endpoint=checked_text(message.metrics_endpoint, f"{field}.metrics_endpoint", MAX_ENDPOINT),
    )


def service_to_proto(service: WatchedService) -> rank_table_pb2.Service:
    """WatchedService as a message."""
    return rank_table_pb2.Service(
        name=service.name,
        pid=service.pid,
        host=service.host,
        http_endpoint=service.http_endpoint,
        metrics_endpoint=service.metrics_endpoint,
    )


def service_from_proto(message: rank_table_pb2.Service, field: str = "watcher") -> WatchedService:
    """A watcher may leave all of it empty."""
    return WatchedService(
        name=checked_text(message.name, f"{field}.name", 64),
        pid=checked_int(message.pid, f"{field}.pid", 0, MAX_INT32),
        host=checked_text(message.host, f"{field}.host"),
        http_endpoint=checked_text(message.http_endpoint, f"{field}.http_endpoint", MAX_ENDPOINT),
        metrics_endpoint=checked_text(message.metrics_endpoint, f"{field}.metrics_endpoint", MAX_ENDPOINT),
    )


def route_to_proto(route: RoomRoute) -> rank_table_pb2.RoomRoute:
    """RoomRoute as a message."""
    return rank_table_pb2.RoomRoute(**{name: getattr(route, name) for name in RoomRoute.__struct_fields__})


def route_from_proto(message: rank_table_pb2.RoomRoute, field: str = "room") -> RoomRoute:
    """Rooms are positive."""
    return RoomRoute(
        room=checked_int(message.room, f"{field}.room", 1),
        attempt=checked_int(message.attempt, f"{field}.attempt"),
        request_id=checked_text(message.request_id, f"{field}.request_id", MAX_REQUEST_ID),
        prefill_instance=checked_text(message.prefill_instance, f"{field}.prefill_instance"),
        prefill_dp=checked_int(message.prefill_dp, f"{field}.prefill_dp", 0, MAX_PARALLEL),
        prefill_incarnation=checked_int(message.prefill_incarnation, f"{field}.prefill_incarnation"),
        decode_instance=checked_text(message.decode_instance, f"{field}.decode_instance"),
        decode_dp=checked_int(message.decode_dp, f"{field}.decode_dp", 0, MAX_PARALLEL),
        decode_incarnation=checked_int(message.decode_incarnation, f"{field}.decode_incarnation"),
    )


def routes_from_proto(messages: Sequence[rank_table_pb2.RoomRoute]) -> list[RoomRoute]:
    """All rooms of one RecordRooms."""
    checked_size(messages, "rooms", MAX_ROOMS)
    return [route_from_proto(message, f"rooms[{i}]") for i, message in enumerate(messages)]


def event_to_proto(event: WatchEvent) -> bootstrap_service_pb2.WatchRankTableResponse:
    """One message of a watch."""
    revision = revision_to_proto(event.revision)
    if isinstance(event, Snapshot):
        snapshot = bootstrap_service_pb2.Snapshot(rows=[row_to_proto(row) for row in event.rows])
        return bootstrap_service_pb2.WatchRankTableResponse(revision=revision, snapshot=snapshot)
    if isinstance(event, RowChange):
        change = bootstrap_service_pb2.RowChange(row=row_to_proto(event.row))
        return bootstrap_service_pb2.WatchRankTableResponse(revision=revision, change=change)
    load = bootstrap_service_pb2.LoadUpdate(rows=[_row_load_to_proto(load) for load in event.loads])
    return bootstrap_service_pb2.WatchRankTableResponse(revision=revision, load=load)


def _row_load_to_proto(load: RowLoad) -> rank_table_pb2.RankRow:
    return rank_table_pb2.RankRow(
        instance=rank_table_pb2.InstanceSpec(name=load.key.instance, role=role_to_proto(load.key.role)),
        coord=coord_to_proto(load.key.coord),
        incarnation=load.incarnation,
        load=load_to_proto(load.load),
    )


def event_from_proto(message: bootstrap_service_pb2.WatchRankTableResponse) -> WatchEvent:
    """One message of a watch. Raises InvalidRequestError for rows that can't be read, or no event."""
    revision = revision_from_proto(message.revision)
    which = message.WhichOneof("event")
    if which == "snapshot":
        checked_size(message.snapshot.rows, "snapshot.rows", MAX_ROWS)
        rows = tuple(row_from_proto(row, f"snapshot.rows[{i}]") for i, row in enumerate(message.snapshot.rows))
        return Snapshot(revision, rows)
    if which == "change":
        return RowChange(revision, row_from_proto(message.change.row, "change.row"))
    if which == "load":
        checked_size(message.load.rows, "load.rows", MAX_ROWS)
        return LoadUpdate(revision, tuple(_row_load_from_proto(row) for row in message.load.rows))
    raise InvalidRequestError("a watch sent a message without an event", field="event")


def _row_load_from_proto(message: rank_table_pb2.RankRow) -> RowLoad:
    role = role_from_proto(message.instance.role, "load.rows.instance.role")
    name = checked_text(message.instance.name, "load.rows.instance.name")
    key = RowKey(name, role, coord_from_proto(message.coord, "load.rows.coord"))
    incarnation = checked_int(message.incarnation, "load.rows.incarnation", 1)
    return RowLoad(key, incarnation, load_from_proto(message.load, "load.rows.load"))


def peer_to_proto(row: RankRow) -> identity_pb2.PeerRef:
    """Whom to call for a row, and which life of it."""
    return identity_pb2.PeerRef(endpoint=row.endpoint, incarnation=row.incarnation)
