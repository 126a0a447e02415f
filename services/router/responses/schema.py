"""What /v1/responses takes, and the chat that it asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from engine_core.types.errors import InvalidRequestError
from services.router.chat.client_names import client_names
from services.router.chat.schema import FUNCTION_NAME, MAX_TOOLS, ChatRequest, ObjectSchema, Tool
from services.router.edge.fields import MAX_INT, StopStrings, Strict
from services.router.edge.request_body import Refused, first_refused, one_of
from services.router.responses.reading import CONTENT_SCHEMA, read_items
from services.router.sampling_schema import MAX_LOGPROBS, UNSUPPORTED, DrawingRequest, JsonSchemaFormat, ResponseFormat

LOGPROBS = "message.output_text.logprobs"
"""What `include` holds where log probabilities are wanted."""
NAMES: Mapping[str, str] = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""What the fields of chats are called here."""

_NOT_STORED = "responses are not stored here: send the whole conversation as input"
_REFUSED: Refused = {
    **UNSUPPORTED,
    "previous_response_id": (one_of(), _NOT_STORED),
    "conversation": (one_of(), _NOT_STORED),
    "prompt": (one_of(), "prompts are not stored here: send instructions and input"),
    "background": (one_of(False), _NOT_STORED),
    "n": (one_of(1), "a response is one sample"),
    "messages": (one_of(), "use input"),
    "max_tokens": (one_of(), "use max_output_tokens"),
    "max_completion_tokens": (one_of(), "use max_output_tokens"),
    "response_format": (one_of(), "use text.format"),
    "reasoning_effort": (one_of(), "use reasoning.effort"),
    "logprobs": (one_of(False), f"use include with {LOGPROBS!r}, and top_logprobs"),
    "guided_json": (one_of(), "use text.format"),
    "guided_regex": (one_of(), "use /v1/chat/completions"),
    "guided_choice": (one_of(), "use /v1/chat/completions"),
    "guided_grammar": (one_of(), "use /v1/chat/completions"),
    "structured_outputs": (one_of(), "use text.format, or /v1/chat/completions"),
    "prompt_logprobs": (one_of(), "use /v1/chat/completions"),
}
"""Fields that are known, change the output and are not to be had here: what changes nothing, and why nothing else."""


