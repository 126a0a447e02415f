"""The reference attention: gather each sequence's KV, then torch's scaled_dot_product_attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine_core.execution.forward_metadata import ForwardMetaData
from engine_core.types.kv import KvGroupLayout


class SdpaAttention:
    """Implements AttentionBackend simply; its speed falls with the number of sequences."""

    def __init__(self, layout: KvGroupLayout, cache: torch.Tensor, num_heads: int, scale: float) -> None:
        self._group = layout.spec.group_id
        self._block_size = layout.block_size
        self._cache = cache
        self._num_heads = num_heads
        self._scale = scale

    def forward(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: ForwardMetaData
    ) -> torch.Tensor:
        group = metadata.groups[self._group]
        blocks, offsets = group.slot_mapping // self._block_size, group.slot_mapping % self._block_size
        keys, values = self._cache[:, layer, 0], self._cache[:, layer, 1]
        keys[blocks, offsets] = k
        values[blocks, offsets] = v

        out = torch.empty(q.shape[0], self._num_heads * q.shape[2], dtype=q.dtype)
        starts, lens = metadata.query_starts.tolist(), metadata.seq_lens.tolist()
        for b, length in enumerate(lens):
            rows = slice(starts[b], starts[b + 1])
            out[rows] = self._attend(q[rows], keys, values, group.block_tables[b], length)
        return out

    def _attend(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor, length: int
    ) -> torch.Tensor:
        """Attention of one sequence: q [Q, H, D], its last query stands at length - 1; returns [Q, H * D]."""
        used = table[: -(-length // self._block_size)].long()
        k = keys[used].flatten(0, 1)[:length].transpose(0, 1)
        v = values[used].flatten(0, 1)[:length].transpose(0, 1)
        queries, heads, dim = q.shape
        mask = None
        if queries > 1:
            mask = torch.ones(queries, length, dtype=torch.bool).tril_(length - queries)
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None], k[None], v[None], attn_mask=mask, scale=self._scale, enable_gqa=True
        )
        return out[0].transpose(0, 1).reshape(queries, heads * dim)
