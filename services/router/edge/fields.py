"""Fields of requests that pydantic's own types don't read: how each is checked, and how /openapi.json tells of it."""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeGuard

from pydantic import BaseModel, BeforeValidator, ConfigDict, WithJsonSchema

from services.router.edge.json_body import short

MAX_STOP_STRINGS = 16
MAX_STOP_IDS = 4096
MAX_BIASES = 1024
BIAS_LIMIT = 100.0
MAX_INT = 2**31 - 1

Prompt = str | tuple[int, ...]


class Strict(BaseModel):
    """A part of a request: what is unknown is ignored, a value of another type is refused."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


def is_id(value: Any) -> TypeGuard[int]:
    """True for what may be a token id."""
    return type(value) is int and 0 <= value <= MAX_INT


def is_number(value: Any) -> TypeGuard[int | float]:
    """True for numbers, not for booleans."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def token_ids(value: Any, name: str) -> tuple[int, ...]:
    """Checks a list of token ids. Raises ValueError that names the element."""
    if not isinstance(value, list):
        raise ValueError(f"{name} must be a list of token ids")
    for i, item in enumerate(value):
        if not is_id(item):
            raise ValueError(f"{name}[{i}] is {short(item)}; it must be a token id, a whole number from 0")
    return tuple(value)


def _stop_strings(value: Any) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(strings, list) or not all(isinstance(s, str) for s in strings):
        raise ValueError("must be a string or a list of strings")
    if len(strings) > MAX_STOP_STRINGS:
        raise ValueError(f"holds {len(strings)} strings; there may be {MAX_STOP_STRINGS}")
    if "" in strings:
        raise ValueError("an empty string cannot stop anything")
    return tuple(dict.fromkeys(strings))


def _optional_ids(value: Any) -> tuple[int, ...]:
    return () if value is None else token_ids(value, "the list")


def _from_digits(value: Any) -> Any:
    """The number where `value` is one, below 10**9, as JSON writes keys; else the value itself."""
    plain = isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 10
    return int(value) if plain and str(int(value)) == value else value


def _stop_ids(value: Any) -> tuple[int, ...]:
    """Token ids, or those in digits: EvalScope sends them so."""
    found = _optional_ids([_from_digits(item) for item in value] if isinstance(value, list) else value)
    if len(found) > MAX_STOP_IDS:
        raise ValueError(f"holds {len(found)} tokens; there may be {MAX_STOP_IDS}")
    return tuple(dict.fromkeys(found))


def _prompts(value: Any) -> tuple[Prompt, ...]:
    """Reads the four shapes: text, token ids, a list of texts, a list of token id lists."""
    if isinstance(value, str):
        found: list[Prompt] = [value]
    elif not isinstance(value, list):
        raise ValueError("must be text, a list of token ids, or a list of either")
    elif not value:
        raise ValueError("is empty; at least one token is needed")
    elif is_number(value[0]):
        found = [token_ids(value, "the list")]
    else:
        found = [v if isinstance(v, str) else token_ids(v, f"the list[{i}]") for i, v in enumerate(value)]
    for i, prompt in enumerate(found):
        if not prompt:
            raise ValueError(f"is empty{f' at {i}' if len(found) > 1 else ''}; at least one token is needed")
    return tuple(found)


def _logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    """An object of token ids, written as JSON writes keys, to numbers."""
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise ValueError("must be an object of token ids and what is added to their logits")
    if len(value) > MAX_BIASES:
        raise ValueError(f"holds {len(value)} tokens; there may be {MAX_BIASES}")
    found = []
    for key, bias in value.items():
        token = _from_digits(key)
        if not is_id(token):
            raise ValueError(f"{short(key)} is not a token id")
        if not is_number(bias) or not -BIAS_LIMIT <= bias <= BIAS_LIMIT:
            raise ValueError(f"{key}: {short(bias)} is not a number from -{BIAS_LIMIT:g} to {BIAS_LIMIT:g}")
        found.append((token, float(bias)))
    return tuple(found)


def _count_or_flag(value: Any) -> Any:
    """Some load generators send the chat API's boolean to completions."""
    if isinstance(value, bool):
        return 1 if value else None
    return value


