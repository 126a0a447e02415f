from pdmesh.common.v1 import generation_pb2 as _generation_pb2
from pdmesh.common.v1 import identity_pb2 as _identity_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GenerateRequest(_message.Message):
    __slots__ = ("request", "decode_incarnation", "prefill")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    DECODE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    request: _generation_pb2.GenerationRequest
    decode_incarnation: int
    prefill: _identity_pb2.PeerRef
    def __init__(self, request: _Optional[_Union[_generation_pb2.GenerationRequest, _Mapping]] = ..., decode_incarnation: _Optional[int] = ..., prefill: _Optional[_Union[_identity_pb2.PeerRef, _Mapping]] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("reason", "stop_token_id", "cached_tokens", "decode_timings", "prefill_timings", "path", "transport")
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_TIMINGS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TIMINGS_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    reason: _generation_pb2.FinishReason
    stop_token_id: int
    cached_tokens: int
    decode_timings: _generation_pb2.StageTimings
    prefill_timings: _generation_pb2.StageTimings
    path: str
    transport: str
    def __init__(self, reason: _Optional[_Union[_generation_pb2.FinishReason, str]] = ..., stop_token_id: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., decode_timings: _Optional[_Union[_generation_pb2.StageTimings, _Mapping]] = ..., prefill_timings: _Optional[_Union[_generation_pb2.StageTimings, _Mapping]] = ..., path: _Optional[str] = ..., transport: _Optional[str] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("first_index", "token_ids", "logprobs", "finished", "cached_tokens", "prompt_logprobs", "prompt_first_position")
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    first_index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_generation_pb2.PositionLogprobs]
    finished: Finished
    cached_tokens: int
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_generation_pb2.PositionLogprobs]
    prompt_first_position: int
    def __init__(self, first_index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_generation_pb2.PositionLogprobs, _Mapping]]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., cached_tokens: _Optional[int] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_generation_pb2.PositionLogprobs, _Mapping]]] = ..., prompt_first_position: _Optional[int] = ...) -> None: ...
