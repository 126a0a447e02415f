"""What one request wants, with all defaults filled in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from engine_core.types.errors import InvalidRequestError
from engine_core.types.sampling import Grammar
from services.router.edge.fields import is_id, is_number
from services.router.sampling_schema import SamplingRequest

_RANGES = (("temperature", 0.0, 2.0), ("top_p", 0.0, 1.0), ("min_p", 0.0, 1.0), ("repetition_penalty", 1e-3, 10.0))


class SamplingDefaults(msgspec.Struct, frozen=True):
    """What holds when a client says nothing: OpenAI's values, or those of generation_config.json."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def read(cls, generation_config: Mapping[str, Any]) -> SamplingDefaults:
        """Takes the numbers that are there and in range."""
        found = {}
        for name, low, high in _RANGES:
            value = generation_config.get(name)
            if is_number(value) and low <= value <= high:
                found[name] = float(value)
        top_k = generation_config.get("top_k")
        return cls(**found, top_k=top_k if is_id(top_k) else 0)


class GenerationOptions(msgspec.Struct, frozen=True):
    """One request's wishes, with defaults filled in. `max_tokens` None means as many as fit; `n` counts the samples
    that are run for each prompt."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    max_tokens: int | None
    min_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    n: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    cache_salt: str
    priority: int = 0
    """Lower goes earlier."""
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    """Best tokens to report per output position; None reports nothing."""
    prompt_logprobs: int | None = None
    """The same per prompt position but the first."""
    grammar: Grammar | None = None
    grammar_field: str = ""
    """The client's field that asks for it."""
    include_stop: bool = False
    """Leave the stop string, or the stop token's text, in the output."""
    skip_special_tokens: bool = True
    goes_on: bool = True
    """The output goes on in the middle of a text: the space that its first token may have is shown."""
    kept_special_ids: tuple[int, ...] = ()
    """Special tokens that stay in the text whatever the client wants: the parser of the output takes them out."""
    scores_only: bool = False
    """The client wants the prompt's log probabilities or the prompt back: the one token is drawn and dropped."""


def options_of(
    request: SamplingRequest,
    defaults: SamplingDefaults,
    max_tokens_default: int | None,
    grammar: Grammar | None = None,
    grammar_field: str = "",
) -> GenerationOptions:
    """Fills in defaults. Raises InvalidRequestError when min_tokens exceeds the limit that the client set."""

    def pick(value: float | None, default: float) -> float:
        return default if value is None else value

    limit, scores_only = request.token_limit(), request.scores_only()
    min_tokens = request.min_tokens or 0
    if limit is not None and min_tokens > limit:
        raise InvalidRequestError(
            f"min_tokens: {min_tokens} is above the limit of {limit} output tokens", field="min_tokens"
        )
    top_k = defaults.top_k if request.top_k is None else request.top_k
    stream, samples = request.stream_options, request.samples()
    best_tokens = request.best_tokens()
    if samples > (request.n or 1) and best_tokens is None:
        best_tokens = 0  # the best samples are known by what their own tokens have
    return GenerationOptions(
        temperature=pick(request.temperature, defaults.temperature),
        # An empty nucleus still holds the best token.
        top_p=max(pick(request.top_p, defaults.top_p), 1e-6),
        top_k=max(top_k, 0),
        min_p=pick(request.min_p, defaults.min_p),
        seed=None if request.seed is None else request.seed % 2**64,
        max_tokens=1 if scores_only else max_tokens_default if limit is None else limit,
        min_tokens=min_tokens,
        stop=request.stop,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=bool(request.ignore_eos),
        n=samples,
        stream=bool(request.stream),
        include_usage=bool(stream and stream.include_usage),
        continuous_usage=bool(stream and stream.continuous_usage_stats),
        return_token_ids=bool(request.return_token_ids),
        cache_salt=request.cache_salt or "",
        priority=request.priority or 0,
        frequency_penalty=pick(request.frequency_penalty, 0.0),
        presence_penalty=pick(request.presence_penalty, 0.0),
        repetition_penalty=pick(request.repetition_penalty, defaults.repetition_penalty),
        logit_bias=request.logit_bias,
        logprobs=best_tokens,
        prompt_logprobs=request.best_prompt_tokens(),
        grammar=grammar,
        grammar_field=grammar_field,
        include_stop=bool(request.include_stop_str_in_output),
        skip_special_tokens=request.skip_special_tokens is not False,
        scores_only=scores_only,
    )
