from pdmesh.common.v1 import identity_pb2 as _identity_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KvUsage(_message.Message):
    __slots__ = ("total", "free", "used", "cached", "pinned", "quarantined")
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    total: int
    free: int
    used: int
    cached: int
    pinned: int
    quarantined: int
    def __init__(self, total: _Optional[int] = ..., free: _Optional[int] = ..., used: _Optional[int] = ..., cached: _Optional[int] = ..., pinned: _Optional[int] = ..., quarantined: _Optional[int] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("running", "queued", "queued_tokens", "kv")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    running: int
    queued: int
    queued_tokens: int
    kv: KvUsage
    def __init__(self, running: _Optional[int] = ..., queued: _Optional[int] = ..., queued_tokens: _Optional[int] = ..., kv: _Optional[_Union[KvUsage, _Mapping]] = ...) -> None: ...

class TransferPair(_message.Message):
    __slots__ = ("peer_incarnation", "peer_instance", "transport", "reason", "up", "bytes", "seconds", "failures")
    PEER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PEER_INSTANCE_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    UP_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    peer_incarnation: int
    peer_instance: str
    transport: str
    reason: str
    up: bool
    bytes: int
    seconds: float
    failures: int
    def __init__(self, peer_incarnation: _Optional[int] = ..., peer_instance: _Optional[str] = ..., transport: _Optional[str] = ..., reason: _Optional[str] = ..., up: _Optional[bool] = ..., bytes: _Optional[int] = ..., seconds: _Optional[float] = ..., failures: _Optional[int] = ...) -> None: ...

class GetStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatsResponse(_message.Message):
    __slots__ = ("instance", "role", "coord", "incarnation", "pid", "engine_pid", "host", "state", "load", "pairs", "streams", "tasks", "sessions", "uptime_seconds", "fingerprint", "loop_lag_p99_seconds", "counters", "drain_note", "drained", "stalled_seconds", "figures_age_seconds", "unix_seconds")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    COORD_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_PID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LOOP_LAG_P99_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    DRAIN_NOTE_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    STALLED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FIGURES_AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    UNIX_SECONDS_FIELD_NUMBER: _ClassVar[int]
    instance: str
    role: _identity_pb2.Role
    coord: _identity_pb2.RankCoord
    incarnation: int
    pid: int
    engine_pid: int
    host: str
    state: str
    load: Load
    pairs: _containers.RepeatedCompositeFieldContainer[TransferPair]
    streams: int
    tasks: int
    sessions: int
    uptime_seconds: float
    fingerprint: str
    loop_lag_p99_seconds: float
    counters: _containers.ScalarMap[str, float]
    drain_note: str
    drained: bool
    stalled_seconds: float
    figures_age_seconds: float
    unix_seconds: float
    def __init__(self, instance: _Optional[str] = ..., role: _Optional[_Union[_identity_pb2.Role, str]] = ..., coord: _Optional[_Union[_identity_pb2.RankCoord, _Mapping]] = ..., incarnation: _Optional[int] = ..., pid: _Optional[int] = ..., engine_pid: _Optional[int] = ..., host: _Optional[str] = ..., state: _Optional[str] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., pairs: _Optional[_Iterable[_Union[TransferPair, _Mapping]]] = ..., streams: _Optional[int] = ..., tasks: _Optional[int] = ..., sessions: _Optional[int] = ..., uptime_seconds: _Optional[float] = ..., fingerprint: _Optional[str] = ..., loop_lag_p99_seconds: _Optional[float] = ..., counters: _Optional[_Mapping[str, float]] = ..., drain_note: _Optional[str] = ..., drained: _Optional[bool] = ..., stalled_seconds: _Optional[float] = ..., figures_age_seconds: _Optional[float] = ..., unix_seconds: _Optional[float] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("rooms",)
    ROOMS_FIELD_NUMBER: _ClassVar[int]
    rooms: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, rooms: _Optional[_Iterable[int]] = ...) -> None: ...

class StateMove(_message.Message):
    __slots__ = ("unix_seconds", "session", "machine", "from_state", "to_state", "reason", "seconds")
    UNIX_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    FROM_STATE_FIELD_NUMBER: _ClassVar[int]
    TO_STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    unix_seconds: float
    session: _identity_pb2.SessionId
    machine: str
    from_state: str
    to_state: str
    reason: str
    seconds: float
    def __init__(self, unix_seconds: _Optional[float] = ..., session: _Optional[_Union[_identity_pb2.SessionId, _Mapping]] = ..., machine: _Optional[str] = ..., from_state: _Optional[str] = ..., to_state: _Optional[str] = ..., reason: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("moves",)
    MOVES_FIELD_NUMBER: _ClassVar[int]
    moves: _containers.RepeatedCompositeFieldContainer[StateMove]
    def __init__(self, moves: _Optional[_Iterable[_Union[StateMove, _Mapping]]] = ...) -> None: ...

class StartProfileRequest(_message.Message):
    __slots__ = ("steps",)
    STEPS_FIELD_NUMBER: _ClassVar[int]
    steps: int
    def __init__(self, steps: _Optional[int] = ...) -> None: ...

class StartProfileResponse(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: str
    def __init__(self, path: _Optional[str] = ...) -> None: ...

class StopProfileRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StopProfileResponse(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: str
    def __init__(self, path: _Optional[str] = ...) -> None: ...

class DrainWorkerRequest(_message.Message):
    __slots__ = ("limit_seconds", "force", "stop", "incarnation")
    LIMIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    limit_seconds: float
    force: bool
    stop: bool
    incarnation: int
    def __init__(self, limit_seconds: _Optional[float] = ..., force: _Optional[bool] = ..., stop: _Optional[bool] = ..., incarnation: _Optional[int] = ...) -> None: ...

class DrainWorkerResponse(_message.Message):
    __slots__ = ("sessions", "last_pair")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    LAST_PAIR_FIELD_NUMBER: _ClassVar[int]
    sessions: int
    last_pair: bool
    def __init__(self, sessions: _Optional[int] = ..., last_pair: _Optional[bool] = ...) -> None: ...

class ChangeRoleRequest(_message.Message):
    __slots__ = ("role", "limit_seconds", "force", "incarnation")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    role: _identity_pb2.Role
    limit_seconds: float
    force: bool
    incarnation: int
    def __init__(self, role: _Optional[_Union[_identity_pb2.Role, str]] = ..., limit_seconds: _Optional[float] = ..., force: _Optional[bool] = ..., incarnation: _Optional[int] = ...) -> None: ...

class ChangeRoleResponse(_message.Message):
    __slots__ = ("sessions", "changed")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    sessions: int
    changed: bool
    def __init__(self, sessions: _Optional[int] = ..., changed: _Optional[bool] = ...) -> None: ...
