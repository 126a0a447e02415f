"""DeviceOps in plain torch: the reference, and what runs where no compiler is."""

from __future__ import annotations

import torch
import torch.nn.functional as F


class TorchOps:
    """Implements DeviceOps; rounds where transformers' models round."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return weight * scaled.to(x.dtype)

    def add_rms_norm(
        self, residual: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        residual.add_(delta)
        return self.rms_norm(residual, weight, eps)

    def rope_(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        c, s = cos.unsqueeze(1).to(q.dtype), sin.unsqueeze(1).to(q.dtype)
        for x in (q, k):
            a, b = x.chunk(2, dim=-1)
            x.copy_(torch.cat((a * c - b * s, b * c + a * s), dim=-1))

    def silu_mul(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return F.silu(gate).mul_(up)
