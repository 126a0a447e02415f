"""The attention interface: write the new tokens' K and V into the paged pool, then attend over it."""

from __future__ import annotations

from typing import Protocol

import torch

from engine_core.execution.forward_metadata import ForwardMetaData
from engine_core.types.errors import InternalError
from engine_core.types.kv import KvGroupLayout

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class AttentionBackend(Protocol):
    """Causal attention over one cache group. Not thread-safe: owned by the step's thread.

    Constructed as Backend(layout, cache, num_heads, scale), where cache is the group's tensor
    [NB, NL, 2, BS, NH, HS] (see group_tensor) and num_heads counts the query heads, a multiple of NH.
    """

    def forward(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: ForwardMetaData
    ) -> torch.Tensor:
        """Writes k, v [T, NH, HS] of `layer` into the pool at slot_mapping, then returns the attention
        output [T, num_heads * HS] of q [T, num_heads, HS] over each sequence's blocks."""


def group_tensor(region: torch.Tensor, layout: KvGroupLayout) -> torch.Tensor:
    """Returns the group's view [NB, NL, 2, BS, NH, HS] of a flat uint8 region; copies nothing.

    Raises InternalError when the region is too small or the order is not this platform's.
    """
    spec = layout.spec
    if layout.dim_order != "NB_NL_TWO_BS_NH_HS" or spec.kv_size != 2:
        raise InternalError(f"KV group {spec.group_id} has the order {layout.dim_order}, kv_size {spec.kv_size}")
    end = layout.offset + layout.num_blocks * layout.block_bytes
    if region.dtype != torch.uint8 or region.dim() != 1 or region.numel() < end:
        raise InternalError(f"KV group {spec.group_id} needs {end} bytes of uint8; the region is {list(region.shape)}")
    flat = region[layout.offset : end].view(TORCH_DTYPES[spec.dtype])
    return flat.view(layout.num_blocks, spec.num_layers, 2, layout.block_size, spec.num_heads, spec.head_size)
