"""Which bytes a session may write, and what its blocks add up to."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_core.transfer.checksum import BlockChecksum, comparable
from engine_core.transfer.grants import Grant
from engine_core.transfer.recent import Recent
from engine_core.types.kv import KvLayout
from tests.support.builders import group, layout
from tests.support.transfer import block_layout


def covers(grant: Grant, *pieces: tuple[int, int]) -> bool:
    columns = np.array(pieces, dtype=np.int64).reshape(-1, 2)
    return grant.covers(columns[:, 0], columns[:, 1])


def test_a_grant_is_its_blocks() -> None:
    grant = Grant(block_layout(9, 4096), ((2, 3, 7),))
    assert covers(grant, (8192, 8192), (28672, 4096), (10000, 1)) and covers(grant)
    for piece in ((8191, 1), (8192, 8193), (16384, 1), (28672, 4097), (0, 4096), (-1, 1), (8192, -1)):
        assert not covers(grant, piece), piece
        assert not covers(grant, (8192, 1), piece)
    assert not covers(grant, (8192, (1 << 63) - 1)) and not covers(grant, ((1 << 63) - 1, 1))


def test_no_blocks_grant_nothing() -> None:
    grant = Grant(block_layout(), ((),))
    assert covers(grant) and not covers(grant, (4096, 1))


@pytest.mark.parametrize("ids", [(0,), (9,), (1, 1)])
def test_blocks_outside_the_pool_are_refused(ids: tuple[int, ...]) -> None:
    with pytest.raises(ValueError):
        Grant(block_layout(9), (ids,))


@settings(max_examples=50, deadline=None)
@given(
    st.sets(st.integers(1, 7)),
    st.integers(0, 8 * 256 - 1),
    st.integers(1, 600),
    st.sampled_from(["NB_NL_TWO_BS_NH_HS", "NL_TWO_NB_BS_NH_HS", "NL_NB_TWO_NH_BS_HS"]),
)
def test_a_grant_allows_what_a_byte_map_allows(blocks: set[int], at: int, n: int, order: str) -> None:
    one = layout(8, 2, groups=(group(num_layers=2, num_heads=1, head_size=8),))
    part = one.groups[0]
    assert part.block_bytes == 256
    pool = KvLayout((type(part)(part.spec, 2, 8, dim_order=order),), one.region_bytes)
    # An independent account of which bytes belong to a block, by numpy's own indexing.
    sizes = {"NB": 8, "NL": 2, "TWO": 2, "BS": 2, "NH": 1, "HS": 8}
    names = order.split("_")
    owner = np.zeros([sizes[d] for d in names], np.int64)
    owner += np.arange(8).reshape([8 if d == "NB" else 1 for d in names])
    allowed = np.isin(np.repeat(owner.ravel(), 4), sorted(blocks))
    expected = at + n <= len(allowed) and bool(allowed[at : at + n].all())
    assert covers(Grant(pool, (tuple(sorted(blocks)),)), (at, n)) == expected


def test_checksum_of_one_group_is_crc32_of_its_blocks_in_order() -> None:
    pool = np.random.default_rng(0).integers(0, 256, 9 * 4096, np.uint8)
    checksum = BlockChecksum(block_layout(9, 4096))
    view = memoryview(pool).cast("B")
    checksum.update(view, ((3, 1),))
    checksum.update(view, ((8,),))
    expected = b"".join(pool[i * 4096 : (i + 1) * 4096].tobytes() for i in (3, 1, 8))
    assert checksum.value == zlib.crc32(expected)


def test_checksum_does_not_depend_on_how_groups_were_cut_into_pushes() -> None:
    two = layout(6, 2, groups=(group(), group(num_layers=1)))
    view = memoryview(np.random.default_rng(1).integers(0, 256, two.region_bytes, np.uint8)).cast("B")
    at_once, in_parts = BlockChecksum(two), BlockChecksum(two)
    at_once.update(view, ((1, 2, 3), (4, 5, 1)))
    for ids in (((1,), (4,)), ((2, 3), ()), ((), (5, 1))):
        in_parts.update(view, ids)
    assert at_once.value == in_parts.value
    in_parts.update(view, ((4,), ()))
    assert at_once.value != in_parts.value


def test_checksum_of_a_layer_major_pool_equals_that_of_its_copy() -> None:
    """Blocks lie in pieces there; two pools of different size hold them in one order."""
    order = "NL_NB_TWO_BS_NH_HS"
    pools = []
    for num_blocks in (4, 7):
        part = layout(num_blocks, 2).groups[0]
        pools.append(KvLayout((type(part)(part.spec, 2, num_blocks, dim_order=order),), part.block_bytes * num_blocks))
    small, large = pools
    assert comparable(small, large) and not comparable(small, layout(4, 2))
    a = np.random.default_rng(2).integers(0, 256, small.region_bytes, np.uint8)
    b = np.zeros(large.region_bytes, np.uint8)
    half = small.groups[0].block_bytes // 2  # two layers
    for layer in range(2):
        source = a[(layer * 4 + 3) * half : (layer * 4 + 4) * half]
        b[(layer * 7 + 5) * half : (layer * 7 + 6) * half] = source
    sums = [BlockChecksum(small), BlockChecksum(large)]
    sums[0].update(memoryview(a).cast("B"), ((3,),))
    sums[1].update(memoryview(b).cast("B"), ((5,),))
    assert sums[0].value == sums[1].value != 0


def test_recent_forgets_the_oldest() -> None:
    recent: Recent[int, str] = Recent(2)
    for i in (1, 2, 1, 3):
        recent[i] = str(i)
    assert (recent.get(2), recent.get(1), recent.get(3), len(recent)) == (None, "1", "3", 2)
    assert recent.pop(1) == "1" and recent.pop(1) is None and 3 in recent
