from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]
    ROLE_MIXED: _ClassVar[Role]
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role
ROLE_MIXED: Role

class RankCoord(_message.Message):
    __slots__ = ("dp", "cp", "tp")
    DP_FIELD_NUMBER: _ClassVar[int]
    CP_FIELD_NUMBER: _ClassVar[int]
    TP_FIELD_NUMBER: _ClassVar[int]
    dp: int
    cp: int
    tp: int
    def __init__(self, dp: _Optional[int] = ..., cp: _Optional[int] = ..., tp: _Optional[int] = ...) -> None: ...

class SessionId(_message.Message):
    __slots__ = ("room", "attempt")
    ROOM_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    room: int
    attempt: int
    def __init__(self, room: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class PeerRef(_message.Message):
    __slots__ = ("endpoint", "incarnation")
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    endpoint: str
    incarnation: int
    def __init__(self, endpoint: _Optional[str] = ..., incarnation: _Optional[int] = ...) -> None: ...
