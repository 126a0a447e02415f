"""The blocks of one cache group: who holds how many references, what is free, what may be evicted.

    free ──allocate──▶ held (used | pinned | quarantined) ──last reference──▶ free      not indexed
      ▲                  ▲                                       └──────────▶ cached    indexed
      │                  └───────────────── hold (prefix hit) ─────────────────┤
      └────────────────────── allocate evicts the longest rested ──────────────┘

Block 0 is the null block: never handed out, outside all accounts. Every other block is counted once,
in the first of quarantined, pinned, used, cached, free that holds over all its holders.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from engine_core.kv.api import Hold
from engine_core.kv.prefix_cache import PrefixCache
from engine_core.types.errors import InternalError
from engine_core.types.kv import KvUsage

NULL_BLOCK = 0

# States in the order in which they count; the first three are Hold's.
_QUARANTINED, _PINNED, _USED, _CACHED, _FREE = range(5)
_STATE_OF = {Hold.QUARANTINED: _QUARANTINED, Hold.PINNED: _PINNED, Hold.USED: _USED}


class BlockPool:
    """Reference counts and accounts over blocks 1 … num_blocks - 1. Changes are O(1) per block."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise InternalError(f"a pool needs room for its null block, not {num_blocks} blocks")
        self._num_blocks = num_blocks
        # A stack: what is freed in reverse order comes out in order again, so tables stay contiguous.
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self._holders = ([0] * num_blocks, [0] * num_blocks, [0] * num_blocks)
        self._counts = [0, 0, 0, 0, num_blocks - 1]
        self.prefix = PrefixCache()
        self.evictions = 0

    @property
    def total(self) -> int:
        """Blocks in the account: all but the null block."""
        return self._num_blocks - 1

    @property
    def available(self) -> int:
        """Blocks that allocate could return now: free and evictable ones."""
        return len(self._free) + self.prefix.num_evictable

    def references(self, block: int) -> int:
        """Holders of a block."""
        q, p, u = self._holders
        return q[block] + p[block] + u[block]

    def allocate(self, count: int, hold: Hold) -> list[int]:
        """Returns `count` blocks, each with one reference: free ones first, then evicted ones.

        Raises InternalError, and changes nothing, when fewer are available: callers check first.
        """
        if count > self.available:
            raise InternalError(f"{count} blocks were to be allocated and {self.available} are available")
        state = _STATE_OF[hold]
        holders = self._holders[state]
        taken = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
                self._counts[_FREE] -= 1
            else:
                block = self.prefix.evict()
                self._counts[_CACHED] -= 1
                self.evictions += 1
            holders[block] = 1
            taken.append(block)
        self._counts[state] += count
        return taken

    def share(self, blocks: Iterable[int], hold: Hold) -> None:
        """Adds a reference to indexed blocks (a prefix hit). Raises InternalError for a block that is not indexed."""
        state = _STATE_OF[hold]
        for block in blocks:
            if block not in self.prefix:
                raise InternalError(f"block {block} is not in the prefix index and can't be shared")
            before = self._state(block)
            if before == _CACHED:
                self.prefix.wake(block)
            self._holders[state][block] += 1
            self._move(block, before)

    def rehold(self, blocks: Iterable[int], old: Hold, new: Hold) -> None:
        """Turns one reference of each block from one hold into another."""
        source, target = _STATE_OF[old], _STATE_OF[new]
        for block in blocks:
            self._check_held(block, source)
            before = self._state(block)
            self._holders[source][block] -= 1
            self._holders[target][block] += 1
            self._move(block, before)

    def drop(self, blocks: Sequence[int], hold: Hold) -> None:
        """Takes back one reference of each block, the last block first, so that tails are evicted before heads.

        Raises InternalError when a block has no such reference (freed twice).
        """
        state = _STATE_OF[hold]
        for block in reversed(blocks):
            self._check_held(block, state)
            before = self._state(block)
            self._holders[state][block] -= 1
            after = self._move(block, before)
            if after == _CACHED:
                self.prefix.rest(block)
            elif after == _FREE:
                self._free.append(block)

    def index(self, block: int, digest: bytes) -> bool:
        """Enters a held block into the prefix index; False when another block has its content."""
        if not 0 < block < self._num_blocks or not self.references(block):
            raise InternalError(f"block {block} is held by nobody and can't be indexed")
        return self.prefix.insert(digest, block)

    def unindex(self, block: int) -> None:
        """Takes a block with one holder out of the prefix index; no-op for one that is shared or not in it."""
        if self.references(block) == 1 and block in self.prefix:
            self.prefix.remove(block)

    def usage(self) -> KvUsage:
        """The account of this pool, in blocks."""
        c = self._counts
        return KvUsage(
            total=self.total, free=c[_FREE], used=c[_USED], cached=c[_CACHED], pinned=c[_PINNED],
            quarantined=c[_QUARANTINED],
        )  # fmt: skip

    def check(self, expected: Mapping[Hold, Mapping[int, int]]) -> None:
        """Recounts everything against `expected`, the references per hold and block that owners' tables show.

        Raises InternalError naming the first thing that does not add up.
        """
        for hold, state in _STATE_OF.items():
            want = expected.get(hold, {})
            for block, count in enumerate(self._holders[state]):
                if count != want.get(block, 0):
                    raise InternalError(
                        f"block {block} has {count} {hold} references; the owners' tables show {want.get(block, 0)}"
                    )
        self.prefix.check()
        free = set(self._free)
        if len(free) != len(self._free):
            raise InternalError("a block is in the free list twice")
        counts = [0] * 5
        for block in range(1, self._num_blocks):
            state = self._state(block)
            counts[state] += 1
            if (block in free) != (state == _FREE):
                raise InternalError(f"block {block} is {'' if block in free else 'not '}in the free list wrongly")
            if self.prefix.evictable(block) != (state == _CACHED):
                raise InternalError(f"block {block} is {'' if state == _CACHED else 'not '}cached but rests wrongly")
        if NULL_BLOCK in free or self.references(NULL_BLOCK) or NULL_BLOCK in self.prefix:
            raise InternalError("the null block was handed out")
        if counts != self._counts:
            raise InternalError(f"accounts say {self._counts} blocks per state; there are {counts}")
        if not self.usage().balanced():
            raise InternalError(f"the account does not add up: {self.usage()}")

    def _check_held(self, block: int, state: int) -> None:
        if not 0 < block < self._num_blocks or not self._holders[state][block]:
            raise InternalError(f"block {block} was given back by someone who does not hold it")

    def _state(self, block: int) -> int:
        for state, holders in enumerate(self._holders):
            if holders[block]:
                return state
        return _CACHED if block in self.prefix else _FREE

    def _move(self, block: int, before: int) -> int:
        after = self._state(block)
        if after != before:
            self._counts[before] -= 1
            self._counts[after] += 1
        return after
