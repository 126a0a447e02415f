"""Drawing tokens: greedy, or by a counter. A draw depends on (seed, position) and its row of logits alone.

The kept tokens of a row are found as Hugging Face does it: temperature, then top_k, then top_p (the
smallest set of the likeliest whose share reaches top_p), then min_p (at least min_p times the
likeliest). Equal logits count in the order of their ids, so that top_k keeps exactly k. The draw walks
the kept tokens in order of their ids until their summed share passes u = uniform(seed, position).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from engine_core.execution.batch import DrawRow
from engine_core.types.errors import InternalError

_MASK = (1 << 64) - 1


def _mix(z: int) -> int:
    """splitmix64's finaliser: a bijection of 64-bit integers."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def uniform(seed: int, position: int) -> float:
    """The draw of (seed, position): a float64 in [0, 1) with 53 random bits."""
    key = _mix((seed + 0x9E3779B97F4A7C15) & _MASK)
    return (_mix((key + position * 0x9E3779B97F4A7C15) & _MASK) >> 11) * 2.0**-53


class DrawError(InternalError):
    """Some rows can't be drawn: `problems` says why, by row; `tokens` has the others (-1 for those)."""

    def __init__(self, tokens: list[int], problems: dict[int, str]) -> None:
        super().__init__("; ".join(problems.values()))
        self.tokens, self.problems = tokens, problems


class Sampler(Protocol):
    """Draws one token per row."""

    def sample(self, logits: torch.Tensor, draws: tuple[DrawRow, ...]) -> list[int]:
        """logits [S, V] float32 or bfloat16, one DrawRow each -> S token ids.

        May overwrite the logits. Raises DrawError when a row holds NaN or nothing that may be drawn.
        """


def choose_sampler(platform_name: str) -> Sampler:
    """Returns the fastest sampler there is on a platform."""
    if platform_name == "cpu":
        from engine_core.execution.native_sampler import NativeSampler
        from engine_core.platforms.cpu.platform import native_kernels

        kernels = native_kernels()
        if kernels is not None:
            return NativeSampler(kernels)
    return ReferenceSampler()


class ReferenceSampler:
    """The definition, row by row in numpy and float64."""

    def sample(self, logits: torch.Tensor, draws: tuple[DrawRow, ...]) -> list[int]:
        rows = logits.float().numpy()
        tokens, problems = [-1] * len(draws), {}
        for i, row in enumerate(draws):
            try:
                tokens[i] = draw(rows[i], row)
            except InternalError as exc:
                problems[i] = exc.message
        if problems:
            raise DrawError(tokens, problems)
        return tokens


def draw(logits: npt.NDArray[np.float32], row: DrawRow) -> int:
    """Draws one token from logits [V]. Raises InternalError for NaN, or when no token is left."""
    x = logits.astype(np.float64)
    if row.banned:
        x[[t for t in row.banned if 0 <= t < x.size]] = -np.inf
    peak = x.max()
    if np.isnan(peak):
        raise InternalError(f"the logits at position {row.position} hold NaN")
    if peak == -np.inf:
        raise InternalError(f"no token may be drawn at position {row.position}")
    params = row.params
    if params.temperature <= 0.0:
        return int(x.argmax())
    weights = np.exp((x - peak) / params.temperature)
    kept = _kept(x, weights, params.top_k, params.top_p, params.min_p)
    weights = np.where(kept, weights, 0.0)
    sums = weights.cumsum()
    passed = int(np.searchsorted(sums, uniform(params.seed, row.position) * sums[-1], side="right"))
    return min(passed, int(np.flatnonzero(weights)[-1]))


def _kept(
    x: npt.NDArray[np.float64], weights: npt.NDArray[np.float64], top_k: int, top_p: float, min_p: float
) -> npt.NDArray[np.bool_]:
    kept = x > -np.inf
    if 0 < top_k < x.size or top_p < 1.0:
        order = np.lexsort((np.arange(x.size), -x))
        if 0 < top_k < x.size:
            kept[order[top_k:]] = False
        if top_p < 1.0:
            ranked = np.where(kept, weights, 0.0)[order]
            before = ranked.cumsum() - ranked
            kept[order[before >= top_p * ranked.sum()]] = False
            kept[order[0]] = True
    if min_p > 0.0:
        kept &= weights >= min_p
    return kept
