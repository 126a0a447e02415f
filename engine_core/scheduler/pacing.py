"""How much of a prompt may ride along in a step without stalling the sequences that run.

A step with running sequences should take at most `stretch` times what it takes without a chunk. What
steps take is learnt from steps: seconds of a decode-only step, and seconds per chunk token on top, both as
moving averages. Pure: it knows only what it is told.
"""

from __future__ import annotations

_WEIGHT = 0.2
_MIN_CHUNK = 16
"""Prompts always go on, by at least so many tokens a step."""


class StepPacer:
    """Learns step times; says how many chunk tokens fit beside running sequences."""

    def __init__(self, stretch: float) -> None:
        self._stretch = stretch
        self._decode_seconds: float | None = None
        self._token_seconds: float | None = None

    def observe(self, decodes: int, chunk_tokens: int, seconds: float) -> None:
        """Takes what a step of `decodes` single tokens and `chunk_tokens` others took. 0 seconds say nothing."""
        if seconds <= 0:
            return
        if not chunk_tokens:
            self._decode_seconds = _average(self._decode_seconds, seconds)
        elif chunk_tokens >= _MIN_CHUNK:
            base = (self._decode_seconds or 0.0) if decodes else 0.0
            self._token_seconds = _average(self._token_seconds, max(seconds - base, 0.0) / chunk_tokens)

    def chunk_budget(self, decodes: int, budget: int) -> int:
        """Chunk tokens for a step with `decodes` running sequences, at most `budget`."""
        if not decodes or not self._stretch or not self._decode_seconds or not self._token_seconds:
            return budget
        room = (self._stretch - 1.0) * self._decode_seconds / self._token_seconds
        return min(budget, max(_MIN_CHUNK, int(room)))


def _average(before: float | None, value: float) -> float:
    return value if before is None else before + _WEIGHT * (value - before)
