"""Linear layers with a replaceable backend. Weights stay the loader's views: no backend here copies them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from engine_core.platforms.base import DeviceOps

Linear = Callable[[torch.Tensor], torch.Tensor]
"""x [T, in] -> [T, out]."""

LinearGroup = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
"""x [T, in] -> one [T, out_i] per weight."""

Parameter = tuple[torch.Tensor, torch.Tensor | None]
"""weight [out, in] and bias [out]."""


class LinearBackend(Protocol):
    """Makes linear layers out of loaded parameters."""

    def single(self, parameter: Parameter) -> Linear:
        """One product."""

    def group(self, parameters: Sequence[Parameter]) -> LinearGroup:
        """Products of one input with several weights (q, k, v)."""

    def gated(self, gate: Parameter, up: Parameter, ops: DeviceOps) -> Linear:
        """silu(gate(x)) * up(x)."""


class TorchLinear:
    """F.linear on the mapped weights."""

    def single(self, parameter: Parameter) -> Linear:
        weight, bias = parameter
        return lambda x: F.linear(x, weight, bias)

    def group(self, parameters: Sequence[Parameter]) -> LinearGroup:
        pairs = tuple(parameters)
        return lambda x: tuple(F.linear(x, weight, bias) for weight, bias in pairs)

    def gated(self, gate: Parameter, up: Parameter, ops: DeviceOps) -> Linear:
        return lambda x: ops.silu_mul(F.linear(x, *gate), F.linear(x, *up))
