"""The copy plan against a brute-force copy of small tensors, and the plans that are known by hand."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from engine_core.transfer.copy_plan import CopyOps, expected_bytes, plan_copy
from engine_core.types.kv import DTYPE_BYTES, KvGroupLayout, KvGroupSpec, KvLayout

ORDERS = ["_".join((*p, "HS")) for p in itertools.permutations(["NB", "NL", "TWO", "BS", "NH"])]


def group(num_blocks: int = 8, *, heads: int = 2, first_head: int = 0, order: str = "NB_NL_TWO_BS_NH_HS",
          block_size: int = 4, offset: int = 0, layers: int = 3, head_size: int = 5, dtype: str = "float32",
          kv_size: int = 2, group_id: int = 0) -> KvGroupLayout:  # fmt: skip
    spec = KvGroupSpec(layers, heads, head_size, dtype, kv_size=kv_size, group_id=group_id)
    return KvGroupLayout(spec, block_size, num_blocks, first_head=first_head, offset=offset, dim_order=order)


def layout(*groups: KvGroupLayout) -> KvLayout:
    return KvLayout(groups, max((g.offset + g.num_blocks * g.block_bytes for g in groups), default=0))


def ops(plan: CopyOps) -> list[tuple[int, int, int]]:
    return list(zip(plan.src_offset.tolist(), plan.dst_offset.tolist(), plan.nbytes.tolist(), strict=True))


def view(region: np.ndarray, g: KvGroupLayout) -> np.ndarray:
    """The group's tensor [NB, NL, TWO, BS, NH, HS, bytes per element] over the region's bytes."""
    size = DTYPE_BYTES[g.spec.dtype]
    sizes = {"NB": g.num_blocks, "NL": g.spec.num_layers, "TWO": g.spec.kv_size, "BS": g.block_size,
             "NH": g.spec.num_heads, "HS": g.spec.head_size}  # fmt: skip
    order = g.dim_order.split("_")
    tensor = region[g.offset : g.offset + g.num_blocks * g.block_bytes].reshape([*(sizes[d] for d in order), size])
    return tensor.transpose([*(order.index(d) for d in ("NB", "NL", "TWO", "BS", "NH", "HS")), 6])


def apply(plan: CopyOps, src: np.ndarray, dst: np.ndarray) -> None:
    for s, d, n in ops(plan):
        assert n > 0 and s >= 0 and d >= 0 and s + n <= len(src) and d + n <= len(dst)
        dst[d : d + n] = src[s : s + n]


@st.composite
def cases(draw: st.DrawFn) -> tuple[KvLayout, KvLayout, list[list[int]], list[list[int]]]:
    """Two layouts of one model, cut differently, and block lists."""
    sides: tuple[list[KvGroupLayout], list[KvGroupLayout]] = ([], [])
    ids: tuple[list[list[int]], list[list[int]]] = ([], [])
    offsets = [draw(st.integers(0, 40)), draw(st.integers(0, 40))]
    for g in range(draw(st.integers(1, 2))):
        shared = {
            "layers": draw(st.integers(1, 3)), "head_size": draw(st.integers(1, 3)), "group_id": g,
            "block_size": draw(st.integers(1, 3)), "kv_size": draw(st.integers(1, 2)),
            "dtype": draw(st.sampled_from(sorted(DTYPE_BYTES))),
        }  # fmt: skip
        same = draw(st.booleans())
        order, heads, first = draw(st.sampled_from(ORDERS)), draw(st.integers(1, 4)), draw(st.integers(0, 4))
        count = draw(st.integers(0, 5))
        for side in range(2):
            if side and not same:
                order, heads, first = draw(st.sampled_from(ORDERS)), draw(st.integers(1, 4)), draw(st.integers(0, 4))
            num_blocks = draw(st.integers(count + 1, 8))
            made = group(num_blocks, heads=heads, first_head=first, order=order, offset=offsets[side], **shared)
            offsets[side] += made.num_blocks * made.block_bytes + draw(st.integers(0, 9))
            sides[side].append(made)
            chosen = st.permutations(range(1, num_blocks)).map(lambda p, n=count: list(p)[:n])
            run = st.integers(1, num_blocks - count).map(lambda s, n=count: list(range(s, s + n)))
            ids[side].append(draw(st.one_of(chosen, run)))
    return layout(*sides[0]), layout(*sides[1]), ids[0], ids[1]


@settings(max_examples=400, deadline=None, derandomize=True)
@given(cases())
def test_any_plan_copies_what_an_elementwise_copy_does(
    case: tuple[KvLayout, KvLayout, list[list[int]], list[list[int]]],
) -> None:
    src, dst, src_ids, dst_ids = case
    rng = np.random.default_rng(0)
    source = rng.integers(1, 256, src.region_bytes, dtype=np.uint8)
    target = np.zeros(dst.region_bytes, np.uint8)
    want = target.copy()
    for s, d, s_list, d_list in zip(src.groups, dst.groups, src_ids, dst_ids, strict=True):
        from_, to = view(source, s), view(want, d)
        for head in range(20):
            a, b = head - s.first_head, head - d.first_head
            if 0 <= a < s.spec.num_heads and 0 <= b < d.spec.num_heads:
                for i, j in zip(s_list, d_list, strict=True):
                    to[j, :, :, :, b] = from_[i, :, :, :, a]
    plan = plan_copy(src, dst, src_ids, dst_ids)
    apply(plan, source, target)
    assert np.array_equal(target, want)
    assert plan.total_bytes == expected_bytes(dst, src, [len(d) for d in dst_ids]) == int((want != 0).sum())
    assert {a.dtype for a in (plan.src_offset, plan.dst_offset, plan.nbytes)} == {np.dtype(np.int64)}
    for before, after in itertools.pairwise(ops(plan)):
        assert (before[0] + before[2], before[1] + before[2]) != after[:2], "neighbours were not merged"


def test_equal_layouts_copy_whole_blocks_and_join_neighbours() -> None:
    g = group()
    size = g.block_bytes
    assert size == 3 * 2 * 4 * 2 * 5 * 4
    plan = plan_copy(layout(g), layout(g), [[1, 2, 3, 6, 5]], [[4, 5, 6, 1, 2]])
    assert ops(plan) == [(size, 4 * size, 3 * size), (6 * size, size, size), (5 * size, 2 * size, size)]
    assert plan.total_bytes == 5 * size
    assert len(plan) == 3


def test_blocks_of_unlike_pools_start_at_their_group_offsets() -> None:
    a, b = group(4, offset=100), group(9, offset=7)
    size = a.block_bytes
    assert ops(plan_copy(layout(a), layout(b), [[3]], [[8]])) == [(100 + 3 * size, 7 + 8 * size, size)]


def test_layers_outside_blocks_give_one_run_per_layer_and_run_of_blocks() -> None:
    g = group(order="NL_TWO_NB_BS_NH_HS", layers=2)
    one = 4 * 2 * 5 * 4
    plan = plan_copy(layout(g), layout(g), [[1, 2]], [[3, 4]])
    assert ops(plan) == [(p * 8 * one + one, p * 8 * one + 3 * one, 2 * one) for p in range(4)]


def test_a_whole_rank_feeds_the_second_of_two_half_ranks() -> None:
    src, dst = group(3, heads=4, layers=1, block_size=2), group(3, heads=2, first_head=2, layers=1, block_size=2)
    half = 2 * 5 * 4
    plan = plan_copy(layout(src), layout(dst), [[1]], [[2]])
    assert ops(plan) == [(src.block_bytes + (2 * t + 1) * half, 2 * dst.block_bytes + t * half, half) for t in range(4)]


def test_two_half_ranks_fill_a_whole_one() -> None:
    whole = layout(group(3, heads=4))
    target = np.zeros(whole.region_bytes, np.uint8)
    for first in (0, 2):
        half = layout(group(3, heads=2, first_head=first))
        apply(plan_copy(half, whole, [[2]], [[1]]), np.full(half.region_bytes, 1 + first, np.uint8), target)
        assert expected_bytes(whole, half, 1) * 2 == whole.groups[0].block_bytes
    block = view(target, whole.groups[0])[1]
    assert (block[..., :2, :, :] == 1).all() and (block[..., 2:, :, :] == 3).all()


def test_replicas_copy_whole_blocks() -> None:
    mla = group(kv_size=1, heads=1)
    assert ops(plan_copy(layout(mla), layout(mla), [[2]], [[3]])) == [
        (2 * mla.block_bytes, 3 * mla.block_bytes, mla.block_bytes)
    ]


def test_ranks_without_a_common_head_copy_nothing() -> None:
    a, b = layout(group(heads=2)), layout(group(heads=2, first_head=2))
    plan = plan_copy(a, b, [[1, 2]], [[1, 2]])
    assert len(plan) == plan.total_bytes == expected_bytes(b, a, 2) == 0


def test_no_blocks_are_an_empty_plan() -> None:
    g = layout(group())
    plan = plan_copy(g, g, [[]], [[]])
    assert (len(plan), plan.total_bytes) == (0, 0)


def test_expected_bytes_takes_one_count_or_one_per_group() -> None:
    a = group(4)
    two = layout(a, group(4, group_id=1, layers=1, offset=4 * a.block_bytes))
    sizes = [g.block_bytes for g in two.groups]
    assert expected_bytes(two, two, 3) == 3 * sum(sizes)
    assert expected_bytes(two, two, [1, 2]) == sizes[0] + 2 * sizes[1]
    with pytest.raises(ValueError, match="1 block counts were given for 2 groups"):
        expected_bytes(two, two, [1])


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("num_layers", group(layers=2)),
        ("kv_size", group(kv_size=1)),
        ("head_size", group(head_size=4)),
        ("dtype", group(dtype="bfloat16")),
        ("block_size", group(block_size=2)),
        ("group_id", group(group_id=1)),
    ],
)
def test_what_differs_is_named(name: str, other: KvGroupLayout) -> None:
    for src, dst in ((layout(group()), layout(other)), (layout(other), layout(group()))):
        with pytest.raises(ValueError, match=f"{name} of cache group 0 differs"):
            plan_copy(src, dst, [[1]], [[1]])
        with pytest.raises(ValueError, match=f"{name} of cache group 0 differs"):
            expected_bytes(dst, src, 1)


def test_unlike_group_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="cache groups differ: source has 1, destination 2"):
        plan_copy(layout(group()), layout(group(), group(group_id=1)), [[1]], [[1]])


@pytest.mark.parametrize("order", ["NB_NL_TWO_BS_NH", "NB_NL_TWO_BS_HS_NH", "NB_NB_TWO_BS_NH_HS", "NL_X_NB_BS_HS", ""])
def test_dimension_orders_that_are_not_ours_are_refused(order: str) -> None:
    with pytest.raises(ValueError, match="dim_order"):
        plan_copy(layout(group(order=order)), layout(group()), [[1]], [[1]])


@pytest.mark.parametrize("block", [0, -1, 8, 1 << 40])
def test_ids_outside_the_pool_are_refused_on_either_side(block: int) -> None:
    g = layout(group())
    with pytest.raises(ValueError, match=f"block id {block} of source group 0 is outside 1 … 7"):
        plan_copy(g, g, [[1, block]], [[1, 2]])
    with pytest.raises(ValueError, match=f"block id {block} of destination group 0 is outside 1 … 7"):
        plan_copy(g, g, [[1, 2]], [[1, block]])


def test_lists_that_do_not_pair_up_are_refused() -> None:
    g = layout(group())
    with pytest.raises(ValueError, match="1 source blocks can't fill 2 destination blocks"):
        plan_copy(g, g, [[1]], [[1, 2]])
    with pytest.raises(ValueError, match="2 and 1 block lists were given for 1 groups"):
        plan_copy(g, g, [[1], [1]], [[1]])
    with pytest.raises(ValueError, match="a block of destination group 0 is named twice"):
        plan_copy(g, g, [[1, 2]], [[3, 3]])
    assert len(plan_copy(g, g, [[3, 3]], [[1, 2]])) == 2


def test_blocks_outside_the_region_are_refused() -> None:
    g = group()
    short = KvLayout((g,), g.num_blocks * g.block_bytes - 1)
    with pytest.raises(ValueError, match="destination group 0 ends at byte"):
        plan_copy(layout(g), short, [[1]], [[1]])
    with pytest.raises(ValueError, match="source group 0 ends at byte"):
        plan_copy(short, layout(g), [[1]], [[1]])
