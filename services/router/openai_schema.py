"""What clients may send: completions, chat completions, /generate, /tokenize, /detokenize.

Fields that we act on are typed and bounded. Fields that change the output and that we don't have are
accepted with the value that changes nothing (UNSUPPORTED) and refused with any other, by name. What is
unknown is ignored, as OpenAI's clients expect. Every refusal is an InvalidRequestError with `field` set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeGuard, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema

from engine_core.types.errors import InvalidRequestError
from services.router.json_body import parse_json, short

MAX_N = 128
MAX_STOP_STRINGS = 16
_MAX_INT = 2**31 - 1

_Neutral = Callable[[Any], bool]


def _one_of(*values: Any) -> _Neutral:
    return lambda v: v is None or any(v == n and isinstance(v, bool) == isinstance(n, bool) for n in values)


UNSUPPORTED: Mapping[str, _Neutral] = {
    "logprobs": _one_of(False),
    "top_logprobs": _one_of(0),
    "prompt_logprobs": _one_of(),
    "best_of": _one_of(1),
    "echo": _one_of(False),
    "suffix": _one_of(""),
    "frequency_penalty": _one_of(0),
    "presence_penalty": _one_of(0),
    "repetition_penalty": _one_of(1),
    "length_penalty": _one_of(1),
    "logit_bias": _one_of({}),
    "response_format": _one_of({"type": "text"}),
    "tools": _one_of([]),
    "tool_choice": _one_of("none", "auto"),
    "functions": _one_of([]),
    "function_call": _one_of("none", "auto"),
    "use_beam_search": _one_of(False),
    "bad_words": _one_of([]),
    "allowed_token_ids": _one_of(),
    "structured_outputs": _one_of(),
    "guided_json": _one_of(),
    "guided_regex": _one_of(),
    "guided_choice": _one_of(),
    "guided_grammar": _one_of(),
    "truncate_prompt_tokens": _one_of(),
    "include_stop_str_in_output": _one_of(False),
    "skip_special_tokens": _one_of(True),
    "continue_final_message": _one_of(False),
    "chat_template": _one_of(),
    "documents": _one_of([]),
    "modalities": _one_of(["text"]),
    "audio": _one_of(),
    "prediction": _one_of(),
    "prompt_embeds": _one_of(),
}


def _stop_strings(value: Any) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(strings, list) or not all(isinstance(s, str) for s in strings):
        raise ValueError("must be a string or a list of strings")
    if len(strings) > MAX_STOP_STRINGS:
        raise ValueError(f"holds {len(strings)} strings; there may be {MAX_STOP_STRINGS}")
    if "" in strings:
        raise ValueError("an empty string cannot stop anything")
    return tuple(dict.fromkeys(strings))


def is_id(value: Any) -> TypeGuard[int]:
    """True for what may be a token id."""
    return type(value) is int and 0 <= value <= _MAX_INT


def token_ids(value: Any, name: str) -> tuple[int, ...]:
    """Checks a list of token ids. Raises ValueError that names the element."""
    if not isinstance(value, list):
        raise ValueError(f"{name} must be a list of token ids")
    for i, item in enumerate(value):
        if not is_id(item):
            raise ValueError(f"{name}[{i}] is {short(item)}; it must be a token id, a whole number from 0")
    return tuple(value)


def _optional_ids(value: Any) -> tuple[int, ...]:
    return () if value is None else token_ids(value, "the list")


Prompt = str | tuple[int, ...]


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


def is_number(value: Any) -> TypeGuard[int | float]:
    """True for numbers, not for booleans."""
    return isinstance(value, int | float) and not isinstance(value, bool)


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
        if kind not in ("text", "input_text", None) or not isinstance(text, str):
            raise ValueError(f"part {i} must be {{'type': 'text', 'text': …}}; this model reads text only")
        texts.append(text)
    return "\n".join(texts)


_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": _MAX_INT}}
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {**_TOKENS, "minItems": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
        {"type": "array", "items": {**_TOKENS, "minItems": 1}, "minItems": 1},
    ]
}
_STOP_SCHEMA = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": MAX_STOP_STRINGS},
        {"type": "null"},
    ]
}
_PART_SCHEMA = {
    "type": "object",
    "properties": {"type": {"enum": ["text"]}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_CONTENT_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART_SCHEMA}, {"type": "null"}]}
_IDS_SCHEMA = {"anyOf": [_TOKENS, {"type": "null"}]}


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class StreamOptions(_Strict):
    """What a stream reports beside text."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class SamplingRequest(_Strict):
    """Fields that all ways of asking share."""

    model: str | None = None
    n: int | None = Field(None, ge=1, le=MAX_N)
    max_tokens: int | None = Field(None, ge=1, le=_MAX_INT)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=_MAX_INT)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: Annotated[tuple[str, ...], BeforeValidator(_stop_strings), WithJsonSchema(_STOP_SCHEMA)] = ()
    stop_token_ids: Annotated[tuple[int, ...], BeforeValidator(_optional_ids), WithJsonSchema(_IDS_SCHEMA)] = ()
    ignore_eos: bool | None = False
    min_tokens: int | None = Field(None, ge=0, le=_MAX_INT)
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = False
    add_special_tokens: bool | None = None
    cache_salt: str | None = Field(None, max_length=256)
    user: str | None = None

    def token_limit(self) -> int | None:
        """The client's limit of output tokens, if there is one."""
        return self.max_tokens


