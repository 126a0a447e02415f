"""The request-level contract that schedulers use. Implemented by KVCacheManager.

Ownership: a session holds blocks from `acquire` until `release`; shared prefix blocks are counted by
reference. What a holder's blocks count as is set by `mark`: USED, PINNED (a transport may still read
them) or QUARANTINED (one may still write them). Only `release` lets them go.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol

import msgspec

from engine_core.types.ids import SessionId
from engine_core.types.kv import KvUsage


class Hold(enum.StrEnum):
    """What a session's blocks count as."""

    USED = "used"
    PINNED = "pinned"
    QUARANTINED = "quarantined"


class Acquired(msgspec.Struct, frozen=True):
    """Result of acquire: tokens already computed, a multiple of the block size."""

    cached_tokens: int


class KvManager(Protocol):
    """Blocks per session. Single-threaded; pure (no device memory)."""

    def lookup(self, token_ids: Sequence[int], salt: str, most: int | None = None) -> int:
        """Leading tokens that acquire would find cached now; changes nothing. At most len - 1 and `most`, rounded
        down to a block."""

    def blocks_needed(self, num_tokens: int) -> int:
        """Blocks that hold num_tokens, over all groups."""

    def available(self) -> int:
        """Blocks that could be allocated now: free plus evictable."""

    def acquire(
        self, owner: SessionId, token_ids: Sequence[int], num_tokens: int, salt: str, most: int | None = None
    ) -> Acquired | None:
        """Takes the cached prefix of token_ids, `most` tokens of it where that is given, and new blocks up to
        num_tokens in all. All or nothing: None changes nothing. Raises InternalError when the owner already holds
        blocks."""

    def grow(self, owner: SessionId, num_tokens: int) -> bool:
        """Extends the owner's table to num_tokens. All or nothing."""

    def commit(self, owner: SessionId, token_ids: Sequence[int], computed: int) -> None:
        """Enters the full blocks of token_ids[:computed] into the prefix index (after settle, and for
        received blocks only once they are known to be whole). Never for a quarantined owner."""

    def disown(self, owner: SessionId) -> None:
        """Takes the owner's blocks out of the prefix index, but for those that others hold too: what is in them
        is not to be trusted. They stay held. No-op without a hold."""

    def mark(self, owner: SessionId, hold: Hold) -> None:
        """Sets what the owner's blocks count as."""

    def holds(self, owner: SessionId) -> bool:
        """True while the owner holds blocks."""

    def block_ids(self, owner: SessionId) -> tuple[list[int], ...]:
        """The owner's block table per group; live lists, not to be changed by the caller."""

    def release(self, owner: SessionId) -> None:
        """Gives all blocks back: indexed ones become cached (LRU), others free. No-op without a hold."""

    def usage(self) -> KvUsage:
        """The account."""

    @property
    def prefix_query_tokens(self) -> int:
        """Prompt tokens looked for in the prefix index, since start."""

    @property
    def prefix_hit_tokens(self) -> int:
        """Prompt tokens found there."""

    @property
    def evictions(self) -> int:
        """Cached blocks given to others."""

    def check_conservation(self) -> None:
        """Recounts everything from scratch; raises InternalError naming what does not add up."""
