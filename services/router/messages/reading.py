"""The messages of a request to /v1/messages, and those of a chat that they are.

user         text is the user's message; each tool_result is a message of its own, in its place
assistant    thinking, text and tool_use, in this order, are one message
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, WithJsonSchema

from engine_core.types.errors import InvalidRequestError
from services.router.chat.turns import Turns
from services.router.edge.fields import Strict
from services.router.edge.json_body import short

_STRING = {"type": "string"}
_TEXT_BLOCK = {
    "type": "object",
    "properties": {"type": {"enum": ["text"]}, "text": _STRING},
    "required": ["type", "text"],
}
BLOCKS_SCHEMA: dict[str, Any] = {"anyOf": [_STRING, {"type": "array", "items": _TEXT_BLOCK}, {"type": "null"}]}
"""For /openapi.json."""
_BLOCK_SCHEMAS: list[dict[str, Any]] = [
    _TEXT_BLOCK,
    {
        "type": "object",
        "properties": {"type": {"enum": ["thinking"]}, "thinking": _STRING},
        "required": ["type", "thinking"],
    },
    {
        "type": "object",
        "properties": {"type": {"enum": ["tool_use"]}, "id": _STRING, "name": _STRING, "input": {"type": "object"}},
        "required": ["type", "id", "name", "input"],
    },
    {
        "type": "object",
        "properties": {"type": {"enum": ["tool_result"]}, "tool_use_id": _STRING, "content": BLOCKS_SCHEMA},
        "required": ["type", "tool_use_id"],
    },
]
_CONTENT_SCHEMA = {"anyOf": [_STRING, {"type": "array", "items": {"anyOf": _BLOCK_SCHEMAS}, "minItems": 1}]}


def _content(value: Any) -> Any:
    """Text or blocks; these are read when all else is known to be right."""
    if isinstance(value, str) or (isinstance(value, list) and value):
        return value
    raise ValueError("must be text or a list of blocks, and not empty")


class MessageParam(Strict):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[Any, BeforeValidator(_content), WithJsonSchema(_CONTENT_SCHEMA)]


def system_text(value: Any) -> str:
    """Text, or text blocks."""
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list) or not all(_is_text(block) for block in value):
        raise ValueError("must be text or a list of text blocks")
    return "\n".join(block["text"] for block in value)


def _is_text(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") == "text" and isinstance(block.get("text"), str)


def read_messages(system: str, given: Sequence[MessageParam]) -> Turns:
    """The conversation, the system's message first. Raises InvalidRequestError that names the block at fault."""
    turns = Turns()
    if system:
        turns.place = "system"
        turns.message("system", system)
    for i, message in enumerate(given):
        place = f"messages[{i}].content"
        blocks = message.content
        if isinstance(blocks, str):
            blocks = [{"type": "text", "text": blocks}]
        blocks = [_block(block, f"{place}[{k}]") for k, block in enumerate(blocks)]
        if message.role == "assistant":
            turns.end()
            _read_assistant(turns, blocks, place)
        else:
            _read_other(turns, message.role, blocks, place)
    if not turns.messages():
        raise InvalidRequestError("messages: hold nothing", field="messages")
    return turns


def _block(block: Any, place: str) -> dict[str, Any]:
    if not isinstance(block, dict):
        raise InvalidRequestError(f"{place}: {short(block)} is not a block, which is an object", field=place)
    return {key: value for key, value in block.items() if value is not None}


def _read_assistant(turns: Turns, blocks: Sequence[Mapping[str, Any]], place: str) -> None:
    texts: list[str] = []
    turns.place = place.removesuffix(".content")

    def say() -> None:
        if texts:
            turns.say("\n".join(texts))
            texts.clear()

    for k, block in enumerate(blocks):
        here = f"{place}[{k}]"
        match block.get("type"):
            case "text":
                texts.append(_string(block, "text", here))
                continue
            case "thinking":
                say()
                turns.think(_string(block, "thinking", here))
            case "redacted_thinking":
                continue  # of another server's models: nobody here could read it
            case "tool_use":
                say()
                arguments = block.get("input")
                if not isinstance(arguments, dict):
                    message = f"{here}.input: must be an object, got {short(arguments)}"
                    raise InvalidRequestError(message, field=f"{here}.input")
                turns.call(_string(block, "id", here), _string(block, "name", here), arguments)
            case kind:
                raise _unknown(kind, here, "text, thinking and tool_use")
    say()


def _read_other(turns: Turns, role: str, blocks: Sequence[Mapping[str, Any]], place: str) -> None:
    texts: list[str] = []

    def say() -> None:
        if texts:
            turns.message(role, "\n".join(texts))
            texts.clear()

    for k, block in enumerate(blocks):
        turns.place = here = f"{place}[{k}]"
        match block.get("type"):
            case "text":
                texts.append(_string(block, "text", here))
            case "tool_result" if role == "user":
                say()
                content = block.get("content", "")
                if not isinstance(content, str):
                    if not isinstance(content, list):
                        message = f"{here}.content: must be text or a list of blocks, got {short(content)}"
                        raise InvalidRequestError(message, field=f"{here}.content")
                    for m, part in enumerate(content):
                        if not _is_text(part):
                            kind = part.get("type") if isinstance(part, dict) else part
                            raise _unknown(kind, f"{here}.content[{m}]", "text")
                    content = "\n".join(part["text"] for part in content)
                turns.result(_string(block, "tool_use_id", here), content, "tool_use_id")
            case kind:
                raise _unknown(kind, here, "text and tool_result" if role == "user" else "text")
    say()


def _string(block: Mapping[str, Any], name: str, place: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise InvalidRequestError(f"{place}.{name}: must be text, got {short(value)}", field=f"{place}.{name}")
    return value


def _unknown(kind: Any, place: str, known: str) -> InvalidRequestError:
    return InvalidRequestError(f"{place}: {short(kind)} is not supported here; there is {known}", field=place)
