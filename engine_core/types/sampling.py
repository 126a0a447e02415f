"""How tokens are drawn."""

from __future__ import annotations

import enum

import msgspec

MAX_GRAMMAR_BYTES = 256 * 1024
"""Of a grammar's text, in UTF-8."""


class GrammarKind(enum.StrEnum):
    """How a grammar is written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


class Grammar(msgspec.Struct, frozen=True):
    """What the whole output has to match. Its state is a function of the output's tokens alone."""

    kind: GrammarKind
    text: str


class SamplingParams(msgspec.Struct, frozen=True):
    """Sampling of one sample. A draw depends on (seed, position) alone.

    temperature 0 is greedy; top_k 0 and top_p 1 keep all tokens; max_tokens counts output tokens
    from attempt 0 on, the stop token included.

    Penalties are OpenAI's (frequency and presence over the output) and CTRL's (repetition, over prompt and
    output); logit_bias holds (token id, what is added to its logit), each id once. logprobs and prompt_logprobs are the
    numbers of best tokens to report per position beside the token that stands there; None reports nothing.
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
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """One position: the token that stands there, the natural logarithm of its probability, its rank (1 is the
    likeliest), and the likeliest tokens with theirs, best first. All by the model itself: before temperature,
    penalties and masks."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()
