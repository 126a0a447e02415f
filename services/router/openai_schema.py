"""What clients may send: completions, chat completions, /generate, /tokenize, /detokenize.

Fields that we act on are typed and bounded; null is as absent. Fields that change the output and that we don't
have are accepted with the value that changes nothing and refused with any other, by name and with a reason
(sampling_schema.py). What is unknown is ignored, as OpenAI's clients expect. Every refusal is an
InvalidRequestError with `field` set.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, ValidationError

from engine_core.types.errors import InvalidRequestError
from services.router.chat_schema import ChatMessage, ChatRequest, TokenizeRequest
from services.router.fields import MAX_INT, CountOrFlag, Ids, OptionalIds, Prompt, Prompts, Strict
from services.router.json_body import parse_json, short
from services.router.sampling_schema import MAX_LOGPROBS, MAX_N, Refused, SamplingRequest, first_refused, refusal_of

__all__ = [
    "ChatMessage",
    "ChatRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "GenerateRequest",
    "Prompt",
    "SamplingRequest",
    "TokenizeRequest",
    "parse_request",
]


class CompletionRequest(SamplingRequest):
    """POST /v1/completions."""

    prompt: Prompts
    best_of: int | None = Field(None, ge=1, le=MAX_N)
    echo: bool | None = False
    logprobs: Annotated[int | None, CountOrFlag] = Field(None, ge=0, le=MAX_LOGPROBS)

    def best_tokens(self) -> int | None:
        """See SamplingRequest."""
        return self.logprobs

    def samples(self) -> int:
        """As many as the best are chosen from."""
        return max(self.best_of or 1, self.n or 1)

    def best_prompt_tokens(self) -> int | None:
        """prompt_logprobs, and what `echo` with `logprobs` shows of the prompt."""
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((w for w in wanted if w is not None), default=None)

    def check(self) -> None:
        """Raises InvalidRequestError for fields that contradict each other."""
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise InvalidRequestError(f"best_of: {self.best_of} is below n {self.n}", field="best_of")
        if self.stream and (self.best_of or 1) > (self.n or 1):
            raise InvalidRequestError(
                "best_of: not with stream: true: which samples are the best is known at the end", field="best_of"
            )


class GenerateRequest(SamplingRequest):
    """POST /generate: one prompt as text, input_ids or token_ids. What `sampling_params` holds counts as
    if it stood beside it."""

    text: str | None = Field(None, min_length=1)
    input_ids: OptionalIds = ()
    token_ids: OptionalIds = ()
    max_new_tokens: int | None = Field(None, ge=0, le=MAX_INT)
    logprobs: Annotated[int | None, CountOrFlag] = Field(None, ge=0, le=MAX_LOGPROBS)
    sampling_params: dict[str, Any] | None = None

    def token_limit(self) -> int | None:
        """max_new_tokens or max_tokens."""
        return self.max_tokens if self.max_new_tokens is None else self.max_new_tokens

    def best_tokens(self) -> int | None:
        """See SamplingRequest."""
        return self.logprobs

    def prompt(self) -> Prompt:
        """Raises InvalidRequestError unless exactly one form is given."""
        given = [p for p in (self.text, self.input_ids, self.token_ids) if p]
        if len(given) != 1:
            raise InvalidRequestError("give exactly one of text, input_ids and token_ids", field="text")
        return given[0]


class DetokenizeRequest(Strict):
    """POST /detokenize."""

    model: str | None = None
    tokens: Ids


R = TypeVar("R", bound=BaseModel)


def parse_request(kind: type[R], body: bytes, refused_fields: Refused | None = None) -> R:
    """Reads a body. `refused_fields` are those that an API of its own kind of request refuses. Raises
    InvalidRequestError with the field at fault."""
    data = parse_json(body)
    if kind is GenerateRequest and isinstance(data.get("sampling_params"), dict):
        data = {**data["sampling_params"], **data}
    refused = refusal_of(kind, data) if issubclass(kind, SamplingRequest) else None
    if refused_fields is not None:
        refused = first_refused(refused_fields, data)
    if refused is not None:
        name, reason = refused
        raise InvalidRequestError(f"{name}: {short(data[name])} is not supported: {reason}", field=name)
    try:
        request = kind.model_validate({name: value for name, value in data.items() if value is not None})
    except ValidationError as exc:
        raise _first_error(exc) from None
    except RecursionError:
        raise InvalidRequestError("the body is nested too deeply") from None
    if isinstance(request, ChatRequest | TokenizeRequest):
        _check_contents(request.messages or [])
    if isinstance(request, ChatRequest | CompletionRequest):
        request.check()
    if isinstance(request, SamplingRequest):
        _check_sampling(request)
    return request


def _check_sampling(request: SamplingRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError("stream_options: allowed only with stream: true", field="stream_options")
    echoes = isinstance(request, CompletionRequest) and request.echo
    if request.scores_only() and request.prompt_logprobs is None and not echoes:
        names = ("max_completion_tokens", "max_new_tokens", "max_tokens")
        name = next(n for n in names if getattr(request, n, None) == 0)
        raise InvalidRequestError(
            f"{name}: 0 asks for nothing; it must be at least 1, but with echo or prompt_logprobs", field=name
        )


def _check_contents(messages: list[ChatMessage]) -> None:
    for i, message in enumerate(messages):
        if message.content is None and message.role != "assistant":
            name = f"messages[{i}].content"
            raise InvalidRequestError(f"{name}: required for the role {message.role}", field=name)


def _first_error(exc: ValidationError) -> InvalidRequestError:
    error = exc.errors(include_url=False, include_context=False)[0]
    name = ""
    for part in error["loc"]:
        if isinstance(part, str) and part.partition("[")[0] in _UNION_PARTS:
            continue  # the name of a type, not of a key
        name += f"[{part}]" if isinstance(part, int) else f".{part}" if name else str(part)
    message = error["msg"].removeprefix("Value error, ")
    got = "" if error["type"] in ("missing", "value_error") else f", got {short(error.get('input'))}"
    return InvalidRequestError(f"{name}: {message}{got}", field=name)


_UNION_PARTS = frozenset({"dict", "str", "bool"})
"""How pydantic names the members of our unions in the place of an error."""
