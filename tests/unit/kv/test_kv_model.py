"""KVCacheManager against a naive model, driven at random: accounts, sharing, eviction, hits.

The model keeps whole texts instead of digests and scans instead of counting. Which free block is
handed out is the manager's business; the model checks that it really was free, or was the block that
had rested longest.
"""

from __future__ import annotations

import dataclasses

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine_core.kv.api import Acquired, Hold
from engine_core.kv.manager import KVCacheManager
from engine_core.types.errors import InternalError
from engine_core.types.ids import SessionId
from engine_core.types.kv import KvGroupLayout, KvGroupSpec, KvLayout, KvUsage

Key = tuple[str, tuple[int, ...]]
"""What a block holds: the salt, and all tokens up to the block's end."""

# Few texts that share beginnings, so that hits, duplicates and evictions are common.
TEXTS = st.lists(st.integers(0, 1), max_size=3).map(lambda tail: (*(5, 6, 7, 8, 5, 6, 7, 8, 5, 6), *tail))
PROMPTS = st.one_of(TEXTS, st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple))
SALTS = st.sampled_from(["", "", "", "x"])


@dataclasses.dataclass
class Owner:
    salt: str
    text: tuple[int, ...]
    hold: Hold
    tables: list[list[int]]


class NaiveGroup:
    """One group: what is indexed, what rests, and what every block holds."""

    def __init__(self, block_size: int, total: int) -> None:
        self.block_size, self.total = block_size, total
        self.index: dict[Key, int] = {}
        self.resting: list[int] = []
        self.content: dict[int, Key] = {}

    def key(self, salt: str, text: tuple[int, ...], index: int) -> Key:
        return salt, text[: (index + 1) * self.block_size]

    def hits(self, salt: str, text: tuple[int, ...], limit: int) -> list[int]:
        found: list[int] = []
        while (len(found) + 1) * self.block_size <= limit and self.key(salt, text, len(found)) in self.index:
            found.append(self.index[self.key(salt, text, len(found))])
        return found

    def allocated(self, new: list[int], held: set[int]) -> None:
        """The manager handed these out: they were free, or rested longest once nothing was free."""
        free = set(range(1, self.total + 1)) - held - set(self.resting)
        for block in new:
            if free:
                assert block in free, "a block was taken that was not free"
                free.discard(block)
            else:
                assert self.resting and block == self.resting.pop(0), "not the block that rested longest was evicted"
                del self.index[self.content[block]]
            self.content.pop(block, None)


