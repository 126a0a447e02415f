"""BlockPool: references, accounts, eviction order, and what it refuses."""

from __future__ import annotations

import pytest

from engine_core.kv.api import Hold
from engine_core.kv.block_pool import BlockPool
from engine_core.types.errors import InternalError
from engine_core.types.kv import KvUsage


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(5)
    assert pool.total == pool.available == 4
    assert pool.allocate(4, Hold.USED) == [1, 2, 3, 4]
    assert pool.available == 0


def test_allocating_more_than_available_changes_nothing() -> None:
    pool = BlockPool(4)
    pool.allocate(1, Hold.USED)
    with pytest.raises(InternalError, match="3 blocks were to be allocated and 2 are available"):
        pool.allocate(3, Hold.USED)
    assert pool.usage() == KvUsage(total=3, free=2, used=1)


def test_a_table_that_is_freed_comes_back_contiguous() -> None:
    pool = BlockPool(9)
    first, second = pool.allocate(4, Hold.USED), pool.allocate(4, Hold.USED)
    pool.drop(second, Hold.USED)
    pool.drop(first, Hold.USED)
    assert pool.allocate(8, Hold.USED) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_block_freed_twice_is_caught() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2, Hold.USED)
    pool.drop(blocks, Hold.USED)
    with pytest.raises(InternalError, match="block 2 was given back by someone who does not hold it"):
        pool.drop(blocks, Hold.USED)
    assert pool.usage() == KvUsage(total=3, free=3)


@pytest.mark.parametrize("block", [0, -1, 4])
def test_ids_outside_the_pool_are_caught(block: int) -> None:
    pool = BlockPool(4)
    pool.allocate(3, Hold.USED)
    with pytest.raises(InternalError, match="does not hold"):
        pool.drop([block], Hold.USED)


def test_giving_back_under_another_hold_is_caught() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(1, Hold.QUARANTINED)
    with pytest.raises(InternalError):
        pool.drop(blocks, Hold.USED)


def test_each_block_counts_once_in_the_strongest_hold() -> None:
    pool = BlockPool(6)
    (block,) = pool.allocate(1, Hold.USED)
    assert pool.index(block, b"d")
    pool.share([block], Hold.PINNED)
    assert pool.usage() == KvUsage(total=5, free=4, pinned=1)
    pool.share([block], Hold.QUARANTINED)
    assert pool.usage() == KvUsage(total=5, free=4, quarantined=1)
    pool.rehold([block], Hold.QUARANTINED, Hold.USED)
    assert pool.usage() == KvUsage(total=5, free=4, pinned=1)
    pool.drop([block], Hold.PINNED)
    assert pool.usage() == KvUsage(total=5, free=4, used=1)
    pool.drop([block], Hold.USED)
    pool.drop([block], Hold.USED)
    assert pool.usage() == KvUsage(total=5, free=4, cached=1)
    pool.check({})


def test_free_blocks_go_first_then_the_longest_rested_tails_before_heads() -> None:
    pool = BlockPool(6)
    old, young = pool.allocate(2, Hold.USED), pool.allocate(2, Hold.USED)
    for block in old + young:
        pool.index(block, bytes([block]))
    pool.drop(old, Hold.USED)
    pool.drop(young, Hold.USED)
    assert pool.available == 5
    assert pool.allocate(1, Hold.USED) == [5]
    assert pool.evictions == 0
    assert pool.allocate(3, Hold.USED) == [2, 1, 4]
    assert pool.evictions == 3
    assert pool.prefix.find(bytes([3])) == 3
    assert pool.prefix.find(bytes([1])) is None


def test_a_shared_block_is_not_evictable() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2, Hold.USED)
    for block in blocks:
        pool.index(block, bytes([block]))
    pool.drop(blocks, Hold.USED)
    pool.share([1], Hold.USED)
    assert pool.available == 1
    assert pool.allocate(1, Hold.USED) == [2]


def test_only_indexed_blocks_are_shared_and_only_held_ones_indexed() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1, Hold.USED)
    with pytest.raises(InternalError, match="can't be shared"):
        pool.share([block], Hold.USED)
    with pytest.raises(InternalError, match="held by nobody"):
        pool.index(2, b"d")
    with pytest.raises(InternalError, match="held by nobody"):
        pool.index(0, b"d")


def test_the_same_content_enters_the_index_once() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2, Hold.USED)
    assert pool.index(first, b"d")
    assert not pool.index(second, b"d")
    assert pool.index(first, b"d")
    with pytest.raises(InternalError, match="is indexed as"):
        pool.index(first, b"e")
    pool.drop([first, second], Hold.USED)
    assert pool.usage() == KvUsage(total=3, free=2, cached=1)


def test_check_names_a_reference_that_nobody_has() -> None:
    pool = BlockPool(4)
    pool.allocate(1, Hold.USED)
    with pytest.raises(InternalError, match="block 1 has 1 used references; the owners' tables show 0"):
        pool.check({})
    pool.check({Hold.USED: {1: 1}})


def test_a_pool_without_a_null_block_is_refused() -> None:
    with pytest.raises(InternalError):
        BlockPool(0)
    assert BlockPool(1).available == 0
