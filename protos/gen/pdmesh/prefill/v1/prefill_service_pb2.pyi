from pdmesh.common.v1 import generation_pb2 as _generation_pb2
from pdmesh.transfer.v1 import ticket_pb2 as _ticket_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OpenPrefill(_message.Message):
    __slots__ = ("request", "prefill_incarnation", "decode_incarnation", "without_transfer", "link_id", "link_proof")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    PREFILL_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DECODE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_TRANSFER_FIELD_NUMBER: _ClassVar[int]
    LINK_ID_FIELD_NUMBER: _ClassVar[int]
    LINK_PROOF_FIELD_NUMBER: _ClassVar[int]
    request: _generation_pb2.GenerationRequest
    prefill_incarnation: int
    decode_incarnation: int
    without_transfer: bool
    link_id: int
    link_proof: bytes
    def __init__(self, request: _Optional[_Union[_generation_pb2.GenerationRequest, _Mapping]] = ..., prefill_incarnation: _Optional[int] = ..., decode_incarnation: _Optional[int] = ..., without_transfer: _Optional[bool] = ..., link_id: _Optional[int] = ..., link_proof: _Optional[bytes] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("open", "ticket")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    open: OpenPrefill
    ticket: _ticket_pb2.Ticket
    def __init__(self, open: _Optional[_Union[OpenPrefill, _Mapping]] = ..., ticket: _Optional[_Union[_ticket_pb2.Ticket, _Mapping]] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("cached_tokens",)
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    cached_tokens: int
    def __init__(self, cached_tokens: _Optional[int] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("token_id", "logprobs", "cached_tokens", "draft_token_ids", "timings")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprobs: _generation_pb2.PositionLogprobs
    cached_tokens: int
    draft_token_ids: _containers.RepeatedScalarFieldContainer[int]
    timings: _generation_pb2.StageTimings
    def __init__(self, token_id: _Optional[int] = ..., logprobs: _Optional[_Union[_generation_pb2.PositionLogprobs, _Mapping]] = ..., cached_tokens: _Optional[int] = ..., draft_token_ids: _Optional[_Iterable[int]] = ..., timings: _Optional[_Union[_generation_pb2.StageTimings, _Mapping]] = ...) -> None: ...

class Delivered(_message.Message):
    __slots__ = ("shards", "timings")
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    shards: _containers.RepeatedCompositeFieldContainer[_ticket_pb2.ShardCount]
    timings: _generation_pb2.StageTimings
    def __init__(self, shards: _Optional[_Iterable[_Union[_ticket_pb2.ShardCount, _Mapping]]] = ..., timings: _Optional[_Union[_generation_pb2.StageTimings, _Mapping]] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("first_position", "positions")
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    first_position: int
    positions: _containers.RepeatedCompositeFieldContainer[_generation_pb2.PositionLogprobs]
    def __init__(self, first_position: _Optional[int] = ..., positions: _Optional[_Iterable[_Union[_generation_pb2.PositionLogprobs, _Mapping]]] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("started", "first_token", "delivered", "prompt_logprobs")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    DELIVERED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    started: Started
    first_token: FirstToken
    delivered: Delivered
    prompt_logprobs: PromptLogprobs
    def __init__(self, started: _Optional[_Union[Started, _Mapping]] = ..., first_token: _Optional[_Union[FirstToken, _Mapping]] = ..., delivered: _Optional[_Union[Delivered, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ...) -> None: ...
