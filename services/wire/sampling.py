"""pdmesh.common.v1.SamplingParams <-> SamplingParams.

Reading checks every range and raises InvalidRequestError that names the field as the caller knows it,
such as request.sampling.top_p.
"""

from __future__ import annotations

import math

from engine_core.types.errors import InvalidRequestError
from engine_core.types.sampling import MAX_GRAMMAR_BYTES, Grammar, GrammarKind, SamplingParams
from pdmesh.common.v1 import generation_pb2
from services.wire.common import checked_size

MAX_TOKEN_ID = 2**31 - 1
MAX_STOP_IDS = 4_096
MAX_LOGIT_BIAS = 1_024
MAX_TOP_LOGPROBS = 20
"""Best tokens that may be reported per position."""
MAX_ADJUSTMENT = 1e4
"""Largest penalty or bias: far beyond any logit, and far from what float32 can't add up."""
MAX_REPETITION = 1e3
"""Largest repetition penalty; its inverse is the smallest."""

_KIND_TO_PROTO: dict[GrammarKind, generation_pb2.GrammarKind] = {
    GrammarKind.JSON_SCHEMA: generation_pb2.GRAMMAR_KIND_JSON_SCHEMA,
    GrammarKind.REGEX: generation_pb2.GRAMMAR_KIND_REGEX,
    GrammarKind.LARK: generation_pb2.GRAMMAR_KIND_LARK,
}
_KIND_FROM_PROTO: dict[int, GrammarKind] = {number: kind for kind, number in _KIND_TO_PROTO.items()}


def sampling_from_proto(message: generation_pb2.SamplingParams) -> SamplingParams:
    """Reads and checks how to draw. Raises InvalidRequestError naming the field."""
    top_p = message.top_p if message.HasField("top_p") else 1.0
    if not (math.isfinite(message.temperature) and message.temperature >= 0):
        raise _invalid("temperature", f"is {message.temperature:g}; it must be a number from 0 on")
    if not 0 < top_p <= 1:
        raise _invalid("top_p", f"is {top_p:g}; it must be above 0 and at most 1")
    if message.top_k < 0:
        raise _invalid("top_k", f"is {message.top_k}; it must not be negative (0 keeps all tokens)")
    if not 0 <= message.min_p <= 1:
        raise _invalid("min_p", f"is {message.min_p:g}; it must be from 0 to 1")
    if message.max_tokens < 1:
        raise _invalid("max_tokens", f"is {message.max_tokens}; it must be at least 1")
    if not 0 <= message.min_tokens <= message.max_tokens:
        raise _invalid("min_tokens", f"is {message.min_tokens}; it must be from 0 to max_tokens ({message.max_tokens})")
    checked_size(message.stop_token_ids, "request.sampling.stop_token_ids", MAX_STOP_IDS)
    stop_ids = tuple(message.stop_token_ids)
    _check_ids("stop_token_ids", stop_ids)
    return SamplingParams(
        max_tokens=message.max_tokens,
        temperature=message.temperature,
        top_p=top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        seed=message.seed,
        min_tokens=message.min_tokens,
        stop_token_ids=stop_ids,
        ignore_eos=message.ignore_eos,
        frequency_penalty=_adjustment("frequency_penalty", message.frequency_penalty),
        presence_penalty=_adjustment("presence_penalty", message.presence_penalty),
        repetition_penalty=_repetition_penalty(message),
        logit_bias=_logit_bias(message),
        logprobs=_top("logprobs", message.logprobs) if message.HasField("logprobs") else None,
        prompt_logprobs=(
            _top("prompt_logprobs", message.prompt_logprobs) if message.HasField("prompt_logprobs") else None
        ),
        grammar=_grammar(message.grammar) if message.HasField("grammar") else None,
    )


def sampling_to_proto(sampling: SamplingParams) -> generation_pb2.SamplingParams:
    """How to draw, for the wire."""
    grammar = sampling.grammar
    return generation_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=dict(sampling.logit_bias),
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        grammar=(
            None if grammar is None else generation_pb2.Grammar(kind=_KIND_TO_PROTO[grammar.kind], text=grammar.text)
        ),
    )


def _adjustment(name: str, value: float, where: str = "") -> float:
    if not -MAX_ADJUSTMENT <= value <= MAX_ADJUSTMENT:
        raise _invalid(name, f"is {value:g}{where}; it must be from {-MAX_ADJUSTMENT:g} to {MAX_ADJUSTMENT:g}")
    return value


def _repetition_penalty(message: generation_pb2.SamplingParams) -> float:
    penalty = message.repetition_penalty if message.HasField("repetition_penalty") else 1.0
    if not 1 / MAX_REPETITION <= penalty <= MAX_REPETITION:
        bounds = f"from {1 / MAX_REPETITION:g} to {MAX_REPETITION:g}"
        raise _invalid("repetition_penalty", f"is {penalty:g}; it must be {bounds} (1 changes nothing)")
    return penalty


def _logit_bias(message: generation_pb2.SamplingParams) -> tuple[tuple[int, float], ...]:
    """In order of the ids: a map has none."""
    checked_size(message.logit_bias, "request.sampling.logit_bias", MAX_LOGIT_BIAS)
    biases = tuple(sorted(message.logit_bias.items()))
    _check_ids("logit_bias", tuple(token for token, _ in biases))
    for token, bias in biases:
        _adjustment("logit_bias", bias, f" for token {token}")
    return biases


def _top(name: str, count: int) -> int:
    if not 0 <= count <= MAX_TOP_LOGPROBS:
        raise _invalid(name, f"is {count}; it must be from 0 to {MAX_TOP_LOGPROBS}")
    return count


def _grammar(message: generation_pb2.Grammar) -> Grammar:
    kind = _KIND_FROM_PROTO.get(message.kind)
    if kind is None:
        known = ", ".join(GrammarKind)
        raise _invalid("grammar.kind", f"is missing or unknown ({message.kind}); there are {known}")
    size = len(message.text.encode())
    if not size:
        raise _invalid("grammar.text", "is empty")
    if size > MAX_GRAMMAR_BYTES:
        raise _invalid("grammar.text", f"has {size} bytes, at most {MAX_GRAMMAR_BYTES} are allowed")
    return Grammar(kind, message.text)


def _check_ids(name: str, ids: tuple[int, ...]) -> None:
    if ids and min(ids) < 0:
        raise _invalid(name, f"holds {min(ids)}; token ids must be from 0 to {MAX_TOKEN_ID}")


def _invalid(name: str, problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"request.sampling.{name} {problem}", field=f"request.sampling.{name}")
