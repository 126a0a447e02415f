"""The prefix index: which block holds which tokens, named by what they are.

A block's digest is a chained SHA-256 over (fingerprint, cache group, block size, salt, parent, token
ids). It is the same in every process and on disk: nothing in it depends on Python's own hash, on
byte order of the machine, or on when the process started.

    root     = sha256(tag, fingerprint, group, block size, salt)      strings carry their length
    digest 0 = sha256(root, tokens of block 0 as little-endian int64)
    digest i = sha256(digest i-1, tokens of block i)

The index maps a digest to one block and back. A second block with the same content stays outside:
block tables are live lists that a running step or push may be reading, so blocks are never swapped.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from engine_core.types.errors import InternalError

_TAG = b"pdmesh-kv-1"


def root_digest(fingerprint: str, group_id: int, block_size: int, salt: str) -> bytes:
    """The parent of a chain's first block: 32 bytes that set apart models, cache groups and salts."""
    # A lone surrogate in a salt must not end an engine.
    prints, salts = (text.encode("utf-8", "surrogatepass") for text in (fingerprint, salt))
    head = struct.pack("<QQQQ", len(prints), group_id, block_size, len(salts))
    return hashlib.sha256(_TAG + head + prints + salts).digest()


class DigestChain:
    """Digests of the leading full blocks of one token sequence, computed once each.

    The chain doesn't keep the tokens: whoever extends it passes the same sequence, or a longer one
    that begins with it.
    """

    __slots__ = ("_digests", "_pack", "_root", "_size")

    def __init__(self, root: bytes, block_size: int) -> None:
        self._root, self._size = root, block_size
        self._pack = struct.Struct(f"<{block_size}q").pack
        self._digests: list[bytes] = []

    def __len__(self) -> int:
        return len(self._digests)

    def copy(self) -> DigestChain:
        """A chain with the same digests that grows on its own."""
        twin = DigestChain.__new__(DigestChain)
        twin._root, twin._size, twin._pack = self._root, self._size, self._pack
        twin._digests = list(self._digests)
        return twin

    def digest(self, index: int, token_ids: Sequence[int]) -> bytes:
        """The digest of block `index`; token_ids must cover it. Hashes only blocks that are new to the chain."""
        digests, size = self._digests, self._size
        while len(digests) <= index:
            start = len(digests) * size
            parent = digests[-1] if digests else self._root
            digests.append(hashlib.sha256(parent + self._pack(*token_ids[start : start + size])).digest())
        return digests[index]

    def agrees(self, index: int, token_ids: Sequence[int]) -> bool:
        """True when block `index`, already in the chain, holds these tokens (earlier blocks are not looked at)."""
        parent = self._digests[index - 1] if index else self._root
        tokens = token_ids[index * self._size : (index + 1) * self._size]
        return hashlib.sha256(parent + self._pack(*tokens)).digest() == self._digests[index]


class ChainKey(NamedTuple):
    """What tells one group's chains from another's."""

    fingerprint: str
    group_id: int
    block_size: int


class ChainMemo:
    """Chains of token sequences that are asked for again and again (queued prompts, at every step).

    Keyed by the identity of the tuple, which the memo keeps alive: an id is never reused while its
    entry exists, and a tuple never changes. Other sequences get a fresh chain each time. Bounded in
    entries and in tokens; the least recently used go first.
    """

    def __init__(self, keys: Sequence[ChainKey], max_entries: int = 1024, max_tokens: int = 1 << 20) -> None:
        self._keys = tuple(keys)
        self._max_entries, self._max_tokens = max_entries, max_tokens
        self._entries: OrderedDict[tuple[int, str], tuple[tuple[int, ...], tuple[DigestChain, ...]]] = OrderedDict()
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._entries)

    def chains(self, token_ids: Sequence[int], salt: str) -> tuple[DigestChain, ...]:
        """One chain per group. Shared with later callers: copy it before extending it past token_ids."""
        if type(token_ids) is not tuple:
            return self._fresh(salt)
        key = (id(token_ids), salt)
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
            return entry[1]
        chains = self._fresh(salt)
        self._entries[key] = (token_ids, chains)
        self._tokens += len(token_ids)
        while len(self._entries) > self._max_entries or (self._tokens > self._max_tokens and len(self._entries) > 1):
            _, (old, _) = self._entries.popitem(last=False)
            self._tokens -= len(old)
        return chains

    def _fresh(self, salt: str) -> tuple[DigestChain, ...]:
        return tuple(DigestChain(root_digest(k.fingerprint, k.group_id, k.block_size, salt), k.block_size)
                     for k in self._keys)  # fmt: skip


class PrefixCache:
    """Digest to block and back, and the order in which unreferenced blocks are evicted.

    Only the BlockPool changes it. A block is evictable while it is indexed and nobody holds it.
    """

    def __init__(self) -> None:
        self._blocks: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}
        self._lru: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def num_evictable(self) -> int:
        """Indexed blocks that nobody holds."""
        return len(self._lru)

    def find(self, digest: bytes) -> int | None:
        """The block with this content."""
        return self._blocks.get(digest)

    def digest_of(self, block: int) -> bytes | None:
        """The digest under which a block is indexed."""
        return self._digests.get(block)

    def __contains__(self, block: int) -> bool:
        return block in self._digests

    def evictable(self, block: int) -> bool:
        """True while the block is indexed and unreferenced."""
        return block in self._lru

    def insert(self, digest: bytes, block: int) -> bool:
        """Indexes a held block. False, and nothing changes, when another block has this content.

        Raises InternalError when the block is indexed as something else.
        """
        known = self._digests.get(block)
        if known is not None:
            if known != digest:
                raise InternalError(f"block {block} is indexed as {known.hex()[:12]}, not as {digest.hex()[:12]}")
            return True
        if digest in self._blocks:
            return False
        self._blocks[digest] = block
        self._digests[block] = digest
        return True

    def remove(self, block: int) -> None:
        """Takes a held block out of the index."""
        del self._blocks[self._digests.pop(block)]

    def rest(self, block: int) -> None:
        """The last holder of an indexed block left: it may be evicted, after all that rested before."""
        self._lru[block] = None

    def wake(self, block: int) -> None:
        """A resting block is held again."""
        del self._lru[block]

    def evict(self) -> int:
        """Takes the block that has rested longest out of the index. Raises InternalError when none rests."""
        if not self._lru:
            raise InternalError("nothing to evict from the prefix index")
        block, _ = self._lru.popitem(last=False)
        del self._blocks[self._digests.pop(block)]
        return block

    def resting(self) -> Iterator[int]:
        """Evictable blocks, next to be evicted first."""
        return iter(self._lru)

    def check(self) -> None:
        """Raises InternalError when the two directions or the eviction order disagree."""
        if len(self._blocks) != len(self._digests):
            raise InternalError(f"prefix index: {len(self._blocks)} digests for {len(self._digests)} blocks")
        for block, digest in self._digests.items():
            if self._blocks.get(digest) != block:
                raise InternalError(f"prefix index: block {block} and its digest do not name each other")
        for block in self._lru:
            if block not in self._digests:
                raise InternalError(f"prefix index: block {block} rests but is not indexed")
