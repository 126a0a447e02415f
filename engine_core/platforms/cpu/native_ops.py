"""DeviceOps on the native kernels; what they don't take goes to plain torch."""

from __future__ import annotations

import torch

from engine_core.platforms.cpu.kernels import IS_BF16, Kernels
from engine_core.platforms.cpu.torch_ops import TorchOps


class NativeOps:
    """Implements DeviceOps. Each call is one pass over its data, in one thread where that is faster."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._torch = TorchOps()

    def _takes(self, x: torch.Tensor) -> bool:
        return x.dtype in IS_BF16 and x.shape[-1] % self._kernels.vector_length == 0 and x.is_contiguous()

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if not self._takes(x):
            return self._torch.rms_norm(x, weight, eps)
        return self._norm(x, None, weight, eps)

    def add_rms_norm(
        self, residual: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        if not (self._takes(residual) and delta.is_contiguous()):
            return self._torch.add_rms_norm(residual, delta, weight, eps)
        return self._norm(residual, delta.data_ptr(), weight, eps)

    def _norm(self, x: torch.Tensor, delta: int | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty_like(x)
        width = x.shape[-1]
        self._kernels.norm(
            IS_BF16[x.dtype], x.data_ptr(), delta, weight.data_ptr(), out.data_ptr(), x.numel() // width, width, eps,
            torch.get_num_threads(),
        )  # fmt: skip
        return out

    def rope_(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        if q.dtype not in IS_BF16 or not (q.is_contiguous() and k.is_contiguous()):
            self._torch.rope_(q, k, cos, sin)
            return
        tokens, heads, dim = q.shape
        self._kernels.rope(
            IS_BF16[q.dtype], q.data_ptr(), k.data_ptr(), cos.data_ptr(), sin.data_ptr(), tokens, heads, k.shape[1],
            dim // 2, torch.get_num_threads(),
        )  # fmt: skip

    def silu_mul(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if gate.dtype not in IS_BF16 or not (gate.is_contiguous() and up.is_contiguous()):
            return self._torch.silu_mul(gate, up)
        self._kernels.silu_mul(
            IS_BF16[gate.dtype], gate.data_ptr(), up.data_ptr(), gate.numel(), torch.get_num_threads()
        )
        return gate
