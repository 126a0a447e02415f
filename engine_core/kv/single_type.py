"""The block tables of one cache group, for full attention: token t lies in block t // block_size.

Every question that decides is asked before a deed: `match` and `fits` change nothing, `take` and
`extend` can't fail after them. KVCacheManager asks all groups first, then acts on all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from engine_core.kv.api import Hold
from engine_core.kv.block_pool import BlockPool
from engine_core.kv.prefix_cache import DigestChain
from engine_core.types.errors import InternalError
from engine_core.types.ids import SessionId
from engine_core.types.kv import KvGroupLayout, KvUsage


class _Table:
    """One owner's blocks. `committed` leading blocks are computed and were offered to the index."""

    __slots__ = ("blocks", "chain", "committed")

    def __init__(self, blocks: list[int], chain: DigestChain, committed: int) -> None:
        self.blocks, self.chain, self.committed = blocks, chain, committed


class SingleTypeKVCacheManager:
    """Tables over one pool. Holds are the caller's knowledge: it passes an owner's hold along."""

    def __init__(self, layout: KvGroupLayout) -> None:
        self.block_size = layout.block_size
        self.group_id = layout.spec.group_id
        self._pool = BlockPool(layout.num_blocks)
        self._tables: dict[SessionId, _Table] = {}

    @property
    def available(self) -> int:
        """Blocks that could be allocated now."""
        return self._pool.available

    @property
    def total(self) -> int:
        """Blocks of the group, without the null block."""
        return self._pool.total

    @property
    def evictions(self) -> int:
        """Blocks that were evicted from the prefix index so far."""
        return self._pool.evictions

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold num_tokens."""
        return -(-num_tokens // self.block_size)

    def match(self, chain: DigestChain, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        """Blocks of the longest indexed prefix of token_ids within max_tokens, in token order."""
        found: list[int] = []
        for index in range(max_tokens // self.block_size):
            block = self._pool.prefix.find(chain.digest(index, token_ids))
            if block is None:
                break
            found.append(block)
        return found

    def fits(self, matched: Sequence[int], num_tokens: int) -> bool:
        """True when, with the matched blocks held (and so not evictable), the rest up to num_tokens is there."""
        resting = sum(self._pool.prefix.evictable(block) for block in matched)
        return self.blocks_for(num_tokens) - len(matched) <= self._pool.available - resting

    def take(self, owner: SessionId, matched: list[int], num_tokens: int, chain: DigestChain, hold: Hold) -> None:
        """Opens the owner's table: matched blocks first held, then new ones allocated. `fits` said yes."""
        self._pool.share(matched, hold)
        new = self._pool.allocate(max(0, self.blocks_for(num_tokens) - len(matched)), hold)
        self._tables[owner] = _Table([*matched, *new], chain, len(matched))

    def missing(self, owner: SessionId, num_tokens: int) -> int:
        """Blocks that the owner's table lacks for num_tokens."""
        return max(0, self.blocks_for(num_tokens) - len(self._tables[owner].blocks))

    def extend(self, owner: SessionId, num_tokens: int, hold: Hold) -> None:
        """Lengthens the owner's table in place."""
        self._tables[owner].blocks.extend(self._pool.allocate(self.missing(owner, num_tokens), hold))

    def commit(self, owner: SessionId, token_ids: Sequence[int], computed: int) -> None:
        """Indexes the full blocks of token_ids[:computed] that were not offered yet."""
        table = self._tables[owner]
        full = computed // self.block_size
        if full > len(table.blocks):
            raise InternalError(f"{owner} commits {computed} tokens and holds {len(table.blocks)} blocks")
        last = table.committed - 1
        if last >= 0 and full > table.committed and not table.chain.agrees(last, token_ids):
            raise InternalError(f"{owner} commits tokens that do not continue those committed before")
        for index in range(table.committed, full):
            self._pool.index(table.blocks[index], table.chain.digest(index, token_ids))
            table.committed = index + 1

    def disown(self, owner: SessionId) -> None:
        """Takes blocks that the owner alone holds out of the index."""
        for block in self._tables[owner].blocks:
            self._pool.unindex(block)

    def mark(self, owner: SessionId, old: Hold, new: Hold) -> None:
        """Changes what the owner's references count as."""
        self._pool.rehold(self._tables[owner].blocks, old, new)

    def blocks(self, owner: SessionId) -> list[int]:
        """The owner's live table."""
        return self._tables[owner].blocks

    def release(self, owner: SessionId, hold: Hold) -> None:
        """Gives all of the owner's blocks back."""
        self._pool.drop(self._tables.pop(owner).blocks, hold)

    def usage(self) -> KvUsage:
        """The group's account."""
        return self._pool.usage()

    def check(self, holds: dict[SessionId, Hold]) -> None:
        """Recounts the pool from the tables. Raises InternalError."""
        if self._tables.keys() != holds.keys():
            raise InternalError(f"group {self.group_id} has tables of {len(self._tables)} owners, not {len(holds)}")
        expected: dict[Hold, Counter[int]] = {hold: Counter() for hold in Hold}
        everyone: Counter[int] = Counter()
        for owner, table in self._tables.items():
            if len(set(table.blocks)) != len(table.blocks):
                raise InternalError(f"{owner} holds a block twice")
            expected[holds[owner]].update(table.blocks)
            everyone.update(table.blocks)
            for index, block in enumerate(table.blocks):
                digest = self._pool.prefix.digest_of(block)
                # An indexed block is shared at one place in the text only, and only after it was computed.
                if digest is not None and (index >= table.committed or digest != table.chain.digest(index, ())):
                    raise InternalError(f"{owner} holds indexed block {block} at a place that its digest does not name")
        for block, count in everyone.items():
            if count > 1 and block not in self._pool.prefix:
                raise InternalError(f"block {block} has {count} owners and is not a shared prefix")
        self._pool.check(expected)
