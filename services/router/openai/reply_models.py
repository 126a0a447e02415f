"""What the router answers, for /openapi.json: the shapes that clients may count on. Nothing is built of these: replies
are written by hand, and tests hold them to what is said here."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

FinishReason = Literal["stop", "length", "tool_calls"]
PromptLogprobs = list[dict[str, dict[str, Any]] | None]
"""vLLM's: per position nothing, or {token id: {logprob, rank, decoded_token}}."""


class AnyReply(BaseModel):
    """There may be more than is told."""

    model_config = ConfigDict(extra="allow")


class ErrorDetail(AnyReply):
    """What went wrong."""

    message: str
    type: str = Field(description="invalid_request_error, rate_limit_error or server_error")
    param: str | None = Field(description="The field at fault")
    code: str | None = Field(description="A name for programs")


class ErrorBody(AnyReply):
    """Every answer that is not 2xx; in a stream that has begun, its last event."""

    error: ErrorDetail


class PromptTokensDetails(AnyReply):
    """Of the prompt's tokens."""

    cached_tokens: int = Field(ge=0)
    audio_tokens: Literal[0]


class CompletionTokensDetails(AnyReply):
    """Of the output's tokens."""

    reasoning_tokens: int = Field(ge=0)
    audio_tokens: Literal[0]
    accepted_prediction_tokens: Literal[0]
    rejected_prediction_tokens: Literal[0]


class Usage(AnyReply):
    """Token counts."""

    prompt_tokens: int = Field(ge=0)
    completion_tokens: int = Field(ge=0)
    total_tokens: int = Field(ge=0)
    prompt_tokens_details: PromptTokensDetails | None
    completion_tokens_details: CompletionTokensDetails


class TokenLists(AnyReply):
    """Lists of one length."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(AnyReply):
    """One sample of one prompt."""

    index: int = Field(ge=0)
    text: str
    logprobs: TokenLists | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Completion(AnyReply):
    """The answer of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[CompletionChoice]
    usage: Usage


class NamedLogprob(AnyReply):
    """A token and its log probability."""

    token: str
    logprob: float
    bytes: list[int] | None


class PositionLogprobs(NamedLogprob):
    """The token that was drawn, and the likeliest ones."""

    top_logprobs: list[NamedLogprob]


class ChatLogprobs(AnyReply):
    """One entry per token."""

    content: list[PositionLogprobs] | None


class CalledFunctionReply(AnyReply):
    """A function and its arguments, which are JSON as text."""

    name: str
    arguments: str


class ToolCallReply(AnyReply):
    """A call that the model asks for."""

    id: str
    type: Literal["function"]
    function: CalledFunctionReply


class AssistantMessage(AnyReply):
    """The answer."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    annotations: list[dict[str, Any]]
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallReply] | None = None


class ChatChoice(AnyReply):
    """One sample."""

    index: int = Field(ge=0)
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    token_ids: list[int] | None = None


class ChatCompletion(AnyReply):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str | None
    service_tier: Literal["default"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Model(AnyReply):
    """A served name."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class ModelList(AnyReply):
    """All served names."""

    object: Literal["list"]
    data: list[Model]


class GenerateUsage(AnyReply):
    """Token counts of /generate."""

    prompt_tokens: int = Field(ge=0)
    completion_tokens: int = Field(ge=0)
    cached_tokens: int = Field(ge=0)


class Generation(AnyReply):
    """The answer of /generate, and the last event of its stream."""

    request_id: str
    bootstrap_room: int = Field(ge=0)
    text: str
    output_ids: list[int]
    finish_reason: FinishReason
    stop_reason: str | int | None
    usage: GenerateUsage
    timings: dict[str, float]
    attempts: int = Field(ge=1)
    path: str
    transport: str
    prefill_instance: str
    decode_instance: str


class Tokens(AnyReply):
    """The answer of /tokenize."""

    count: int = Field(ge=0)
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None


class Text(AnyReply):
    """The answer of /detokenize."""

    prompt: str


class Status(AnyReply):
    """A sign of life."""

    status: Literal["ok", "ready"]


class Version(AnyReply):
    """Of pdmesh."""

    version: str


class Workers(AnyReply):
    """The rank table as this router sees it."""

    revision: dict[str, Any] | None
    synced: bool
    in_contact: bool
    workers: list[dict[str, Any]]


class Moves(AnyReply):
    """The router's own moves for a request."""

    request_id: str
    rooms: list[int]
    moves: list[dict[str, Any]]


class ScrapeTargets(AnyReply):
    """One process that serves /metrics."""

    targets: list[str]
    labels: dict[str, str]