def _content(value: Any) -> str | None:
    """Text, or a list of text parts; several are joined by line breaks, as vLLM does."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be text or a list of text parts")
    texts = []
    for i, part in enumerate(value):
        kind = part.get("type", "text") if isinstance(part, dict) else None
        text = part.get("text") if isinstance(part, dict) else part
        if kind not in ("text", "input_text", "output_text", None) or not isinstance(text, str):
            raise ValueError(f"part {i} must be {{'type': 'text', 'text': …}}; this model reads text only")
        texts.append(text)
    return "\n".join(texts)


def _arguments(value: Any) -> Any:
    """A past call's arguments as chat templates take them: the object, where the text is one."""
    if value is None or value == "":
        return {}
    if isinstance(value, dict):
        return value
    if not isinstance(value, str):
        raise ValueError("must be text that holds a JSON object")
    try:
        found = json.loads(value)
        json.dumps(found, ensure_ascii=False).encode()  # no half of a surrogate pair, which no tokenizer takes
    except (ValueError, RecursionError):  # a model may have written it
        return value
    return found if isinstance(found, dict) else value


_NULL = {"type": "null"}
_TOKENS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": MAX_INT}}
_TEXT = {"type": "string", "minLength": 1}
_PROMPT_SCHEMA = {
    "anyOf": [
        _TEXT,
        {**_TOKENS, "minItems": 1},
        {"type": "array", "items": _TEXT, "minItems": 1},
        {"type": "array", "items": {**_TOKENS, "minItems": 1}, "minItems": 1},
    ]
}
_DIGITS = "^(0|[1-9][0-9]{0,8})$"
_STOP_ID_SCHEMA = {"anyOf": [_TOKENS["items"], {"type": "string", "pattern": _DIGITS}]}
_STOP_SCHEMA = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "maxItems": MAX_STOP_STRINGS}, _NULL]}
_PART_SCHEMA = {
    "type": "object",
    "properties": {"type": {"enum": ["text", "input_text", "output_text", None]}, "text": {"type": "string"}},
    "required": ["text"],
}
_PARTS_SCHEMA = {"type": "array", "items": {"anyOf": [{"type": "string"}, _PART_SCHEMA]}}
_CONTENT_SCHEMA = {"anyOf": [{"type": "string"}, _PARTS_SCHEMA, _NULL]}
_BIAS_SCHEMA = {
    "anyOf": [
        {
            "type": "object",
            "propertyNames": {"pattern": _DIGITS},
            "additionalProperties": {"type": "number", "minimum": -BIAS_LIMIT, "maximum": BIAS_LIMIT},
            "maxProperties": MAX_BIASES,
        },
        _NULL,
    ]
}

Prompts = Annotated[tuple[Prompt, ...], BeforeValidator(_prompts), WithJsonSchema(_PROMPT_SCHEMA)]
StopStrings = Annotated[tuple[str, ...], BeforeValidator(_stop_strings), WithJsonSchema(_STOP_SCHEMA)]
OptionalIds = Annotated[tuple[int, ...], BeforeValidator(_optional_ids), WithJsonSchema({"anyOf": [_TOKENS, _NULL]})]
StopIds = Annotated[
    tuple[int, ...],
    BeforeValidator(_stop_ids),
    WithJsonSchema({"anyOf": [{**_TOKENS, "items": _STOP_ID_SCHEMA, "maxItems": MAX_STOP_IDS}, _NULL]}),
]
Ids = Annotated[tuple[int, ...], BeforeValidator(lambda v: token_ids(v, "the list")), WithJsonSchema(_TOKENS)]
LogitBias = Annotated[tuple[tuple[int, float], ...], BeforeValidator(_logit_bias), WithJsonSchema(_BIAS_SCHEMA)]
CountOrFlag = BeforeValidator(_count_or_flag)
Content = Annotated[str | None, BeforeValidator(_content), WithJsonSchema(_CONTENT_SCHEMA)]
Arguments = Annotated[
    Any, BeforeValidator(_arguments), WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}, _NULL]})
]
