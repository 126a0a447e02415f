from pdmesh.common.v1 import identity_pb2 as _identity_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GroupBlocks(_message.Message):
    __slots__ = ("group_id", "block_ids")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    group_id: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, group_id: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ShardTicket(_message.Message):
    __slots__ = ("coord", "groups")
    COORD_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    coord: _identity_pb2.RankCoord
    groups: _containers.RepeatedCompositeFieldContainer[GroupBlocks]
    def __init__(self, coord: _Optional[_Union[_identity_pb2.RankCoord, _Mapping]] = ..., groups: _Optional[_Iterable[_Union[GroupBlocks, _Mapping]]] = ...) -> None: ...

class Ticket(_message.Message):
    __slots__ = ("link_id", "first_token", "num_tokens", "shards")
    LINK_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    link_id: int
    first_token: int
    num_tokens: int
    shards: _containers.RepeatedCompositeFieldContainer[ShardTicket]
    def __init__(self, link_id: _Optional[int] = ..., first_token: _Optional[int] = ..., num_tokens: _Optional[int] = ..., shards: _Optional[_Iterable[_Union[ShardTicket, _Mapping]]] = ...) -> None: ...

class ShardCount(_message.Message):
    __slots__ = ("coord", "bytes", "blocks", "checksum")
    COORD_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    coord: _identity_pb2.RankCoord
    bytes: int
    blocks: int
    checksum: int
    def __init__(self, coord: _Optional[_Union[_identity_pb2.RankCoord, _Mapping]] = ..., bytes: _Optional[int] = ..., blocks: _Optional[int] = ..., checksum: _Optional[int] = ...) -> None: ...
