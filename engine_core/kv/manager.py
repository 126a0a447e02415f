"""KVCacheManager: a session's blocks over all cache groups. Pure: no device memory, no clock, one thread.

The life of a session's blocks:
1. `acquire` matches the longest prefix that every group has cached, holds it, and allocates the rest.
   All groups are asked before one is changed.
2. `grow` lengthens the tables while tokens are drawn; `commit` enters blocks into the prefix index
   once their KV is known to be whole.
3. `mark` says what the blocks count as while a transport may still read (PINNED) or write
   (QUARANTINED) them.
4. `release` gives all back: indexed blocks rest, to be found again or evicted, others are free.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from engine_core.kv.api import Acquired, Hold
from engine_core.kv.prefix_cache import ChainKey, ChainMemo, DigestChain
from engine_core.kv.single_type import SingleTypeKVCacheManager
from engine_core.types.errors import InternalError
from engine_core.types.ids import SessionId
from engine_core.types.kv import KvLayout, KvUsage


class PrefixFigures(msgspec.Struct, frozen=True):
    """Counted over successful acquires: tokens asked for, tokens found; and blocks evicted so far."""

    query_tokens: int = 0
    hit_tokens: int = 0
    evictions: int = 0


class KVCacheManager:
    """Implements engine_core.kv.api.KvManager. Token sequences given for an owner only ever get longer.

    With `enable_prefix_cache` off nothing is matched and commit enters nothing, but still checks.
    Beyond the contract: mark, grow, commit and block_ids raise InternalError for an owner without blocks.
    """

    def __init__(self, layout: KvLayout, fingerprint: str, enable_prefix_cache: bool) -> None:  # noqa: FBT001
        if not layout.groups:
            raise InternalError("a KV layout needs at least one cache group")
        self._groups = tuple(SingleTypeKVCacheManager(group) for group in layout.groups)
        self._memo = ChainMemo([ChainKey(fingerprint, g.group_id, g.block_size) for g in self._groups])
        self._enabled = enable_prefix_cache
        # A hit must end at a block border of every group.
        self._stride = math.lcm(*(g.block_size for g in self._groups))
        self._holds: dict[SessionId, Hold] = {}
        self._query_tokens = self._hit_tokens = 0

    # ---- questions ------------------------------------------------------------------------------------

    def lookup(self, token_ids: Sequence[int], salt: str, most: int | None = None) -> int:
        """Leading tokens that acquire would find cached now. Cheap to ask again with the same tuple."""
        return self._match(token_ids, self._chains(token_ids, salt), most)[0]

    def blocks_needed(self, num_tokens: int) -> int:
        """Blocks that hold num_tokens, over all groups."""
        return sum(g.blocks_for(num_tokens) for g in self._groups)

    def available(self) -> int:
        """Free and evictable blocks, over all groups."""
        return sum(g.available for g in self._groups)

    def could_fit(self, num_tokens: int) -> bool:
        """True when an otherwise empty pool holds num_tokens, in every group."""
        return all(g.blocks_for(num_tokens) <= g.total for g in self._groups)

    def holds(self, owner: SessionId) -> bool:
        """True while the owner holds blocks."""
        return owner in self._holds

    def hold_of(self, owner: SessionId) -> Hold | None:
        """What the owner's blocks count as; None without blocks."""
        return self._holds.get(owner)

    def owners(self) -> tuple[SessionId, ...]:
        """Everyone who holds blocks."""
        return tuple(self._holds)

    def block_ids(self, owner: SessionId) -> tuple[list[int], ...]:
        """The owner's live block table per group."""
        self._hold(owner)
        return tuple(g.blocks(owner) for g in self._groups)

    # ---- deeds ----------------------------------------------------------------------------------------

    def acquire(
        self, owner: SessionId, token_ids: Sequence[int], num_tokens: int, salt: str, most: int | None = None
    ) -> Acquired | None:
        """Takes the cached prefix, `most` tokens of it where given, and new blocks up to num_tokens in all; None
        changes nothing.

        The prefix is taken whole even where it is longer than num_tokens. Raises InternalError for an
        owner that holds blocks, and for num_tokens below 1.
        """
        if owner in self._holds:
            raise InternalError(f"{owner} holds blocks already")
        if num_tokens < 1:
            raise InternalError(f"{owner} acquires {num_tokens} tokens")
        chains = self._chains(token_ids, salt)
        cached, matched = self._match(token_ids, chains, most)
        if not all(g.fits(m, num_tokens) for g, m in zip(self._groups, matched, strict=True)):
            return None
        for group, blocks, chain in zip(self._groups, matched, chains, strict=True):
            group.take(owner, blocks, num_tokens, chain.copy(), Hold.USED)
        self._holds[owner] = Hold.USED
        if self._enabled:
            self._query_tokens += len(token_ids)
            self._hit_tokens += cached
        return Acquired(cached)

    def grow(self, owner: SessionId, num_tokens: int) -> bool:
        """Extends the owner's tables to num_tokens; False changes nothing."""
        hold = self._hold(owner)
        if any(g.missing(owner, num_tokens) > g.available for g in self._groups):
            return False
        for group in self._groups:
            group.extend(owner, num_tokens, hold)
        return True

    def commit(self, owner: SessionId, token_ids: Sequence[int], computed: int) -> None:
        """Enters the full blocks of token_ids[:computed] into the prefix index.

        Idempotent, and O(new full blocks). Raises InternalError for a quarantined owner, for one without
        blocks, and for more tokens than are known or held.
        """
        if self._hold(owner) is Hold.QUARANTINED:
            raise InternalError(f"{owner} is quarantined: its blocks may still be written and can't be indexed")
        if computed > len(token_ids):
            raise InternalError(f"{owner} commits {computed} of {len(token_ids)} tokens")
        if computed > self.capacity(owner):
            raise InternalError(f"{owner} commits {computed} tokens and holds blocks for {self.capacity(owner)}")
        if self._enabled:
            for group in self._groups:
                group.commit(owner, token_ids, computed)

    def disown(self, owner: SessionId) -> None:
        """Takes blocks that the owner alone holds out of the prefix index. No-op without a hold."""
        if owner in self._holds:
            for group in self._groups:
                group.disown(owner)

    def capacity(self, owner: SessionId) -> int:
        """Tokens that the owner's tables have room for."""
        self._hold(owner)
        return min(len(g.blocks(owner)) * g.block_size for g in self._groups)

    def mark(self, owner: SessionId, hold: Hold) -> None:
        """Sets what the owner's blocks count as."""
        old = self._hold(owner)
        if old is not hold:
            for group in self._groups:
                group.mark(owner, old, hold)
            self._holds[owner] = hold

    def release(self, owner: SessionId) -> None:
        """Gives all blocks back. No-op without a hold."""
        hold = self._holds.pop(owner, None)
        if hold is not None:
            for group in self._groups:
                group.release(owner, hold)

    # ---- accounts -------------------------------------------------------------------------------------

    def usage(self) -> KvUsage:
        """The account, summed over groups, in blocks."""
        parts = [g.usage() for g in self._groups]
        return KvUsage(**{f: sum(getattr(p, f) for p in parts) for f in KvUsage.__struct_fields__})

    def figures(self) -> PrefixFigures:
        """What the prefix index was good for."""
        return PrefixFigures(self._query_tokens, self._hit_tokens, sum(g.evictions for g in self._groups))

    @property
    def prefix_query_tokens(self) -> int:
        """Tokens that successful acquires asked for."""
        return self._query_tokens

    @property
    def prefix_hit_tokens(self) -> int:
        """Tokens that successful acquires found cached."""
        return self._hit_tokens

    @property
    def evictions(self) -> int:
        """Blocks evicted from the prefix index, over all groups."""
        return sum(g.evictions for g in self._groups)

    def check_conservation(self) -> None:
        """Recounts everything from scratch; raises InternalError naming what does not add up."""
        for group in self._groups:
            group.check(self._holds)
        if not self.usage().balanced():
            raise InternalError(f"the account does not add up: {self.usage()}")

    def _hold(self, owner: SessionId) -> Hold:
        hold = self._holds.get(owner)
        if hold is None:
            raise InternalError(f"{owner} holds no blocks")
        return hold

    def _chains(self, token_ids: Sequence[int], salt: str) -> tuple[DigestChain, ...]:
        return self._memo.chains(token_ids, salt)

    def _match(
        self, token_ids: Sequence[int], chains: tuple[DigestChain, ...], most: int | None
    ) -> tuple[int, list[list[int]]]:
        """Cached tokens, and the blocks that hold them per group."""
        longest = len(token_ids) - 1 if most is None else min(len(token_ids) - 1, most)
        limit = max(0, longest) // self._stride * self._stride if self._enabled else 0
        found: list[list[int]] = []
        for group, chain in zip(self._groups, chains, strict=True):
            found.append(group.match(chain, token_ids, limit))
            limit = min(limit, len(found[-1]) * group.block_size) // self._stride * self._stride
        return limit, [f[: limit // g.block_size] for f, g in zip(found, self._groups, strict=True)]
