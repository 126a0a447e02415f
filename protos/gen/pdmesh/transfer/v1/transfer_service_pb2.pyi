from pdmesh.common.v1 import identity_pb2 as _identity_pb2
from pdmesh.transfer.v1 import kv_layout_pb2 as _kv_layout_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RankEndpoint(_message.Message):
    __slots__ = ("coord", "layout", "descriptors")
    COORD_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTORS_FIELD_NUMBER: _ClassVar[int]
    coord: _identity_pb2.RankCoord
    layout: _kv_layout_pb2.KvLayout
    descriptors: _containers.RepeatedCompositeFieldContainer[_kv_layout_pb2.TransferDescriptor]
    def __init__(self, coord: _Optional[_Union[_identity_pb2.RankCoord, _Mapping]] = ..., layout: _Optional[_Union[_kv_layout_pb2.KvLayout, _Mapping]] = ..., descriptors: _Optional[_Iterable[_Union[_kv_layout_pb2.TransferDescriptor, _Mapping]]] = ...) -> None: ...

class NegotiateLayoutRequest(_message.Message):
    __slots__ = ("decode_instance", "decode_incarnation", "prefill_incarnation", "fingerprint", "transport", "ranks", "pair_secret")
    DECODE_INSTANCE_FIELD_NUMBER: _ClassVar[int]
    DECODE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PREFILL_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    PAIR_SECRET_FIELD_NUMBER: _ClassVar[int]
    decode_instance: str
    decode_incarnation: int
    prefill_incarnation: int
    fingerprint: str
    transport: str
    ranks: _containers.RepeatedCompositeFieldContainer[RankEndpoint]
    pair_secret: bytes
    def __init__(self, decode_instance: _Optional[str] = ..., decode_incarnation: _Optional[int] = ..., prefill_incarnation: _Optional[int] = ..., fingerprint: _Optional[str] = ..., transport: _Optional[str] = ..., ranks: _Optional[_Iterable[_Union[RankEndpoint, _Mapping]]] = ..., pair_secret: _Optional[bytes] = ...) -> None: ...

class NegotiateLayoutResponse(_message.Message):
    __slots__ = ("link_id", "transport", "reason")
    LINK_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    link_id: int
    transport: str
    reason: str
    def __init__(self, link_id: _Optional[int] = ..., transport: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class QuiesceRequest(_message.Message):
    __slots__ = ("link_id", "prefill_incarnation", "sessions")
    LINK_ID_FIELD_NUMBER: _ClassVar[int]
    PREFILL_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    link_id: int
    prefill_incarnation: int
    sessions: _containers.RepeatedCompositeFieldContainer[_identity_pb2.SessionId]
    def __init__(self, link_id: _Optional[int] = ..., prefill_incarnation: _Optional[int] = ..., sessions: _Optional[_Iterable[_Union[_identity_pb2.SessionId, _Mapping]]] = ...) -> None: ...

class QuiesceResponse(_message.Message):
    __slots__ = ("quiet",)
    QUIET_FIELD_NUMBER: _ClassVar[int]
    quiet: _containers.RepeatedCompositeFieldContainer[_identity_pb2.SessionId]
    def __init__(self, quiet: _Optional[_Iterable[_Union[_identity_pb2.SessionId, _Mapping]]] = ...) -> None: ...
