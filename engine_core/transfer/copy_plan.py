"""Two layouts and two block lists become byte copies. Pure and vectorised; no transport is known here.

How a group is planned:
1. The ranks' heads are intersected: unequal tensor parallelism copies slices, replicas copy all.
2. From the fastest dimension outwards, whatever lies contiguous on both sides joins one run of bytes.
   With equal layouts that takes in the whole block.
3. The other dimensions span a grid of run offsets, on either side, in the destination's order.
4. Runs that follow each other on both sides are merged, across blocks and groups.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine_core.types.kv import DTYPE_BYTES, KvGroupLayout, KvLayout

Offsets = NDArray[np.int64]

_DIMS = frozenset(("NB", "NL", "TWO", "BS", "NH", "HS"))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CopyOps:
    """Copy nbytes[i] bytes from src_offset[i] to dst_offset[i], all in bytes from the regions' starts.

    Three int64 arrays [n], to be treated as read-only. Destinations never overlap.
    """

    src_offset: Offsets
    dst_offset: Offsets
    nbytes: Offsets

    def __len__(self) -> int:
        return len(self.nbytes)

    @property
    def total_bytes(self) -> int:
        """Bytes copied in all."""
        return int(self.nbytes.sum())


def plan_copy(
    src: KvLayout, dst: KvLayout, src_blocks: Sequence[Sequence[int]], dst_blocks: Sequence[Sequence[int]]
) -> CopyOps:
    """Plans the copy of whole blocks, src_blocks[g][i] to dst_blocks[g][i] for every group g.

    Ops keep the order of the block list where blocks are the destination's slowest dimension. Heads that
    the source does not have are left out; `expected_bytes` says how much is to come. Raises ValueError,
    naming what is wrong: layouts that differ in more than head range and dimension order, lists of
    unequal length, ids that are 0 or beyond the pool, a destination named twice, blocks outside the region.
    """
    check_compatible(src, dst)
    _check_regions("source", src)
    _check_regions("destination", dst)
    if not len(src_blocks) == len(dst_blocks) == len(src.groups):
        raise ValueError(f"{len(src_blocks)} and {len(dst_blocks)} block lists were given for {len(src.groups)} groups")
    parts = [
        _plan_group(s, d, _ids(f"source group {g}", s, src_ids), _ids(f"destination group {g}", d, dst_ids, once=True))
        for g, (s, d, src_ids, dst_ids) in enumerate(zip(src.groups, dst.groups, src_blocks, dst_blocks, strict=True))
    ]
    return _merge(*(np.concatenate([part[i] for part in parts]) for i in range(3)))


def expected_bytes(dst: KvLayout, src: KvLayout, num_blocks: int | Sequence[int]) -> int:
    """Bytes that this source writes into num_blocks blocks of the destination (one number, or one per group).

    Raises ValueError for layouts that can't be copied.
    """
    check_compatible(src, dst)
    counts = [num_blocks] * len(dst.groups) if isinstance(num_blocks, int) else list(num_blocks)
    if len(counts) != len(dst.groups):
        raise ValueError(f"{len(counts)} block counts were given for {len(dst.groups)} groups")
    return sum(
        n * _heads(s, d)[1] * (d.block_bytes // d.spec.num_heads)
        for n, s, d in zip(counts, src.groups, dst.groups, strict=True)
    )


def check_compatible(src: KvLayout, dst: KvLayout) -> None:
    """Raises ValueError naming the first thing that keeps KV of one layout from being copied to the other."""
    if len(src.groups) != len(dst.groups):
        raise ValueError(f"cache groups differ: source has {len(src.groups)}, destination {len(dst.groups)}")
    for g, (s, d) in enumerate(zip(src.groups, dst.groups, strict=True)):
        for name, a, b in (
            ("group_id", s.spec.group_id, d.spec.group_id),
            ("num_layers", s.spec.num_layers, d.spec.num_layers),
            ("kv_size", s.spec.kv_size, d.spec.kv_size),
            ("head_size", s.spec.head_size, d.spec.head_size),
            ("dtype", s.spec.dtype, d.spec.dtype),
            ("block_size", s.block_size, d.block_size),
        ):
            if a != b:
                raise ValueError(f"{name} of cache group {g} differs: source has {a}, destination {b}")
        for side, layout in (("source", s), ("destination", d)):
            if layout.spec.dtype not in DTYPE_BYTES:
                raise ValueError(f"dtype {layout.spec.dtype!r} of {side} group {g} is not known")
            _order(f"{side} group {g}", layout)
            spec = layout.spec
            sizes = (spec.num_layers, spec.num_heads, spec.head_size, spec.kv_size, layout.block_size)
            if min(sizes) < 1 or layout.first_head < 0 or layout.num_blocks < 0:
                raise ValueError(f"{side} group {g} has a size that is not positive: {layout}")


def _order(side: str, group: KvGroupLayout) -> list[str]:
    order = group.dim_order.split("_")
    if len(order) != len(_DIMS) or set(order) != _DIMS or order[-1] != "HS":
        raise ValueError(f"dim_order {group.dim_order!r} of {side} must name NB NL TWO BS NH HS once each, HS last")
    return order


def _check_regions(side: str, layout: KvLayout) -> None:
    for g, group in enumerate(layout.groups):
        end = group.offset + group.num_blocks * group.block_bytes
        if group.offset < 0 or end > layout.region_bytes:
            raise ValueError(f"{side} group {g} ends at byte {end} of a region of {layout.region_bytes}")


def _ids(side: str, group: KvGroupLayout, block_ids: Sequence[int], *, once: bool = False) -> Offsets:
    ids = np.asarray(block_ids, dtype=np.int64)
    bad = ids[(ids < 1) | (ids >= group.num_blocks)]
    if bad.size:
        raise ValueError(f"block id {bad[0]} of {side} is outside 1 … {group.num_blocks - 1}")
    if once and len(ids) > 1 and bool((np.diff(np.sort(ids)) == 0).any()):
        raise ValueError(f"a block of {side} is named twice")
    return ids


def _sizes(group: KvGroupLayout) -> dict[str, int]:
    spec = group.spec
    return {
        "NB": group.num_blocks, "NL": spec.num_layers, "TWO": spec.kv_size, "BS": group.block_size,
        "NH": spec.num_heads, "HS": spec.head_size,
    }  # fmt: skip


def _strides(group: KvGroupLayout, order: list[str]) -> dict[str, int]:
    """Bytes from one index to the next, per dimension; blocks are tight in the region."""
    sizes, stride, strides = _sizes(group), DTYPE_BYTES[group.spec.dtype], {}
    for dim in reversed(order):
        strides[dim] = stride
        stride *= sizes[dim]
    return strides


def _heads(src: KvGroupLayout, dst: KvGroupLayout) -> tuple[int, int]:
    """First head, counted over the model, and number of heads that both sides have."""
    first = max(src.first_head, dst.first_head)
    last = min(src.first_head + src.spec.num_heads, dst.first_head + dst.spec.num_heads)
    return first, max(0, last - first)


def _plan_group(
    src: KvGroupLayout, dst: KvGroupLayout, src_ids: Offsets, dst_ids: Offsets
) -> tuple[Offsets, Offsets, Offsets]:
    """Offsets and sizes of one group's runs, in the destination's order, not merged yet."""
    if len(src_ids) != len(dst_ids):
        raise ValueError(f"{len(src_ids)} source blocks can't fill {len(dst_ids)} destination blocks")
    first, heads = _heads(src, dst)
    if not heads or not len(src_ids):
        nothing = np.empty(0, np.int64)
        return nothing, nothing, nothing
    src_order, dst_order = _order("source", src), _order("destination", dst)
    src_strides, dst_strides = _strides(src, src_order), _strides(dst, dst_order)
    copied = {**_sizes(dst), "NH": heads}

    # From the fastest dimension on: what is contiguous on both sides belongs to one run. Block ids are
    # arbitrary, so a run ends before NB; a slice of the heads may end a run, but nothing joins after it.
    run, outer = DTYPE_BYTES[dst.spec.dtype], list(dst_order)
    while outer and outer[-1] != "NB":
        dim = outer[-1]
        if copied[dim] > 1 and not src_strides[dim] == dst_strides[dim] == run:
            break
        outer.pop()
        run *= copied[dim]

    src_grid = np.full(1, src.offset + (first - src.first_head) * src_strides["NH"], np.int64)
    dst_grid = np.full(1, dst.offset + (first - dst.first_head) * dst_strides["NH"], np.int64)
    for dim in outer:
        steps = np.arange(copied[dim], dtype=np.int64)
        src_grid = np.add.outer(src_grid, (src_ids if dim == "NB" else steps) * src_strides[dim]).ravel()
        dst_grid = np.add.outer(dst_grid, (dst_ids if dim == "NB" else steps) * dst_strides[dim]).ravel()
    return src_grid, dst_grid, np.full(len(dst_grid), run, np.int64)


def _merge(src: Offsets, dst: Offsets, nbytes: Offsets) -> CopyOps:
    """Joins each op to the one before where both sides go on without a gap."""
    if not len(nbytes):
        return CopyOps(src, dst, nbytes)
    starts = np.empty(len(nbytes), np.bool_)
    starts[0] = True
    starts[1:] = (src[:-1] + nbytes[:-1] != src[1:]) | (dst[:-1] + nbytes[:-1] != dst[1:])
    at = np.flatnonzero(starts)
    return CopyOps(src[at], dst[at], np.add.reduceat(nbytes, at))
