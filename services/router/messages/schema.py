"""What /v1/messages takes, and the chat that it asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from services.router.chat.client_names import client_names
from services.router.chat.schema import FUNCTION_NAME, MAX_TOOLS, ChatMessage, ChatRequest, ObjectSchema, Tool
from services.router.edge.fields import MAX_INT, StopStrings, Strict
from services.router.edge.request_body import Refused, RequestBody, first_refused, one_of
from services.router.messages.reading import BLOCKS_SCHEMA, MessageParam, read_messages, system_text
from services.router.sampling_schema import UNSUPPORTED, DrawingRequest, JsonSchemaFormat, ResponseFormat

NAMES: Mapping[str, str] = {
    "continue_final_message": "messages",
    "max_completion_tokens": "max_tokens",
    "response_format.json_schema.schema": "output_config.format.schema",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
}
"""What the fields of chats are called here."""

_REFUSED: Refused = {
    **UNSUPPORTED,
    "container": (one_of(), "this server runs no code"),
    "mcp_servers": (one_of([]), "this server calls no tools by itself"),
    "output_format": (one_of(), "use output_config.format"),
    "response_format": (one_of(), "use output_config.format"),
    "stop": (one_of([]), "use stop_sequences"),
    "n": (one_of(1), "a message is one sample"),
}
"""Fields that are known, change the output and are not to be had here: what changes nothing, and why nothing else."""


class Metadata(Strict):
    """Whom the request is from."""

    user_id: str | None = None


class Thinking(Strict):
    """Whether the model thinks. There is no budget but max_tokens."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=0, le=MAX_INT)
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Strict):
    """The form of the text."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    """Of the output."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class MessagesTool(Strict):
    """A function that the model may call; `input_schema` is a JSON schema."""

    type: Literal["custom"] | None = None
    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    input_schema: ObjectSchema = None
    strict: bool | None = None

    def for_chat(self) -> Tool:
        """The same as chats have it, with what the client wrote."""
        function = self.model_dump(exclude_unset=True, exclude={"type", "input_schema"})
        if self.input_schema is not None:
            function["parameters"] = self.input_schema
        return Tool.model_validate({"type": "function", "function": function})


def _tools(value: Any) -> Any:
    """Names the kind of tool that is not there."""
    for i, tool in enumerate(value if isinstance(value, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "custom":
            raise ValueError(f"[{i}] has type {kind!r}: there are custom tools only")
    return value


class MessagesToolChoice(Strict):
    """Whether tools are called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = False

    @model_validator(mode="after")
    def _whole(self) -> MessagesToolChoice:
        if self.type == "tool" and not self.name:
            raise ValueError("type tool needs a name")
        return self


class CountTokensRequest(RequestBody):
    """POST /v1/messages/count_tokens: what the prompt consists of."""

    model: str
    messages: list[MessageParam] = Field(min_length=1)
    system: Annotated[str, BeforeValidator(system_text), WithJsonSchema(BLOCKS_SCHEMA)] = ""
    tools: Annotated[list[MessagesTool] | None, BeforeValidator(_tools)] = Field(None, max_length=MAX_TOOLS)
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @classmethod
    def refusal(cls, data: Mapping[str, Any]) -> tuple[str, str] | None:
        """See RequestBody."""
        return first_refused(_REFUSED, data)

    def chat(self) -> tuple[ChatRequest, Mapping[str, str]]:
        """The chat that this asks for, and what its fields are called here. Raises InvalidRequestError."""
        turns = read_messages(self.system, self.messages)
        asked = ChatRequest.model_construct(**self._values(turns.messages()))
        with client_names(NAMES):
            asked.check()
        return asked, {**NAMES, **turns.names()}

    def _values(self, messages: list[ChatMessage]) -> dict[str, Any]:
        goes_on = messages[-1].role == "assistant"
        choice = self.tool_choice
        named = None if choice is None else _CHOICES.get(choice.type, f"function:{choice.name}")
        effort = None if self.output_config is None else self.output_config.effort
        thinks: dict[str, Any] = {}
        if self.thinking is not None:
            on = self.thinking.type != "disabled"
            thinks = {"enable_thinking": on, "thinking": on}
        return {
            "model": self.model,
            "messages": messages,
            "continue_final_message": goes_on,
            "tools": [tool.for_chat() for tool in self.tools or ()] or None,
            "tool_choice": named,
            "parallel_tool_calls": not (choice and choice.disable_parallel_tool_use),
            "reasoning_effort": "xhigh" if effort == "max" else effort,
            "response_format": self._format(),
            "chat_template_kwargs": {**thinks, **(self.chat_template_kwargs or {})} or None,
        }

    def _format(self) -> ResponseFormat | None:
        wanted = None if self.output_config is None else self.output_config.format
        if wanted is None:
            return None
        schema = JsonSchemaFormat.model_validate({"schema": wanted.schema_, "strict": True})
        return ResponseFormat(type="json_schema", json_schema=schema)


_CHOICES: Mapping[str, str] = {"auto": "auto", "any": "required", "none": "none"}


class MessagesRequest(DrawingRequest, CountTokensRequest):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=1, le=MAX_INT)
    stop_sequences: StopStrings = ()
    metadata: Metadata | None = None  # type: ignore[assignment]

    def _values(self, messages: list[ChatMessage]) -> dict[str, Any]:
        shared = {name: getattr(self, name) for name in DrawingRequest.model_fields}
        return {
            **shared,
            **super()._values(messages),
            "metadata": None,
            "user": (self.metadata and self.metadata.user_id) or self.user,
            "max_completion_tokens": self.max_tokens,
            "stop": self.stop_sequences,
        }
