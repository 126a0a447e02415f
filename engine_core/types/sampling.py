"""How tokens are drawn."""

from __future__ import annotations

import msgspec


class SamplingParams(msgspec.Struct, frozen=True):
    """Sampling of one sample. A draw depends on (seed, position) alone.

    temperature 0 is greedy; top_k 0 and top_p 1 keep all tokens; max_tokens counts output tokens
    from attempt 0 on, the stop token included.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
