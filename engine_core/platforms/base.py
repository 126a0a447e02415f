"""What the core asks of a device. One folder per platform; chosen once, by name, from plugins.PLATFORMS."""

from __future__ import annotations

from typing import Protocol

import torch


class DeviceOps(Protocol):
    """The small operations between a dense model's matrix products.

    All tensors are contiguous and of one data type, float32 or bfloat16; reductions run in float32.
    Names that end in _ write into their first argument.
    """

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [..., H] / rms(x) * weight [H], as a new tensor."""

    def add_rms_norm(
        self, residual: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """residual [T, H] += delta [T, H], in place; returns the norm of the sum as a new tensor."""

    def rope_(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Rotates q, k [T, heads, D] in place by cos, sin [T, D/2] float32; halves are D/2 apart."""

    def silu_mul(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up; may reuse the memory of gate for what it returns."""


class Platform(Protocol):
    """A kind of device."""

    name: str

    def device(self) -> torch.device:
        """Where tensors live."""

    def ops(self) -> DeviceOps:
        """The fastest operations there are here; falls back, with a logged reason, to plain torch."""

    def set_threads(self, count: int) -> int:
        """Sets the threads that compute (0: as many as cores); returns how many there are."""

    def attention_backend(self) -> str:
        """Name in plugins.ATTENTION_BACKENDS that "auto" means."""

    def linear_backend(self) -> str:
        """Name in plugins.LINEAR_BACKENDS that "auto" means."""
