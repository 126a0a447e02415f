"""What /v1/messages answers, for /openapi.json."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from services.router.openai.reply_models import AnyReply


class TextBlock(AnyReply):
    """Text."""

    type: Literal["text"]
    text: str
    citations: None


class ThinkingBlock(AnyReply):
    """What the model thought; nothing signs it."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(AnyReply):
    """A call that the model asks for."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ThinkingDetails(AnyReply):
    """Of the output's tokens."""

    thinking_tokens: int = Field(ge=0)


class MessageUsage(AnyReply):
    """Token counts; what was read from a cache is no input."""

    input_tokens: int = Field(ge=0)
    cache_read_input_tokens: int = Field(ge=0)
    cache_creation_input_tokens: int = Field(ge=0)
    output_tokens: int = Field(ge=0)
    output_tokens_details: ThinkingDetails


class MessageObject(AnyReply):
    """The answer of /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(AnyReply):
    """The answer of /v1/messages/count_tokens."""

    input_tokens: int = Field(ge=0)


class MessagesErrorDetail(AnyReply):
    """What went wrong."""

    type: str
    message: str


class MessagesError(AnyReply):
    """Every answer that is not 2xx; in a stream that has begun, its last event."""

    type: Literal["error"]
    error: MessagesErrorDetail
    request_id: str | None
