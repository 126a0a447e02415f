"""The CPU behind the Platform interface."""

from __future__ import annotations

import torch

from engine_core.platforms.base import DeviceOps
from engine_core.platforms.cpu.torch_ops import TorchOps


class CpuPlatform:
    """Implements Platform."""

    name = "cpu"

    def device(self) -> torch.device:
        return torch.device("cpu")

    def ops(self) -> DeviceOps:
        return TorchOps()

    def set_threads(self, count: int) -> int:
        if count > 0:
            torch.set_num_threads(count)
        return torch.get_num_threads()

    def attention_backend(self) -> str:
        return "sdpa"

    def linear_backend(self) -> str:
        return "torch"
