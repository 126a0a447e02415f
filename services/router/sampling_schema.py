"""What all ways of asking share: how tokens are drawn, when they end, what is reported, and what shape is forced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from engine_core.types.errors import InvalidRequestError
from services.router.edge.fields import MAX_INT, LogitBias, StopIds, StopStrings, Strict
from services.router.edge.request_body import Refused, RequestBody, first_refused, one_of

MAX_N = 128
MAX_LOGPROBS = 20
MAX_TIMEOUT = 86_400.0

UNSUPPORTED: Refused = {
    "suffix": (one_of(""), "filling in the middle is not supported: write the model's own marks into the prompt"),
    "length_penalty": (one_of(1), "there is no beam search"),
    "use_beam_search": (one_of(False), "there is no beam search"),
    "functions": (one_of([]), "use tools"),
    "function_call": (one_of("none", "auto"), "use tool_choice"),
    "bad_words": (one_of([]), "use logit_bias"),
    "allowed_token_ids": (one_of(), "use logit_bias or a grammar"),
    "truncate_prompt_tokens": (one_of(), "prompts are not cut"),
    "modalities": (one_of(["text"]), "this model writes text only"),
    "audio": (one_of(), "this model writes text only"),
    "prediction": (one_of(), "outputs cannot be predicted"),
    "prompt_embeds": (one_of(), "prompts are text or token ids"),
}
"""Fields that would change the output and that we don't have: the values that change nothing, and why no other."""

ELSEWHERE: Refused = {
    "echo": (one_of(False), "only /v1/completions has it"),
    "best_of": (one_of(1), "only /v1/completions has it"),
    "top_logprobs": (one_of(0), "only /v1/chat/completions has it"),
    "tools": (one_of([]), "only /v1/chat/completions has it"),
    "tool_choice": (one_of("none", "auto"), "only /v1/chat/completions has it"),
    "documents": (one_of([]), "only /v1/chat/completions has it"),
    "chat_template": (one_of(), "only /v1/chat/completions has it"),
    "continue_final_message": (one_of(False), "only /v1/chat/completions has it"),
}
"""The same for fields that some kind of request has: these are its values for the others."""


class StreamOptions(Strict):
    """What a stream reports beside text."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class JsonSchemaFormat(Strict):
    """A named JSON schema."""

    name: str | None = Field(None, max_length=64)
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """The form that the output is forced into."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _whole(self) -> ResponseFormat:
        if self.type == "json_schema" and (self.json_schema is None or self.json_schema.schema_ is None):
            raise ValueError("type json_schema needs json_schema.schema")
        return self


class StructuredOutputs(Strict):
    """vLLM's way to name one grammar. `json_` is a schema, as an object or as its text."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = Field(None, min_length=1)
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None


class DrawingRequest(RequestBody):
    """Fields of every way of asking, in any API: how tokens are drawn, and whom the request is from."""

    min_tokens: int | None = Field(None, ge=0, le=MAX_INT)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MAX_INT)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    logit_bias: LogitBias = ()
    stop_token_ids: StopIds = ()
    include_stop_str_in_output: bool | None = False
    ignore_eos: bool | None = False
    skip_special_tokens: bool | None = True
    stream: bool | None = False
    cache_salt: str | None = Field(None, max_length=256)
    timeout: float | None = Field(None, gt=0, le=MAX_TIMEOUT)
    user: str | None = None
    priority: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None


class SamplingRequest(DrawingRequest):
    """Fields that OpenAI's and pdmesh's own ways of asking for text share."""

    model: str | None = None
    n: int | None = Field(None, ge=1, le=MAX_N)
    max_tokens: int | None = Field(None, ge=0, le=MAX_INT)
    stop: StopStrings = ()
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    return_tokens_as_token_ids: bool | None = False
    return_token_ids: bool | None = False
    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = Field(None, min_length=1)
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: bool | None = None

    @classmethod
    def refusal(cls, data: Mapping[str, Any]) -> tuple[str, str] | None:
        """See RequestBody."""
        elsewhere = {name: rule for name, rule in ELSEWHERE.items() if name not in cls.model_fields}
        return first_refused({**UNSUPPORTED, **elsewhere}, data)

    def token_limit(self) -> int | None:
        """The client's limit of output tokens, if there is one."""
        return self.max_tokens

    def best_tokens(self) -> int | None:
        """How many best tokens to report per output position; None reports nothing."""
        return None

    def samples(self) -> int:
        """Samples to run per prompt."""
        return self.n or 1

    def best_prompt_tokens(self) -> int | None:
        """How many best tokens to report per position of the prompt; None reports nothing."""
        return self.prompt_logprobs

    def scores_only(self) -> bool:
        """True when the client wants the prompt's log probabilities or the prompt back, and no output."""
        return self.token_limit() == 0

    def echoes(self) -> bool:
        """True when the prompt is shown before the output."""
        return False

    def check(self) -> None:
        """See RequestBody."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options: allowed only with stream: true", field="stream_options")
        if self.scores_only() and self.prompt_logprobs is None and not self.echoes():
            names = ("max_completion_tokens", "max_new_tokens", "max_tokens")
            name = next(n for n in names if getattr(self, n, None) == 0)
            raise InvalidRequestError(
                f"{name}: 0 asks for nothing; it must be at least 1, but with echo or prompt_logprobs", field=name
            )
