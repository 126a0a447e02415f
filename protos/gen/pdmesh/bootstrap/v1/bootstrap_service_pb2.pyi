from pdmesh.bootstrap.v1 import rank_table_pb2 as _rank_table_pb2
from pdmesh.common.v1 import identity_pb2 as _identity_pb2
from pdmesh.common.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RegisterInstanceRequest(_message.Message):
    __slots__ = ("instance", "incarnation")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    instance: _rank_table_pb2.InstanceSpec
    incarnation: int
    def __init__(self, instance: _Optional[_Union[_rank_table_pb2.InstanceSpec, _Mapping]] = ..., incarnation: _Optional[int] = ...) -> None: ...

class RegisterInstanceResponse(_message.Message):
    __slots__ = ("revision",)
    REVISION_FIELD_NUMBER: _ClassVar[int]
    revision: _rank_table_pb2.Revision
    def __init__(self, revision: _Optional[_Union[_rank_table_pb2.Revision, _Mapping]] = ...) -> None: ...

class RegisterRankRequest(_message.Message):
    __slots__ = ("row", "ttl_seconds")
    ROW_FIELD_NUMBER: _ClassVar[int]
    TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    row: _rank_table_pb2.RankRow
    ttl_seconds: float
    def __init__(self, row: _Optional[_Union[_rank_table_pb2.RankRow, _Mapping]] = ..., ttl_seconds: _Optional[float] = ...) -> None: ...

class RegisterRankResponse(_message.Message):
    __slots__ = ("lease_id", "ttl_seconds", "renew_seconds", "revision")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RENEW_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    ttl_seconds: float
    renew_seconds: float
    revision: _rank_table_pb2.Revision
    def __init__(self, lease_id: _Optional[int] = ..., ttl_seconds: _Optional[float] = ..., renew_seconds: _Optional[float] = ..., revision: _Optional[_Union[_rank_table_pb2.Revision, _Mapping]] = ...) -> None: ...

class RenewLeaseRequest(_message.Message):
    __slots__ = ("lease_id", "incarnation", "load")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    incarnation: int
    load: _worker_pb2.Load
    def __init__(self, lease_id: _Optional[int] = ..., incarnation: _Optional[int] = ..., load: _Optional[_Union[_worker_pb2.Load, _Mapping]] = ...) -> None: ...

