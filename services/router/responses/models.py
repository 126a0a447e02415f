"""What /v1/responses answers, for /openapi.json."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from services.router.openai.reply_models import AnyReply, PositionLogprobs

Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(AnyReply):
    """Text."""

    type: Literal["output_text"]
    text: str
    annotations: list[dict[str, Any]]
    logprobs: list[PositionLogprobs]


class OutputMessage(AnyReply):
    """What the model says."""

    type: Literal["message"]
    id: str
    status: Status
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningText(AnyReply):
    """Thoughts, in the clear."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(AnyReply):
    """What the model thought."""

    type: Literal["reasoning"]
    id: str
    status: Status
    summary: list[dict[str, Any]]
    content: list[ReasoningText]


class FunctionCallItem(AnyReply):
    """A call that the model asks for; its arguments are JSON as text."""

    type: Literal["function_call"]
    id: str
    status: Status
    call_id: str
    name: str
    arguments: str


class InputDetails(AnyReply):
    """Of the input's tokens."""

    cached_tokens: int = Field(ge=0)
    cache_write_tokens: int = Field(ge=0)


class OutputDetails(AnyReply):
    """Of the output's tokens."""

    reasoning_tokens: int = Field(ge=0)


class ResponseUsage(AnyReply):
    """Token counts."""

    input_tokens: int = Field(ge=0)
    input_tokens_details: InputDetails
    output_tokens: int = Field(ge=0)
    output_tokens_details: OutputDetails
    total_tokens: int = Field(ge=0)


class ResponseFailure(AnyReply):
    """Why it failed."""

    code: str
    message: str


class IncompleteDetails(AnyReply):
    """Why it is not whole."""

    reason: Literal["max_output_tokens"]


class ResponseObject(AnyReply):
    """The answer of /v1/responses; its streams hold it in the first events, and whole in the last."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    model: str
    output: list[OutputMessage | ReasoningItem | FunctionCallItem]
    usage: ResponseUsage | None
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, Any]
    parallel_tool_calls: bool
    previous_response_id: None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: str
    store: Literal[False]
    background: Literal[False]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    frequency_penalty: float
    presence_penalty: float
    truncation: Literal["disabled"]
    user: str | None
