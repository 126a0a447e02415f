"""Paged attention in one native call per layer; where that can't be, the reference takes over and says so."""

from __future__ import annotations

import logging

import torch

from engine_core.execution.attention.base import AttentionBackend
from engine_core.execution.attention.sdpa import SdpaAttention
from engine_core.execution.forward_metadata import ForwardMetaData
from engine_core.platforms.cpu.kernels import IS_BF16
from engine_core.platforms.cpu.platform import native_kernels
from engine_core.types.kv import KvGroupLayout

_log = logging.getLogger(__name__)


class PagedCpuAttention:
    """Implements AttentionBackend on the C++ kernel: decodes and prefill chunks, grouped queries, any block size."""

    def __init__(self, layout: KvGroupLayout, cache: torch.Tensor, num_heads: int, scale: float) -> None:
        self._fallback: AttentionBackend | None = None
        kernels = native_kernels()
        spec = layout.spec
        reason = ""
        if kernels is None:
            reason = "there are no native kernels"
        elif spec.head_size % kernels.vector_length:
            reason = f"head size {spec.head_size} is no multiple of the vector length {kernels.vector_length}"
        elif cache.dtype not in IS_BF16 or cache.stride(3) != spec.num_heads * spec.head_size:
            reason = f"the pool's data type {cache.dtype} or order is not the kernel's"
        if reason or kernels is None:
            _log.warning("attention falls back to sdpa: %s", reason)
            self._fallback = SdpaAttention(layout, cache, num_heads, scale)
            return
        self._kernel = kernels.attention
        self._kind = IS_BF16[cache.dtype]
        self._cache = cache
        self._group = spec.group_id
        self._layers = [cache[:, layer].data_ptr() for layer in range(spec.num_layers)]
        self._strides = (cache.stride(0), cache.stride(2), layout.block_size, spec.num_heads, num_heads, spec.head_size)
        self._scale = scale

    def forward(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: ForwardMetaData
    ) -> torch.Tensor:
        if self._fallback is not None:
            return self._fallback.forward(layer, q, k, v, metadata)
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        group = metadata.groups[self._group]
        tokens, heads, dim = q.shape
        out = torch.empty(tokens, heads * dim, dtype=q.dtype)
        tables = group.block_tables
        self._kernel(
            self._kind, q.data_ptr(), k.data_ptr(), v.data_ptr(), self._layers[layer], out.data_ptr(),
            group.slot_mapping.data_ptr(), tables.data_ptr(), metadata.query_starts.data_ptr(),
            metadata.seq_lens.data_ptr(), tables.stride(0), tables.shape[0], tokens, *self._strides, self._scale,
            torch.get_num_threads(),
        )  # fmt: skip
        return out
