"""Where a session may write: byte intervals of the pool."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine_core.transfer.copy_plan import Offsets, plan_copy
from engine_core.types.kv import KvLayout


class Grant:
    """The blocks of one session, as sorted, disjoint intervals [start, end)."""

    def __init__(self, layout: KvLayout, block_ids: Sequence[Sequence[int]]) -> None:
        """Raises ValueError for blocks that are not in the pool."""
        ops = plan_copy(layout, layout, block_ids, block_ids)
        order = np.argsort(ops.dst_offset, kind="stable")
        starts = ops.dst_offset[order]
        ends = starts + ops.nbytes[order]
        apart = np.flatnonzero(starts[1:] != ends[:-1])
        self._starts: Offsets = starts[np.concatenate(([0], apart + 1))] if len(starts) else starts
        self._ends: Offsets = ends[np.concatenate((apart, [len(ends) - 1]))] if len(ends) else ends

    def covers(self, offsets: Offsets, sizes: Offsets) -> bool:
        """True when each piece lies inside one interval."""
        if not len(offsets):
            return True
        if not len(self._starts) or bool((sizes < 0).any()):
            return False
        at = np.searchsorted(self._starts, offsets, side="right") - 1
        # Compared as differences: a size near 2**63 must not wrap around.
        return bool(((at >= 0) & (offsets <= self._ends[at]) & (sizes <= self._ends[at] - offsets)).all())
