from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Leg(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LEG_UNSPECIFIED: _ClassVar[Leg]
    LEG_ROUTER: _ClassVar[Leg]
    LEG_PREFILL: _ClassVar[Leg]
    LEG_DECODE: _ClassVar[Leg]
    LEG_TRANSFER: _ClassVar[Leg]
    LEG_BOOTSTRAP: _ClassVar[Leg]
LEG_UNSPECIFIED: Leg
LEG_ROUTER: Leg
LEG_PREFILL: Leg
LEG_DECODE: Leg
LEG_TRANSFER: Leg
LEG_BOOTSTRAP: Leg

class ErrorDetail(_message.Message):
    __slots__ = ("leg", "peer_incarnation", "retryable", "reason", "field", "retry_after_seconds")
    LEG_FIELD_NUMBER: _ClassVar[int]
    PEER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    leg: Leg
    peer_incarnation: int
    retryable: bool
    reason: str
    field: str
    retry_after_seconds: float
    def __init__(self, leg: _Optional[_Union[Leg, str]] = ..., peer_incarnation: _Optional[int] = ..., retryable: _Optional[bool] = ..., reason: _Optional[str] = ..., field: _Optional[str] = ..., retry_after_seconds: _Optional[float] = ...) -> None: ...
