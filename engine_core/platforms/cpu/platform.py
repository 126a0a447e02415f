"""The CPU behind the Platform interface."""

from __future__ import annotations

import functools
import logging

import torch

from engine_core.platforms.base import DeviceOps
from engine_core.platforms.cpu.build import NativeUnavailable
from engine_core.platforms.cpu.kernels import Kernels
from engine_core.platforms.cpu.native_ops import NativeOps
from engine_core.platforms.cpu.torch_ops import TorchOps

_log = logging.getLogger(__name__)


@functools.cache
def native_kernels() -> Kernels | None:
    """Returns the kernels, or None where they can't be had; the reason is logged once."""
    try:
        return Kernels()
    except NativeUnavailable as exc:
        _log.warning("running on plain torch, which is slower: %s", exc)
        return None


class CpuPlatform:
    """Implements Platform."""

    name = "cpu"

    def device(self) -> torch.device:
        return torch.device("cpu")

    def ops(self) -> DeviceOps:
        kernels = native_kernels()
        return TorchOps() if kernels is None else NativeOps(kernels)

    def set_threads(self, count: int) -> int:
        if count > 0:
            torch.set_num_threads(count)
        return torch.get_num_threads()

    def attention_backend(self) -> str:
        return "sdpa" if native_kernels() is None else "paged_cpu"

    def linear_backend(self) -> str:
        return "torch" if native_kernels() is None else "native"
