from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KvGroupLayout(_message.Message):
    __slots__ = ("group_id", "num_layers", "kv_size", "num_heads", "first_head", "head_size", "block_size", "dtype", "dim_order", "offset", "num_blocks")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    KV_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_HEADS_FIELD_NUMBER: _ClassVar[int]
    FIRST_HEAD_FIELD_NUMBER: _ClassVar[int]
    HEAD_SIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DIM_ORDER_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    group_id: int
    num_layers: int
    kv_size: int
    num_heads: int
    first_head: int
    head_size: int
    block_size: int
    dtype: str
    dim_order: str
    offset: int
    num_blocks: int
    def __init__(self, group_id: _Optional[int] = ..., num_layers: _Optional[int] = ..., kv_size: _Optional[int] = ..., num_heads: _Optional[int] = ..., first_head: _Optional[int] = ..., head_size: _Optional[int] = ..., block_size: _Optional[int] = ..., dtype: _Optional[str] = ..., dim_order: _Optional[str] = ..., offset: _Optional[int] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class KvLayout(_message.Message):
    __slots__ = ("tp_size", "cp_size", "groups", "region_bytes")
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    CP_SIZE_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    REGION_BYTES_FIELD_NUMBER: _ClassVar[int]
    tp_size: int
    cp_size: int
    groups: _containers.RepeatedCompositeFieldContainer[KvGroupLayout]
    region_bytes: int
    def __init__(self, tp_size: _Optional[int] = ..., cp_size: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[KvGroupLayout, _Mapping]]] = ..., region_bytes: _Optional[int] = ...) -> None: ...

class TransferDescriptor(_message.Message):
    __slots__ = ("transport", "address", "nonce")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    transport: str
    address: str
    nonce: bytes
    def __init__(self, transport: _Optional[str] = ..., address: _Optional[str] = ..., nonce: _Optional[bytes] = ...) -> None: ...
