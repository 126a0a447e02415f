from pdmesh.common.v1 import identity_pb2 as _identity_pb2
from pdmesh.common.v1 import worker_pb2 as _worker_pb2
from pdmesh.transfer.v1 import kv_layout_pb2 as _kv_layout_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MembershipState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEMBERSHIP_STATE_UNSPECIFIED: _ClassVar[MembershipState]
    MEMBERSHIP_STATE_JOINING: _ClassVar[MembershipState]
    MEMBERSHIP_STATE_READY: _ClassVar[MembershipState]
    MEMBERSHIP_STATE_DRAINING: _ClassVar[MembershipState]
    MEMBERSHIP_STATE_LEFT: _ClassVar[MembershipState]
    MEMBERSHIP_STATE_LOST: _ClassVar[MembershipState]
MEMBERSHIP_STATE_UNSPECIFIED: MembershipState
MEMBERSHIP_STATE_JOINING: MembershipState
MEMBERSHIP_STATE_READY: MembershipState
MEMBERSHIP_STATE_DRAINING: MembershipState
MEMBERSHIP_STATE_LEFT: MembershipState
MEMBERSHIP_STATE_LOST: MembershipState

class Revision(_message.Message):
    __slots__ = ("table_epoch", "n")
    TABLE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    table_epoch: int
    n: int
    def __init__(self, table_epoch: _Optional[int] = ..., n: _Optional[int] = ...) -> None: ...

class InstanceSpec(_message.Message):
    __slots__ = ("name", "role", "dp_size", "cp_size", "tp_size", "fingerprint", "fingerprint_parts", "served_model_names", "max_model_len", "version", "tokenizer_digest", "kv_capacity_tokens", "eos_token_ids", "max_running")
    class FingerprintPartsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    DP_SIZE_FIELD_NUMBER: _ClassVar[int]
    CP_SIZE_FIELD_NUMBER: _ClassVar[int]
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_PARTS_FIELD_NUMBER: _ClassVar[int]
    SERVED_MODEL_NAMES_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    KV_CAPACITY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: _identity_pb2.Role
    dp_size: int
    cp_size: int
    tp_size: int
    fingerprint: str
    fingerprint_parts: _containers.ScalarMap[str, str]
    served_model_names: _containers.RepeatedScalarFieldContainer[str]
    max_model_len: int
    version: str
    tokenizer_digest: str
    kv_capacity_tokens: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_running: int
    def __init__(self, name: _Optional[str] = ..., role: _Optional[_Union[_identity_pb2.Role, str]] = ..., dp_size: _Optional[int] = ..., cp_size: _Optional[int] = ..., tp_size: _Optional[int] = ..., fingerprint: _Optional[str] = ..., fingerprint_parts: _Optional[_Mapping[str, str]] = ..., served_model_names: _Optional[_Iterable[str]] = ..., max_model_len: _Optional[int] = ..., version: _Optional[str] = ..., tokenizer_digest: _Optional[str] = ..., kv_capacity_tokens: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., max_running: _Optional[int] = ...) -> None: ...

class RankRow(_message.Message):
    __slots__ = ("instance", "coord", "endpoint", "incarnation", "layout", "descriptors", "state", "load", "host", "pid", "engine_pid", "revision", "metrics_endpoint")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    COORD_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTORS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_PID_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    METRICS_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    instance: InstanceSpec
    coord: _identity_pb2.RankCoord
    endpoint: str
    incarnation: int
    layout: _kv_layout_pb2.KvLayout
    descriptors: _containers.RepeatedCompositeFieldContainer[_kv_layout_pb2.TransferDescriptor]
    state: MembershipState
    load: _worker_pb2.Load
    host: str
    pid: int
    engine_pid: int
    revision: Revision
    metrics_endpoint: str
    def __init__(self, instance: _Optional[_Union[InstanceSpec, _Mapping]] = ..., coord: _Optional[_Union[_identity_pb2.RankCoord, _Mapping]] = ..., endpoint: _Optional[str] = ..., incarnation: _Optional[int] = ..., layout: _Optional[_Union[_kv_layout_pb2.KvLayout, _Mapping]] = ..., descriptors: _Optional[_Iterable[_Union[_kv_layout_pb2.TransferDescriptor, _Mapping]]] = ..., state: _Optional[_Union[MembershipState, str]] = ..., load: _Optional[_Union[_worker_pb2.Load, _Mapping]] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., engine_pid: _Optional[int] = ..., revision: _Optional[_Union[Revision, _Mapping]] = ..., metrics_endpoint: _Optional[str] = ...) -> None: ...

class Service(_message.Message):
    __slots__ = ("name", "pid", "host", "http_endpoint", "metrics_endpoint")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    HTTP_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    METRICS_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    name: str
    pid: int
    host: str
    http_endpoint: str
    metrics_endpoint: str
    def __init__(self, name: _Optional[str] = ..., pid: _Optional[int] = ..., host: _Optional[str] = ..., http_endpoint: _Optional[str] = ..., metrics_endpoint: _Optional[str] = ...) -> None: ...

class RoomRoute(_message.Message):
    __slots__ = ("room", "attempt", "request_id", "prefill_instance", "prefill_dp", "prefill_incarnation", "decode_instance", "decode_dp", "decode_incarnation")
    ROOM_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PREFILL_INSTANCE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_DP_FIELD_NUMBER: _ClassVar[int]
    PREFILL_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DECODE_INSTANCE_FIELD_NUMBER: _ClassVar[int]
    DECODE_DP_FIELD_NUMBER: _ClassVar[int]
    DECODE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    room: int
    attempt: int
    request_id: str
    prefill_instance: str
    prefill_dp: int
    prefill_incarnation: int
    decode_instance: str
    decode_dp: int
    decode_incarnation: int
    def __init__(self, room: _Optional[int] = ..., attempt: _Optional[int] = ..., request_id: _Optional[str] = ..., prefill_instance: _Optional[str] = ..., prefill_dp: _Optional[int] = ..., prefill_incarnation: _Optional[int] = ..., decode_instance: _Optional[str] = ..., decode_dp: _Optional[int] = ..., decode_incarnation: _Optional[int] = ...) -> None: ...
