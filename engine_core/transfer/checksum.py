"""CRC-32 of whole blocks, the same at both ends when their layouts hold a block's bytes in one order.

It runs over the blocks of each group in push order, and joins several groups at the end: so it does not
depend on how a session was cut into pushes.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

from engine_core.transfer.copy_plan import plan_copy
from engine_core.types.kv import KvLayout


def comparable(a: KvLayout, b: KvLayout) -> bool:
    """True when a block's bytes have one order in both: pools may differ in size and place only."""
    keys = [[(g.spec, g.block_size, g.first_head, g.dim_order) for g in layout.groups] for layout in (a, b)]
    return keys[0] == keys[1]


class BlockChecksum:
    """Runs over blocks of one layout as they are pushed, or all at once."""

    def __init__(self, layout: KvLayout) -> None:
        self._layout = layout
        self._crcs = [0] * len(layout.groups)

    def update(self, pool: memoryview, blocks: Sequence[Sequence[int]]) -> None:
        """Adds the next blocks of each group. Raises ValueError for ids that are not in the pool."""
        for g, ids in enumerate(blocks):
            for block in ids:
                for start, n in self._pieces(g, block):
                    self._crcs[g] = zlib.crc32(pool[start : start + n], self._crcs[g])

    @property
    def value(self) -> int:
        """Of all so far."""
        if len(self._crcs) == 1:
            return self._crcs[0]
        return zlib.crc32(struct.pack(f"<{len(self._crcs)}I", *self._crcs))

    def _pieces(self, g: int, block: int) -> list[tuple[int, int]]:
        group = self._layout.groups[g]
        if not 0 < block < group.num_blocks:
            raise ValueError(f"block id {block} of group {g} is outside 1 … {group.num_blocks - 1}")
        if group.dim_order.startswith("NB_"):
            return [(group.offset + block * group.block_bytes, group.block_bytes)]
        one = [(block,) if i == g else () for i in range(len(self._layout.groups))]
        ops = plan_copy(self._layout, self._layout, one, one)
        return list(zip(ops.src_offset.tolist(), ops.nbytes.tolist(), strict=True))