class TextFormat(Strict):
    """The form of the text."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = Field(None, max_length=64)
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextConfig(Strict):
    """Of the text."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(Strict):
    """Of the thoughts. Summaries are not made."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class FunctionTool(Strict):
    """A function that the model may call; `parameters` is a JSON schema."""

    type: Literal["function"]
    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    parameters: ObjectSchema = None
    strict: bool | None = None

    def for_chat(self) -> Tool:
        """The same as chats have it, with what the client wrote."""
        return Tool.model_validate(
            {"type": "function", "function": self.model_dump(exclude_unset=True, exclude={"type"})}
        )


def _tools(value: Any) -> Any:
    """Names the kind of tool that is not there."""
    for i, tool in enumerate(value if isinstance(value, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "function":
            raise ValueError(f"[{i}] has type {kind!r}: there are functions only")
    return value


def _choice(value: Any) -> Any:
    """none, auto, required, a function, or what is allowed of the tools."""
    if value is None or value in ("none", "auto", "required"):
        return value
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "function" and isinstance(value.get("name"), str):
        return {"type": kind, "name": value["name"]}
    if kind == "allowed_tools":
        tools, mode = value.get("tools"), value.get("mode", "auto")
        if not isinstance(tools, list) or not tools or mode not in ("auto", "required"):
            raise ValueError("of type allowed_tools needs mode, auto or required, and tools, a list of functions")
        return {"type": kind, "mode": mode, "tools": [_named(tool) for tool in tools]}
    raise ValueError(
        "must be none, auto, required, {'type': 'function', 'name': …} or {'type': 'allowed_tools', 'mode': …, "
        "'tools': [{'type': 'function', 'name': …}]}"
    )


def _named(tool: Any) -> dict[str, str]:
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        raise ValueError("of type allowed_tools: each of tools must be {'type': 'function', 'name': …}")
    return {"type": "function", "name": tool["name"]}


_NULL = {"type": "null"}
_ONE_FUNCTION = {
    "type": "object",
    "properties": {"type": {"enum": ["function"]}, "name": {"type": "string"}},
    "required": ["type", "name"],
}
_CHOICE_SCHEMA = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        _ONE_FUNCTION,
        {
            "type": "object",
            "properties": {
                "type": {"enum": ["allowed_tools"]},
                "mode": {"enum": ["auto", "required"]},
                "tools": {"type": "array", "items": _ONE_FUNCTION, "minItems": 1},
            },
            "required": ["type", "mode", "tools"],
        },
        _NULL,
    ]
}


def _input(value: Any) -> Any:
    """Text, or a list of items; these are read when all else is known to be right."""
    if isinstance(value, str | list) and value:
        return value
    raise ValueError("must be text or a list of items, and not empty")


class ResponsesRequest(DrawingRequest):
    """POST /v1/responses."""

    model: str
    input: Annotated[Any, BeforeValidator(_input), WithJsonSchema(CONTENT_SCHEMA)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=MAX_INT)
    include: list[str] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    stop: StopStrings = ()
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    tools: Annotated[list[FunctionTool] | None, BeforeValidator(_tools)] = Field(None, max_length=MAX_TOOLS)
    tool_choice: Annotated[Any, BeforeValidator(_choice), WithJsonSchema(_CHOICE_SCHEMA)] = None
    parallel_tool_calls: bool | None = True
    max_tool_calls: int | None = Field(None, ge=1, le=MAX_INT)
    truncation: Literal["auto", "disabled"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @classmethod
    def refusal(cls, data: Mapping[str, Any]) -> tuple[str, str] | None:
        """See RequestBody."""
        return first_refused(_REFUSED, data)

    @property
    def logprobs(self) -> bool:
        """Whether the text's log probabilities are wanted."""
        return LOGPROBS in (self.include or ())

    def chat(self) -> tuple[ChatRequest, Mapping[str, str]]:
        """The chat that this asks for, and what its fields are called here. Raises InvalidRequestError that names the
        item at fault, or fields that contradict each other."""
        turns = read_items(self.input, self.instructions)
        tools, choice = self.tools or [], self.tool_choice
        if isinstance(choice, dict) and choice["type"] == "allowed_tools":
            allowed = {tool["name"] for tool in choice["tools"]}
            missing = allowed - {tool.name for tool in tools}
            if missing:
                message = f"tool_choice: there is no function {min(missing)!r} in tools"
                raise InvalidRequestError(message, field="tool_choice")
            tools, choice = [tool for tool in tools if tool.name in allowed], choice["mode"]
        elif isinstance(choice, dict):
            choice = f"function:{choice['name']}"
        shared = {name: getattr(self, name) for name in DrawingRequest.model_fields}
        asked = ChatRequest.model_construct(
            **{
                **shared,
                "model": self.model,
                "user": self.safety_identifier or self.user,
                "messages": turns.messages(),
                "max_completion_tokens": self.max_output_tokens,
                "stop": self.stop,
                "logprobs": self.logprobs,
                "top_logprobs": self.top_logprobs if self.logprobs else None,
                "tools": [tool.for_chat() for tool in tools] or None,
                "tool_choice": choice,
                "parallel_tool_calls": self.parallel_tool_calls,
                "max_tool_calls": self.max_tool_calls,
                "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
                "response_format": self._format(),
                "chat_template_kwargs": self.chat_template_kwargs,
            }
        )
        with client_names(NAMES):
            asked.check()
        return asked, {**NAMES, **turns.names()}

    def _format(self) -> ResponseFormat | None:
        wanted = None if self.text is None else self.text.format
        if wanted is None or wanted.type != "json_schema":
            return None if wanted is None else ResponseFormat(type=wanted.type)
        if wanted.schema_ is None:
            raise InvalidRequestError("text.format.schema: required for type json_schema", field="text.format.schema")
        schema = JsonSchemaFormat.model_validate(
            {"name": wanted.name, "schema": wanted.schema_, "strict": wanted.strict}
        )
        return ResponseFormat(type="json_schema", json_schema=schema)
