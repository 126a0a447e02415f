"""Rotary embeddings: frequencies once per model, angles once per step."""

from __future__ import annotations

import math

import torch

from models.spec import RopeSpec


class RotaryEmbedding:
    """Angles for a RopeSpec and a head dimension D."""

    def __init__(self, spec: RopeSpec, head_dim: int) -> None:
        self._inverse, self._scaling = inverse_frequencies(spec, head_dim)

    def angles(self, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (cos, sin), each [T, D/2] float32 and contiguous, for position_ids [T]."""
        freqs = position_ids.to(torch.float32)[:, None] * self._inverse
        cos, sin = freqs.cos(), freqs.sin()
        if self._scaling != 1.0:
            cos, sin = cos * self._scaling, sin * self._scaling
        return cos, sin


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> tuple[torch.Tensor, float]:
    """Returns the frequencies [D/2] in float32 and the factor of cos and sin."""
    inverse = 1.0 / (spec.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    match spec.rope_type:
        case "linear":
            return inverse / spec.factor, 1.0
        case "llama3":
            return _llama3(spec, inverse), 1.0
        case "yarn":
            return _yarn(spec, inverse, head_dim), _yarn_scaling(spec)
        case _:
            return inverse, 1.0


def _llama3(spec: RopeSpec, inverse: torch.Tensor) -> torch.Tensor:
    """Long waves are stretched by the factor, short ones kept, those between interpolated."""
    context = spec.original_max_position
    wavelength = 2 * math.pi / inverse
    long, short = context / spec.low_freq_factor, context / spec.high_freq_factor
    stretched = torch.where(wavelength > long, inverse / spec.factor, inverse)
    smooth = (context / wavelength - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    between = (1 - smooth) * stretched / spec.factor + smooth * stretched
    return torch.where(~(wavelength < short) & ~(wavelength > long), between, stretched)


def _yarn(spec: RopeSpec, inverse: torch.Tensor, dim: int) -> torch.Tensor:
    """A ramp over the dimensions, from frequencies as they are to frequencies divided by the factor."""

    def dimension_of(rotations: float) -> float:
        return (dim * math.log(spec.original_max_position / (rotations * 2 * math.pi))) / (2 * math.log(spec.theta))

    low, high = dimension_of(spec.beta_fast), dimension_of(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    span = high - low if high != low else 0.001
    keep = 1 - torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / span, 0, 1)
    return inverse / spec.factor * (1 - keep) + inverse * keep


def _yarn_scaling(spec: RopeSpec) -> float:
    def magnitude(mscale: float) -> float:
        return 1.0 if spec.factor <= 1 else 0.1 * mscale * math.log(spec.factor) + 1.0

    if spec.attention_factor is not None:
        return spec.attention_factor
    if spec.mscale and spec.mscale_all_dim:
        return magnitude(spec.mscale) / magnitude(spec.mscale_all_dim)
    return magnitude(1.0)