class CompletionRequest(SamplingRequest):
    """POST /v1/completions."""

    prompt: Annotated[tuple[Prompt, ...], BeforeValidator(_prompts), WithJsonSchema(_PROMPT_SCHEMA)]


class ChatMessage(BaseModel):
    """One message; further keys go to the chat template."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(_content), WithJsonSchema(_CONTENT_SCHEMA)] = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    def for_template(self) -> dict[str, Any]:
        """The message as the chat template sees it; a null content is empty text."""
        return {**self.model_dump(), "content": self.content or ""}


class ChatRequest(SamplingRequest):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    add_generation_prompt: bool | None = True
    chat_template_kwargs: dict[str, Any] | None = None
    max_completion_tokens: int | None = Field(None, ge=1, le=_MAX_INT)

    def token_limit(self) -> int | None:
        """max_completion_tokens goes before the older max_tokens."""
        return self.max_completion_tokens or self.max_tokens


class GenerateRequest(SamplingRequest):
    """POST /generate: one prompt as text, input_ids or token_ids. What `sampling_params` holds counts as
    if it stood beside it."""

    text: str | None = Field(None, min_length=1)
    input_ids: Annotated[tuple[int, ...], BeforeValidator(_optional_ids), WithJsonSchema(_IDS_SCHEMA)] = ()
    token_ids: Annotated[tuple[int, ...], BeforeValidator(_optional_ids), WithJsonSchema(_IDS_SCHEMA)] = ()
    max_new_tokens: int | None = Field(None, ge=1, le=_MAX_INT)
    sampling_params: dict[str, Any] | None = None

    def token_limit(self) -> int | None:
        """max_new_tokens or max_tokens."""
        return self.max_new_tokens or self.max_tokens

    def prompt(self) -> Prompt:
        """Raises InvalidRequestError unless exactly one form is given."""
        given = [p for p in (self.text, self.input_ids, self.token_ids) if p]
        if len(given) != 1:
            raise InvalidRequestError("give exactly one of text, input_ids and token_ids", field="text")
        return given[0]


class TokenizeRequest(_Strict):
    """POST /tokenize: a prompt or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = True
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = False


class DetokenizeRequest(_Strict):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[tuple[int, ...], BeforeValidator(lambda v: token_ids(v, "tokens")), WithJsonSchema(_TOKENS)]


R = TypeVar("R", bound=BaseModel)


def parse_request(kind: type[R], body: bytes) -> R:
    """Reads a body. Raises InvalidRequestError with the field at fault."""
    data = parse_json(body)
    if kind is GenerateRequest and isinstance(data.get("sampling_params"), dict):
        data = {**data["sampling_params"], **data}
    if issubclass(kind, SamplingRequest):
        for name, neutral in UNSUPPORTED.items():
            if name in data and not neutral(data[name]):
                raise InvalidRequestError(f"{name}: {short(data[name])} is not supported", field=name)
    try:
        request = kind.model_validate(data)
    except ValidationError as exc:
        raise _first_error(exc) from None
    except RecursionError:
        raise InvalidRequestError("the body is nested too deeply") from None
    if isinstance(request, ChatRequest | TokenizeRequest):
        _check_contents(request.messages or [])
    if isinstance(request, SamplingRequest) and request.stream_options is not None and not request.stream:
        raise InvalidRequestError("stream_options: allowed only with stream: true", field="stream_options")
    return request


def _check_contents(messages: list[ChatMessage]) -> None:
    for i, message in enumerate(messages):
        if message.content is None and message.role != "assistant":
            name = f"messages[{i}].content"
            raise InvalidRequestError(f"{name}: required for the role {message.role}", field=name)


def _first_error(exc: ValidationError) -> InvalidRequestError:
    error = exc.errors(include_url=False, include_context=False)[0]
    name = ""
    for part in error["loc"]:
        name += f"[{part}]" if isinstance(part, int) else f".{part}" if name else str(part)
    message = error["msg"].removeprefix("Value error, ")
    got = "" if error["type"] in ("missing", "value_error") else f", got {short(error.get('input'))}"
    return InvalidRequestError(f"{name}: {message}{got}", field=name)
