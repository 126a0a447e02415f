"""The KvManager contract, line by line, on KVCacheManager with one cache group and with two."""

from __future__ import annotations

import pytest

from engine_core.kv.api import Acquired, Hold, KvManager
from engine_core.kv.manager import KVCacheManager
from engine_core.types.errors import InternalError
from engine_core.types.ids import SessionId
from engine_core.types.kv import KvGroupLayout, KvGroupSpec, KvLayout, KvUsage

A, B, C = SessionId(1), SessionId(2), SessionId(3)
BS = 4


def layout(*groups: tuple[int, int]) -> KvLayout:
    """A layout of groups given as (block size, blocks with the null block)."""
    parts = tuple(
        KvGroupLayout(KvGroupSpec(1, 1, 4, "float32", group_id=g), block_size, num_blocks)
        for g, (block_size, num_blocks) in enumerate(groups)
    )
    return KvLayout(parts, sum(p.block_bytes * p.num_blocks for p in parts))


@pytest.fixture(params=[1, 2], ids=["one-group", "two-groups"])
def groups(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def kv(groups: int) -> KVCacheManager:
    """Room for 8 blocks of 4 tokens per group."""
    return KVCacheManager(layout(*[(BS, 9)] * groups), "fp", True)


def text(n: int, start: int = 0) -> tuple[int, ...]:
    return tuple(range(start, start + n))


def cache(kv: KvManager, tokens: tuple[int, ...], salt: str = "") -> None:
    """Leaves the full blocks of tokens in the prefix index."""
    owner = SessionId(999)
    assert kv.acquire(owner, tokens, len(tokens), salt) is not None
    kv.commit(owner, tokens, len(tokens))
    kv.release(owner)


def test_blocks_needed_and_available(kv: KVCacheManager, groups: int) -> None:
    assert [kv.blocks_needed(n) for n in (0, 1, 4, 5, 32)] == [0, groups, groups, 2 * groups, 8 * groups]
    assert kv.available() == 8 * groups
    cache(kv, text(8))
    assert kv.available() == 8 * groups, "cached blocks are evictable"
    kv.acquire(A, text(9), 12, "")
    assert kv.available() == 5 * groups


def test_acquire_covers_num_tokens_in_every_group(kv: KVCacheManager, groups: int) -> None:
    assert kv.acquire(A, text(5), 9, "") == Acquired(0)
    assert [len(t) for t in kv.block_ids(A)] == [3] * groups
    assert kv.holds(A) and not kv.holds(B)
    assert kv.usage() == KvUsage(total=8 * groups, free=5 * groups, used=3 * groups)


def test_acquire_is_all_or_nothing(kv: KVCacheManager, groups: int) -> None:
    kv.acquire(A, text(20), 20, "")
    before = kv.usage()
    assert kv.acquire(B, text(16, 100), 16, "") is None
    assert kv.usage() == before and not kv.holds(B)
    assert kv.acquire(B, text(12, 100), 12, "") == Acquired(0)


def test_acquire_twice_is_a_broken_promise(kv: KVCacheManager) -> None:
    kv.acquire(A, text(4), 4, "")
    with pytest.raises(InternalError, match="holds blocks already"):
        kv.acquire(A, text(4), 4, "")
    with pytest.raises(InternalError, match="acquires 0 tokens"):
        kv.acquire(B, text(4), 0, "")


@pytest.mark.parametrize(
    ("asked", "found"), [(0, 0), (1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12), (30, 12)]
)
def test_a_hit_leaves_at_least_one_token_to_compute(kv: KVCacheManager, asked: int, found: int) -> None:
    cache(kv, text(14))
    assert kv.lookup(text(asked), "") == found
    if asked:
        assert kv.acquire(A, text(asked), asked, "") == Acquired(found)
        kv.check_conservation()


def test_lookup_changes_nothing(kv: KVCacheManager) -> None:
    cache(kv, text(8))
    cache(kv, text(8, 50))
    before = kv.usage()
    for _ in range(3):
        assert kv.lookup(text(9), "") == 8
    assert kv.usage() == before and kv.figures().query_tokens == 16
    kv.acquire(A, text(20, 100), 20, "")  # evicts one block: still of the text that rested longest
    assert (kv.lookup(text(9), ""), kv.lookup(text(9, 50), "")) == (4, 8)


def test_lookup_sees_what_changed_since(kv: KVCacheManager) -> None:
    tokens = text(9)
    assert kv.lookup(tokens, "") == 0
    cache(kv, text(8))
    assert kv.lookup(tokens, "") == kv.lookup(list(tokens), "") == 8
    kv.acquire(A, text(32, 100), 32, "")
    assert kv.lookup(tokens, "") == 0


def test_salts_and_other_texts_do_not_meet(kv: KVCacheManager) -> None:
    cache(kv, text(8), "tenant")
    assert kv.lookup(text(9), "") == 0
    assert kv.lookup(text(9), "tenant") == 8
    assert kv.lookup((*text(4), 77, *text(4, 5)), "tenant") == 4


def test_a_shared_prefix_is_one_block_with_two_holders(kv: KVCacheManager, groups: int) -> None:
    cache(kv, text(8))
    kv.acquire(A, text(10), 10, "")
    kv.acquire(B, text(11), 12, "")
    for a, b in zip(kv.block_ids(A), kv.block_ids(B), strict=True):
        assert a[:2] == b[:2] and a[2] != b[2]
    assert kv.usage().used == 4 * groups
    kv.release(A)
    assert kv.usage() == KvUsage(total=8 * groups, free=5 * groups, used=3 * groups)
    assert kv.lookup(text(9), "") == 8


@pytest.mark.parametrize(("most", "found"), [(0, 0), (3, 0), (4, 4), (7, 4), (8, 8), (100, 8), (None, 8)])
def test_a_hit_may_be_bounded(kv: KVCacheManager, groups: int, most: int | None, found: int) -> None:
    cache(kv, text(8))
    assert kv.lookup(text(10), "", most) == found
    assert kv.acquire(A, text(10), 10, "", most) == Acquired(found)
    kv.commit(A, text(10), 10)
    kv.check_conservation()
    assert kv.usage().used == 3 * groups and kv.lookup(text(10), "") == 8
    kv.release(A)
    kv.check_conservation()
    assert kv.lookup(text(10), "") == 8


def test_matched_blocks_are_not_evicted_by_their_own_acquire(kv: KVCacheManager, groups: int) -> None:
    cache(kv, text(16))
    assert kv.acquire(A, text(17), 32, "") == Acquired(16)
    assert all(len(set(t)) == 8 for t in kv.block_ids(A))
    kv.check_conservation()
    kv.release(A)
    # Nine blocks are not there, and the four matched ones don't count twice.
    assert kv.acquire(A, text(17), 33, "") is None
    assert kv.usage().cached == 4 * groups


def test_held_blocks_survive_eviction_pressure(kv: KVCacheManager) -> None:
    cache(kv, text(12))
    kv.acquire(A, text(9), 9, "")
    table = [list(t) for t in kv.block_ids(A)]
    assert kv.acquire(B, text(20, 100), 20, "") is not None
    assert [list(t) for t in kv.block_ids(A)] == table
    assert all(not set(a) & set(b) for a, b in zip(kv.block_ids(A), kv.block_ids(B), strict=True))
    assert kv.lookup(text(13), "") == 8


def test_grow_is_all_or_nothing_and_keeps_the_table_live(kv: KVCacheManager, groups: int) -> None:
    kv.acquire(A, text(4), 4, "")
    tables = kv.block_ids(A)
    assert kv.grow(A, 4) and kv.grow(A, 2) and [len(t) for t in tables] == [1] * groups
    assert kv.grow(A, 9) and [len(t) for t in tables] == [3] * groups
    assert not kv.grow(A, 33)
    assert [len(t) for t in tables] == [3] * groups
    assert kv.grow(A, 32) and kv.available() == 0


def test_commit_enters_full_blocks_only(kv: KVCacheManager) -> None:
    kv.acquire(A, text(11), 12, "")
    kv.commit(A, text(11), 7)
    assert kv.lookup(text(12), "") == 4
    kv.commit(A, text(11), 11)
    assert kv.lookup(text(12), "") == 8
    kv.commit(A, text(12), 12)
    assert kv.lookup(text(13), "") == 12
    kv.commit(A, text(12), 12)
    kv.check_conservation()


def test_two_sessions_that_computed_the_same_block(kv: KVCacheManager, groups: int) -> None:
    for owner in (A, B):
        kv.acquire(owner, text(9), 9, "")
    for owner in (A, B):
        kv.commit(owner, text(9), 9)
    kv.check_conservation()
    assert kv.usage().used == 6 * groups
    indexed = [t[:2] for t in kv.block_ids(A)]
    kv.release(B)
    assert kv.usage().cached == 0, "the second one's blocks never entered the index"
    kv.release(A)
    assert kv.usage() == KvUsage(total=8 * groups, free=6 * groups, cached=2 * groups)
    kv.acquire(C, text(9), 9, "")
    assert [t[:2] for t in kv.block_ids(C)] == indexed
    kv.check_conservation()


def test_a_duplicate_continues_the_chain(kv: KVCacheManager) -> None:
    for owner in (A, B):
        kv.acquire(owner, text(5), 12, "")
        kv.commit(owner, text(4), 4)
    kv.commit(B, text(12), 12)  # B's block 0 is a duplicate, its blocks 1 and 2 are the first of their kind
    assert kv.lookup(text(13), "") == 12
    kv.acquire(C, text(13), 13, "")
    for a, b, c in zip(kv.block_ids(A), kv.block_ids(B), kv.block_ids(C), strict=True):
        assert c[:3] == [a[0], b[1], b[2]]
    kv.check_conservation()


def test_commit_refuses_what_can_not_be_whole(kv: KVCacheManager) -> None:
    with pytest.raises(InternalError, match="holds no blocks"):
        kv.commit(A, text(8), 8)
    kv.acquire(A, text(8), 8, "")
    with pytest.raises(InternalError, match="commits 9 of 8 tokens"):
        kv.commit(A, text(8), 9)
    with pytest.raises(InternalError, match="holds blocks for 8"):
        kv.commit(A, text(12), 12)
    kv.mark(A, Hold.QUARANTINED)
    with pytest.raises(InternalError, match="quarantined"):
        kv.commit(A, text(8), 8)
    assert kv.lookup(text(9), "") == 0
    kv.mark(A, Hold.USED)
    kv.commit(A, text(8), 8)
    assert kv.lookup(text(9), "") == 8


def test_commit_of_another_text_is_caught(kv: KVCacheManager) -> None:
    kv.acquire(A, text(4), 12, "")
    kv.commit(A, text(4), 4)
    with pytest.raises(InternalError, match="do not continue"):
        kv.commit(A, text(8, 1), 8)


def test_marks_move_the_account(kv: KVCacheManager, groups: int) -> None:
    kv.acquire(A, text(8), 8, "")
    for hold, field in ((Hold.PINNED, "pinned"), (Hold.QUARANTINED, "quarantined"), (Hold.USED, "used")):
        kv.mark(A, hold)
        assert kv.usage() == KvUsage(**{"total": 8 * groups, "free": 6 * groups, field: 2 * groups})
        kv.check_conservation()
    kv.mark(A, Hold.QUARANTINED)
    assert kv.grow(A, 12)
    assert kv.usage().quarantined == 3 * groups
    kv.release(A)
    assert kv.usage() == KvUsage(total=8 * groups, free=8 * groups)


def test_a_shared_block_counts_in_its_strongest_hold(kv: KVCacheManager, groups: int) -> None:
    cache(kv, text(4))
    kv.acquire(A, text(5), 5, "")
    kv.acquire(B, text(5), 5, "")
    kv.mark(A, Hold.PINNED)
    assert (kv.usage().pinned, kv.usage().used) == (2 * groups, groups)
    kv.mark(B, Hold.QUARANTINED)
    assert (kv.usage().pinned, kv.usage().quarantined) == (groups, 2 * groups)
    kv.release(B)
    assert (kv.usage().pinned, kv.usage().free) == (2 * groups, 6 * groups)
    kv.check_conservation()


def test_release_is_a_no_op_without_a_hold(kv: KVCacheManager, groups: int) -> None:
    kv.release(A)
    kv.acquire(A, text(8), 8, "")
    kv.release(A)
    kv.release(A)
    assert kv.usage() == KvUsage(total=8 * groups, free=8 * groups)
    assert not kv.holds(A)


def test_strangers_are_refused(kv: KVCacheManager) -> None:
    for deed in (lambda: kv.grow(A, 4), lambda: kv.mark(A, Hold.USED), lambda: kv.block_ids(A)):
        with pytest.raises(InternalError, match="holds no blocks"):
            deed()


def test_without_the_prefix_index_nothing_is_found(groups: int) -> None:
    kv = KVCacheManager(layout(*[(BS, 9)] * groups), "fp", False)
    cache(kv, text(8))
    assert kv.lookup(text(9), "") == 0
    assert kv.acquire(A, text(9), 9, "") == Acquired(0)
    with pytest.raises(InternalError):
        kv.commit(A, text(9), 13)
    assert kv.usage().cached == 0 and kv.figures().query_tokens == 0


def test_figures_count_what_acquire_found(kv: KVCacheManager, groups: int) -> None:
    cache(kv, text(8))
    kv.acquire(A, text(10), 10, "")
    kv.acquire(B, text(100, 200), 400, "")  # refused: counts for nothing
    kv.release(A)
    kv.acquire(C, text(32, 100), 32, "")
    assert (kv.prefix_query_tokens, kv.prefix_hit_tokens, kv.evictions) == (8 + 10 + 32, 8, 2 * groups)


def test_fingerprints_set_indexes_apart() -> None:
    one, two = (KVCacheManager(layout((BS, 9)), fp, True) for fp in ("fp", "fq"))
    cache(one, text(8))
    cache(two, text(8))
    digests = [set(m._groups[0]._pool.prefix._blocks) for m in (one, two)]
    assert not digests[0] & digests[1]


def test_groups_of_unequal_block_size_hit_at_common_borders() -> None:
    kv = KVCacheManager(layout((4, 9), (6, 9)), "fp", True)
    assert kv.blocks_needed(13) == 4 + 3
    cache(kv, text(24))
    assert [kv.lookup(text(n), "") for n in (12, 13, 24, 25, 40)] == [0, 12, 12, 24, 24]
    kv.acquire(A, text(20), 20, "")
    assert [len(t) for t in kv.block_ids(A)] == [5, 4]
    kv.check_conservation()


def test_the_smaller_group_bounds_what_fits() -> None:
    kv = KVCacheManager(layout((4, 9), (4, 4)), "fp", True)
    assert kv.could_fit(12) and not kv.could_fit(13)
    assert kv.acquire(A, text(13), 13, "") is None
    assert kv.usage().free == kv.usage().total == 11
    kv.acquire(A, text(12), 12, "")
    assert not kv.grow(A, 13)
    assert [len(t) for t in kv.block_ids(A)] == [3, 3]


def test_conservation_names_what_is_broken(kv: KVCacheManager) -> None:
    kv.acquire(A, text(8), 8, "")
    kv.block_ids(A)[0].pop()
    with pytest.raises(InternalError, match="block 2 has 1 used references; the owners' tables show 0"):
        kv.check_conservation()


def test_disowned_blocks_stay_held_and_are_not_found_again(kv: KVCacheManager, groups: int) -> None:
    cache(kv, text(8))
    kv.acquire(A, text(16), 16, "")
    kv.commit(A, text(16), 16)
    kv.acquire(B, text(9), 9, "")  # shares the first two blocks
    kv.disown(A)
    kv.check_conservation()
    assert kv.lookup(text(17), "") == 8, "what another holds too stays"
    assert kv.usage().used == 5 * groups
    kv.release(A)
    kv.check_conservation()
    assert kv.usage() == KvUsage(total=8 * groups, free=5 * groups, used=3 * groups)
    kv.release(B)
    kv.disown(B)
    assert kv.usage().cached == 2 * groups
    kv.check_conservation()
