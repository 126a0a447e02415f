"""What a chat holds: messages, tools, and how its template is to be rendered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from engine_core.types.errors import InvalidRequestError
from services.router.edge.fields import MAX_INT, Arguments, Content
from services.router.sampling_schema import MAX_LOGPROBS, SamplingRequest

MAX_TOOLS = 128
FUNCTION_NAME = r"^[a-zA-Z0-9_-]{1,64}$"


class _Open(BaseModel):
    """A part whose further keys go to the chat template."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class CalledFunction(_Open):
    """A past call's function; its arguments are a JSON object, as text or as it is."""

    name: str
    arguments: Arguments = Field(default_factory=dict)


class MessageToolCall(_Open):
    """A past call."""

    id: str | None = None
    type: Literal["function"] | None = "function"
    function: CalledFunction


_ONLY_ASSISTANTS_ARE_SILENT: dict[str, Any] = {
    "anyOf": [
        {"properties": {"role": {"enum": ["assistant"]}}},
        {"properties": {"content": {"type": ["string", "array"]}}, "required": ["content"]},
    ]
}
"""What check_contents asks for, for /openapi.json."""


class ChatMessage(_Open):
    """One message."""

    model_config = ConfigDict(json_schema_extra=_ONLY_ASSISTANTS_ARE_SILENT)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None

    def for_template(self) -> dict[str, Any]:
        """The message as the chat template sees it; a null content is empty text."""
        return {**self.model_dump(), "content": self.content or ""}


def _object_schema(value: Any) -> dict[str, Any] | None:
    """A JSON schema whose values are objects; one that names no type is taken as such."""
    if value is None:
        return None
    if not isinstance(value, dict) or value.get("type", "object") != "object":
        raise ValueError("must be a JSON schema of type object")
    return value


_OBJECT_SCHEMA = {"anyOf": [{"type": "object", "properties": {"type": {"enum": ["object"]}}}, {"type": "null"}]}
ObjectSchema = Annotated[dict[str, Any] | None, BeforeValidator(_object_schema), WithJsonSchema(_OBJECT_SCHEMA)]


class FunctionSpec(_Open):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    parameters: ObjectSchema = None
    strict: bool | None = None


class Tool(_Open):
    """A tool; there are functions only."""

    type: Literal["function"]
    function: FunctionSpec

    def for_template(self) -> dict[str, Any]:
        """The tool as the chat template sees it: what the client wrote."""
        return self.model_dump(exclude_unset=True)


def _tool_choice(value: Any) -> str | None:
    """none, auto, required, or the name of a function as function:NAME."""
    if value is None or value in ("none", "auto", "required"):
        return None if value is None else str(value)
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("must be none, auto, required, or {'type': 'function', 'function': {'name': …}}")
    return f"function:{function['name']}"


_CHOICE_SCHEMA = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        {
            "type": "object",
            "properties": {
                "type": {"enum": ["function"]},
                "function": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
            },
            "required": ["type", "function"],
        },
        {"type": "null"},
    ]
}
ToolChoice = Annotated[str | None, BeforeValidator(_tool_choice), WithJsonSchema(_CHOICE_SCHEMA)]


class Chat(msgspec.Struct, frozen=True):
    """A chat to render. `template` is the client's own; None takes the model's."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    documents: tuple[Mapping[str, Any], ...] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template: str | None = None
    kwargs: Mapping[str, Any] = {}


def check_contents(messages: Sequence[ChatMessage]) -> None:
    """Raises InvalidRequestError for a message that must have content and has none."""
    for i, message in enumerate(messages):
        if message.content is None and message.role != "assistant":
            name = f"messages[{i}].content"
            raise InvalidRequestError(f"{name}: required for the role {message.role}", field=name)


class TemplateFields(Protocol):
    """What every request that renders a chat says of it."""

    @property
    def tools(self) -> list[Tool] | None: ...
    @property
    def documents(self) -> list[dict[str, Any]] | None: ...
    @property
    def add_generation_prompt(self) -> bool | None: ...
    @property
    def continue_final_message(self) -> bool | None: ...
    @property
    def chat_template(self) -> str | None: ...
    @property
    def chat_template_kwargs(self) -> dict[str, Any] | None: ...
    @property
    def model_fields_set(self) -> set[str]: ...


def chat_of(asked: TemplateFields, messages: list[ChatMessage], kwargs: Mapping[str, Any]) -> Chat:
    """What the template gets; the client's own keyword arguments go before `kwargs`. Raises InvalidRequestError."""
    goes_on = bool(asked.continue_final_message)
    if goes_on and asked.add_generation_prompt and "add_generation_prompt" in asked.model_fields_set:
        raise InvalidRequestError(
            "continue_final_message: not together with add_generation_prompt: a message that goes on is not a new one",
            field="continue_final_message",
        )
    if goes_on and (wrong := _why_none_goes_on(messages[-1])):
        raise InvalidRequestError(f"continue_final_message: {wrong}", field="continue_final_message")
    return Chat(
        messages=tuple(m.for_template() for m in messages),
        tools=tuple(t.for_template() for t in asked.tools or ()),
        documents=tuple(asked.documents or ()),
        add_generation_prompt=asked.add_generation_prompt is not False and not goes_on,
        continue_final_message=goes_on,
        template=asked.chat_template,
        kwargs={**kwargs, **(asked.chat_template_kwargs or {})},
    )


def _why_none_goes_on(last: ChatMessage) -> str:
    """Why no text can go on from this message; "" when it can."""
    if last.role != "assistant":
        return "the last message must be the assistant's, with text to go on from"
    if last.tool_calls:
        return "the last message ends with calls, and what follows those are their results"
    return "" if (last.content or "").strip() else "the last message is the assistant's, but has no text to go on from"


class ChatRequest(SamplingRequest):
    """POST /v1/chat/completions."""

    model: str
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=0, le=MAX_INT)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = True
    max_tool_calls: int | None = Field(None, ge=1, le=MAX_INT)
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None

    def token_limit(self) -> int | None:
        """max_completion_tokens goes before the older max_tokens."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def best_tokens(self) -> int | None:
        """See SamplingRequest."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def choice(self) -> str:
        """none, auto, required, or function:NAME; what holds when the client says nothing."""
        return self.tool_choice or ("auto" if self.tools else "none")

    def check(self) -> None:
        """See RequestBody."""
        super().check()
        check_contents(self.messages)
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs: needs logprobs: true", field="top_logprobs")
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            twice = next(n for n in names if names.count(n) > 1)
            raise InvalidRequestError(f"tools: the function {twice!r} is there twice", field="tools")
        if self.choice == "required" and not names:
            raise InvalidRequestError("tool_choice: required needs tools", field="tool_choice")
        name = self.choice.removeprefix("function:")
        if self.choice.startswith("function:") and name not in names:
            raise InvalidRequestError(f"tool_choice: there is no function {name!r} in tools", field="tool_choice")

    def chat(self) -> Chat:
        """What the template gets. Tools that must not be called are not shown to it. Raises InvalidRequestError."""
        kwargs: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            kwargs["reasoning_effort"] = self.reasoning_effort
        if self.reasoning_effort == "none":
            kwargs |= {"enable_thinking": False, "thinking": False}
        chat = chat_of(self, self.messages, kwargs)
        return msgspec.structs.replace(chat, tools=()) if self.choice == "none" else chat
