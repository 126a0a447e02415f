"""Token counts as a distribution: a number, a range, or a weighted mix.

128                    always 128
uniform:64-512         any of 64 to 512, each as likely
mix:128@0.8,1024@0.2   128 four times out of five, else 1024; weights need not add up to 1
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from engine_core.types.errors import ConfigError

MAX_TOKENS = 10_000_000


class Lengths(msgspec.Struct, frozen=True):
    """A distribution of token counts: ranges (both ends included) with weights."""

    text: str
    ranges: tuple[tuple[int, int], ...]
    weights: tuple[float, ...]

    def sample(self, rng: random.Random) -> int:
        """One token count."""
        low, high = rng.choices(self.ranges, self.weights)[0]
        return low if low == high else rng.randint(low, high)

    @property
    def mean(self) -> float:
        """Expected tokens."""
        middles = [(low + high) / 2 for low, high in self.ranges]
        return sum(m * w for m, w in zip(middles, self.weights, strict=True)) / sum(self.weights)

    @property
    def largest(self) -> int:
        """Most tokens that sample() may give."""
        return max(high for _, high in self.ranges)


def parse_lengths(text: str, option: str) -> Lengths:
    """Reads a distribution. Raises ConfigError, which names `option` and what would be right."""
    kind, colon, rest = text.strip().partition(":")
    try:
        if not colon:
            ranges, weights = [_range(kind, kind)], [1.0]
        elif kind == "uniform":
            low, dash, high = rest.partition("-")
            if not dash:
                raise ValueError("a range has two ends")
            ranges, weights = [_range(low, high)], [1.0]
        elif kind == "mix":
            ranges, weights = _mix(rest.split(","))
        else:
            raise ValueError(f"there is no distribution {kind!r}")
    except ValueError as exc:
        forms = "128, uniform:64-512 or mix:128@0.8,1024@0.2"
        raise ConfigError(f"{option} {text!r}: {exc}; write it like {forms}") from None
    return Lengths(text.strip(), tuple(ranges), tuple(weights))


def _range(low: str, high: str) -> tuple[int, int]:
    ends = []
    for end in (low, high):
        if not end.strip().isdecimal():
            raise ValueError(f"{end.strip()!r} is no number of tokens")
        ends.append(int(end))
    if not 1 <= ends[0] <= ends[1] <= MAX_TOKENS:
        raise ValueError("token counts are 1 or more, the smaller one first")
    return ends[0], ends[1]


def _mix(parts: Sequence[str]) -> tuple[list[tuple[int, int]], list[float]]:
    ranges, weights = [], []
    for part in parts:
        tokens, at, weight = part.partition("@")
        ranges.append(_range(tokens, tokens))
        try:
            weights.append(float(weight) if at else 1.0)
        except ValueError:
            raise ValueError(f"{weight!r} is no weight") from None
        if not 0 < weights[-1] < float("inf"):
            raise ValueError("weights are above 0")
    return ranges, weights
