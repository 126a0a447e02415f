"""Distributions that an engine counts: bounds fixed at start, one search and two additions per value. Pure."""

from __future__ import annotations

from bisect import bisect_left

import msgspec

STEP_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
SEQUENCES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)
TOKENS = (1.0, 4.0, 16.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
PUSH_SECONDS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
PUSH_BYTES = tuple(float(4**n << 10) for n in range(11))
"""1 KiB to 1 GiB."""
PUSH_SPEED = tuple(float(1e6 * 10**n * m) for n in range(5) for m in (1, 3))
"""1 MB/s to 30 GB/s."""


class HistogramFigures(msgspec.Struct, frozen=True, array_like=True):
    """`counts[i]` values were at most `bounds[i]` and above the bound before; the last count is of those above all."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float


class Histogram:
    """One distribution."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        """Counts a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def figures(self) -> HistogramFigures:
        """The counts so far."""
        return HistogramFigures(self._bounds, tuple(self._counts), self._sum)


class Distributions:
    """All that an engine has. A name's part behind the dot is what its metric has as a label."""

    def __init__(self) -> None:
        self._steps = {kind: Histogram(STEP_SECONDS) for kind in ("decode", "prefill", "mixed")}
        self._sequences, self._tokens = Histogram(SEQUENCES), Histogram(TOKENS)
        self._push_seconds, self._push_bytes = Histogram(PUSH_SECONDS), Histogram(PUSH_BYTES)
        self._push_speed = Histogram(PUSH_SPEED)

    def step(self, decodes: int, others: int, tokens: int, seconds: float) -> None:
        """A step of `decodes` sequences with one token each and `others` with more, of `tokens` in all."""
        kind = "decode" if not others else "mixed" if decodes else "prefill"
        self._steps[kind].observe(seconds)
        self._sequences.observe(decodes + others)
        self._tokens.observe(tokens)

    def push(self, nbytes: int, seconds: float) -> None:
        """A push that arrived."""
        self._push_seconds.observe(seconds)
        self._push_bytes.observe(nbytes)
        if seconds > 0:
            self._push_speed.observe(nbytes / seconds)

    def figures(self) -> dict[str, HistogramFigures]:
        """By name."""
        named = {f"step_seconds.{kind}": histogram for kind, histogram in self._steps.items()} | {
            "step_sequences": self._sequences,
            "step_tokens": self._tokens,
            "push_seconds": self._push_seconds,
            "push_bytes": self._push_bytes,
            "push_bytes_per_second": self._push_speed,
        }
        return {name: histogram.figures() for name, histogram in named.items()}
