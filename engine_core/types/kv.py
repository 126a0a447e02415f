"""Shapes and accounts of the paged KV cache."""

from __future__ import annotations

import hashlib

import msgspec

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per element of the KV data types."""


class KvGroupSpec(msgspec.Struct, frozen=True):
    """A cache group as the model declares it: layers with one shape, for this rank's heads."""

    num_layers: int
    num_heads: int
    head_size: int
    dtype: str
    kv_size: int = 2
    group_id: int = 0

    def bytes_per_token(self) -> int:
        """Bytes of KV that one token takes in this group."""
        return self.num_layers * self.kv_size * self.num_heads * self.head_size * DTYPE_BYTES[self.dtype]


class KvGroupLayout(msgspec.Struct, frozen=True):
    """Where the blocks of a group lie in a region.

    dim_order names the dimensions from slowest to fastest, e.g. NB_NL_TWO_BS_NH_HS: all layers of
    one block are contiguous, which is what the CPU platform uses. `offset` is in bytes from the
    region's start; num_blocks counts the null block 0.
    """

    spec: KvGroupSpec
    block_size: int
    num_blocks: int
    first_head: int = 0
    offset: int = 0
    dim_order: str = "NB_NL_TWO_BS_NH_HS"

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers."""
        return self.block_size * self.spec.bytes_per_token()


class KvLayout(msgspec.Struct, frozen=True):
    """KV of one rank: what two workers may differ in, for the copy planner."""

    groups: tuple[KvGroupLayout, ...]
    region_bytes: int
    tp_size: int = 1
    cp_size: int = 1


class TransferDescriptor(msgspec.Struct, frozen=True):
    """How a rank's pool can be reached: handles only, never an address in memory."""

    transport: str
    address: str
    nonce: bytes = b""


class KvUsage(msgspec.Struct, frozen=True):
    """Every block counted once, in the first of quarantined, pinned, used, cached, free that holds."""

    total: int
    free: int
    used: int = 0
    cached: int = 0
    pinned: int = 0
    quarantined: int = 0

    def balanced(self) -> bool:
        """True when the states add up to the total."""
        return self.free + self.used + self.cached + self.pinned + self.quarantined == self.total


class GroupBlocks(msgspec.Struct, frozen=True, array_like=True):
    """Block ids of one cache group, in token order."""

    group_id: int
    block_ids: tuple[int, ...]


class ShardTicket(msgspec.Struct, frozen=True):
    """Destination blocks on one decode rank (dp, cp, tp)."""

    coord: tuple[int, int, int]
    groups: tuple[GroupBlocks, ...]


class Ticket(msgspec.Struct, frozen=True):
    """Decode's permission to write. Blocks start at first_token, a multiple of the block size."""

    link_id: int
    first_token: int
    num_tokens: int
    shards: tuple[ShardTicket, ...]


class ShardCount(msgspec.Struct, frozen=True):
    """What one decode rank received, by the receiver's count."""

    coord: tuple[int, int, int]
    bytes: int
    blocks: int
    checksum: int | None = None


def fingerprint_of(parts: dict[str, str]) -> str:
    """Digest of all that two workers must share; `parts` name what can differ."""
    return hashlib.sha256(msgspec.json.encode(sorted(parts.items()))).hexdigest()[:32]