class KvModel(RuleBasedStateMachine):
    """One cache group of 8 blocks."""

    GROUPS: tuple[tuple[int, int], ...] = ((2, 8),)
    STRIDE = 2

    def __init__(self) -> None:
        super().__init__()
        layouts = tuple(
            KvGroupLayout(KvGroupSpec(1, 1, 1, "float32", group_id=g), bs, total + 1)
            for g, (bs, total) in enumerate(self.GROUPS)
        )
        self.kv = KVCacheManager(KvLayout(layouts, 1 << 20), "fp", True)
        self.groups = [NaiveGroup(bs, total) for bs, total in self.GROUPS]
        self.owners: dict[SessionId, Owner] = {}
        self.next = 0

    # ---- rules

    @rule(text=PROMPTS, salt=SALTS, extra=st.integers(0, 4))
    def acquire(self, text: tuple[int, ...], salt: str, extra: int) -> None:
        self.next += 1
        owner, num_tokens = SessionId(self.next), len(text) + extra
        limit = (len(text) - 1) // self.STRIDE * self.STRIDE
        for g in self.groups:
            limit = min(limit, len(g.hits(salt, text, limit)) * g.block_size) // self.STRIDE * self.STRIDE
        hits = [g.hits(salt, text, limit) for g in self.groups]
        fits = all(
            -(-num_tokens // g.block_size) - len(h) <= g.total - len(self.held(i) | set(h))
            for i, (g, h) in enumerate(zip(self.groups, hits, strict=True))
        )
        assert self.kv.lookup(text, salt) == limit
        got = self.kv.acquire(owner, text, num_tokens, salt)
        assert got == (Acquired(limit) if fits else None)
        if got is None:
            assert not self.kv.holds(owner)
            return
        tables = self.kv.block_ids(owner)
        for i, (g, h, table) in enumerate(zip(self.groups, hits, tables, strict=True)):
            assert table[: len(h)] == h and len(table) == -(-num_tokens // g.block_size)
            g.resting = [b for b in g.resting if b not in h]
            g.allocated(table[len(h) :], self.held(i) | set(h))
        self.owners[owner] = Owner(salt, text, Hold.USED, [list(t) for t in tables])

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), new=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def grow(self, data: st.DataObject, new: list[int]) -> None:
        name, owner = self.some(data)
        num_tokens = len(owner.text) + len(new)
        fits = all(
            -(-num_tokens // g.block_size) - len(owner.tables[i]) <= g.total - len(self.held(i))
            for i, g in enumerate(self.groups)
        )
        assert self.kv.grow(name, num_tokens) is fits
        if not fits:
            return
        owner.text += tuple(new)
        for i, (g, table) in enumerate(zip(self.groups, self.kv.block_ids(name), strict=True)):
            old = owner.tables[i]
            assert table[: len(old)] == old
            g.allocated(table[len(old) :], self.held(i))
            owner.tables[i] = list(table)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        name, owner = self.some(data)
        computed = data.draw(st.integers(0, len(owner.text)))
        if owner.hold is Hold.QUARANTINED:
            try:
                self.kv.commit(name, owner.text, computed)
            except InternalError:
                return
            raise AssertionError("a quarantined owner's blocks entered the index")
        self.kv.commit(name, owner.text, computed)
        for i, g in enumerate(self.groups):
            for index, block in enumerate(owner.tables[i][: computed // g.block_size]):
                key = g.key(owner.salt, owner.text, index)
                assert g.content.setdefault(block, key) == key
                g.index.setdefault(key, block)

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), hold=st.sampled_from(Hold))
    def mark(self, data: st.DataObject, hold: Hold) -> None:
        name, owner = self.some(data)
        self.kv.mark(name, hold)
        owner.hold = hold

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name, owner = self.some(data)
        self.kv.release(name)
        del self.owners[name]
        for i, g in enumerate(self.groups):
            indexed = set(g.index.values())
            g.resting += [b for b in reversed(owner.tables[i]) if b in indexed and b not in self.held(i)]

    @rule()
    def a_stranger_changes_nothing(self) -> None:
        self.kv.release(SessionId(0))
        try:
            self.kv.commit(SessionId(0), (1, 2), 2)
        except InternalError:
            return
        raise AssertionError("a stranger committed")

    # ---- what always holds

    @invariant()
    def conserved(self) -> None:
        self.kv.check_conservation()

    @invariant()
    def accounts_agree(self) -> None:
        want = dict.fromkeys(KvUsage.__struct_fields__, 0)
        for i, g in enumerate(self.groups):
            want["total"] += g.total
            for block in range(1, g.total + 1):
                holds = {o.hold for o in self.owners.values() if block in o.tables[i]}
                states = [h.value for h in (Hold.QUARANTINED, Hold.PINNED, Hold.USED) if h in holds]
                want[states[0] if states else "cached" if block in g.resting else "free"] += 1
        assert self.kv.usage() == KvUsage(**want)
        assert self.kv.available() == want["free"] + want["cached"]

    @invariant()
    def shared_blocks_hold_what_both_owners_mean(self) -> None:
        for i, g in enumerate(self.groups):
            seen: dict[int, Key] = {}
            for owner in self.owners.values():
                for index, block in enumerate(owner.tables[i]):
                    key = g.key(owner.salt, owner.text, index)
                    assert 0 < block <= g.total
                    assert block not in seen or seen[block] == key == g.content.get(block)
                    seen[block] = key

    @invariant()
    def tables_stay(self) -> None:
        for name, owner in self.owners.items():
            assert [list(t) for t in self.kv.block_ids(name)] == owner.tables

    # ---- helpers

    def held(self, group: int) -> set[int]:
        return {block for owner in self.owners.values() for block in owner.tables[group]}

    def some(self, data: st.DataObject) -> tuple[SessionId, Owner]:
        return data.draw(st.sampled_from(sorted(self.owners.items(), key=lambda item: item[0])))


class KvModelTwoGroups(KvModel):
    """Two groups that differ in block size and in blocks."""

    GROUPS = ((2, 9), (4, 5))
    STRIDE = 4


_SETTINGS = settings(
    max_examples=120, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
TestKvModel = KvModel.TestCase
TestKvModel.settings = _SETTINGS
TestKvModelTwoGroups = KvModelTwoGroups.TestCase
TestKvModelTwoGroups.settings = _SETTINGS