class RenewLeaseResponse(_message.Message):
    __slots__ = ("ttl_seconds",)
    TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ttl_seconds: float
    def __init__(self, ttl_seconds: _Optional[float] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("lease_id", "incarnation")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    incarnation: int
    def __init__(self, lease_id: _Optional[int] = ..., incarnation: _Optional[int] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("revision",)
    REVISION_FIELD_NUMBER: _ClassVar[int]
    revision: _rank_table_pb2.Revision
    def __init__(self, revision: _Optional[_Union[_rank_table_pb2.Revision, _Mapping]] = ...) -> None: ...

class DeregisterRequest(_message.Message):
    __slots__ = ("lease_id", "incarnation")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    incarnation: int
    def __init__(self, lease_id: _Optional[int] = ..., incarnation: _Optional[int] = ...) -> None: ...

class DeregisterResponse(_message.Message):
    __slots__ = ("revision",)
    REVISION_FIELD_NUMBER: _ClassVar[int]
    revision: _rank_table_pb2.Revision
    def __init__(self, revision: _Optional[_Union[_rank_table_pb2.Revision, _Mapping]] = ...) -> None: ...

class GetRankTableRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetRankTableResponse(_message.Message):
    __slots__ = ("revision", "rows", "services")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    SERVICES_FIELD_NUMBER: _ClassVar[int]
    revision: _rank_table_pb2.Revision
    rows: _containers.RepeatedCompositeFieldContainer[_rank_table_pb2.RankRow]
    services: _containers.RepeatedCompositeFieldContainer[_rank_table_pb2.Service]
    def __init__(self, revision: _Optional[_Union[_rank_table_pb2.Revision, _Mapping]] = ..., rows: _Optional[_Iterable[_Union[_rank_table_pb2.RankRow, _Mapping]]] = ..., services: _Optional[_Iterable[_Union[_rank_table_pb2.Service, _Mapping]]] = ...) -> None: ...

class WatchRankTableRequest(_message.Message):
    __slots__ = ("after", "watcher", "without_loads")
    AFTER_FIELD_NUMBER: _ClassVar[int]
    WATCHER_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_LOADS_FIELD_NUMBER: _ClassVar[int]
    after: _rank_table_pb2.Revision
    watcher: _rank_table_pb2.Service
    without_loads: bool
    def __init__(self, after: _Optional[_Union[_rank_table_pb2.Revision, _Mapping]] = ..., watcher: _Optional[_Union[_rank_table_pb2.Service, _Mapping]] = ..., without_loads: _Optional[bool] = ...) -> None: ...

class Snapshot(_message.Message):
    __slots__ = ("rows",)
    ROWS_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[_rank_table_pb2.RankRow]
    def __init__(self, rows: _Optional[_Iterable[_Union[_rank_table_pb2.RankRow, _Mapping]]] = ...) -> None: ...

class RowChange(_message.Message):
    __slots__ = ("row",)
    ROW_FIELD_NUMBER: _ClassVar[int]
    row: _rank_table_pb2.RankRow
    def __init__(self, row: _Optional[_Union[_rank_table_pb2.RankRow, _Mapping]] = ...) -> None: ...

class LoadUpdate(_message.Message):
    __slots__ = ("rows",)
    ROWS_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[_rank_table_pb2.RankRow]
    def __init__(self, rows: _Optional[_Iterable[_Union[_rank_table_pb2.RankRow, _Mapping]]] = ...) -> None: ...

class WatchRankTableResponse(_message.Message):
    __slots__ = ("revision", "snapshot", "change", "load")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    revision: _rank_table_pb2.Revision
    snapshot: Snapshot
    change: RowChange
    load: LoadUpdate
    def __init__(self, revision: _Optional[_Union[_rank_table_pb2.Revision, _Mapping]] = ..., snapshot: _Optional[_Union[Snapshot, _Mapping]] = ..., change: _Optional[_Union[RowChange, _Mapping]] = ..., load: _Optional[_Union[LoadUpdate, _Mapping]] = ...) -> None: ...

class RecordRoomsRequest(_message.Message):
    __slots__ = ("rooms",)
    ROOMS_FIELD_NUMBER: _ClassVar[int]
    rooms: _containers.RepeatedCompositeFieldContainer[_rank_table_pb2.RoomRoute]
    def __init__(self, rooms: _Optional[_Iterable[_Union[_rank_table_pb2.RoomRoute, _Mapping]]] = ...) -> None: ...

class RecordRoomsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LookupRoomsRequest(_message.Message):
    __slots__ = ("rooms", "request_ids")
    ROOMS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    rooms: _containers.RepeatedScalarFieldContainer[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, rooms: _Optional[_Iterable[int]] = ..., request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class LookupRoomsResponse(_message.Message):
    __slots__ = ("rooms",)
    ROOMS_FIELD_NUMBER: _ClassVar[int]
    rooms: _containers.RepeatedCompositeFieldContainer[_rank_table_pb2.RoomRoute]
    def __init__(self, rooms: _Optional[_Iterable[_Union[_rank_table_pb2.RoomRoute, _Mapping]]] = ...) -> None: ...

class RouteRoomRequest(_message.Message):
    __slots__ = ("room",)
    ROOM_FIELD_NUMBER: _ClassVar[int]
    room: int
    def __init__(self, room: _Optional[int] = ...) -> None: ...

class RouteRoomResponse(_message.Message):
    __slots__ = ("route", "recorded", "prefill", "decode")
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    RECORDED_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    route: _rank_table_pb2.RoomRoute
    recorded: bool
    prefill: _identity_pb2.PeerRef
    decode: _identity_pb2.PeerRef
    def __init__(self, route: _Optional[_Union[_rank_table_pb2.RoomRoute, _Mapping]] = ..., recorded: _Optional[bool] = ..., prefill: _Optional[_Union[_identity_pb2.PeerRef, _Mapping]] = ..., decode: _Optional[_Union[_identity_pb2.PeerRef, _Mapping]] = ...) -> None: ...
