"""The messages of a request to /v1/messages, and those of a chat that they are.

Messages of the user that follow each other, or of the assistant, are one turn, as if all blocks stood in one message.

user         text is the user's message; each tool_result is a message of its own, in its place
assistant    thinking, text and tool_use, in this order, are one message

Texts in a row are one text, in lines.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    for role, blocks in _turns_of(given):
        if role == "assistant":
            turns.end()
            _read_assistant(turns, blocks)
        else:
            _read_other(turns, role, blocks)
    if not turns.messages():
        raise InvalidRequestError("messages: hold nothing", field="messages")
    return turns


_Placed = tuple[str, Mapping[str, Any]]
"""A block, and where the client has it."""


def _turns_of(given: Sequence[MessageParam]) -> Iterator[tuple[str, list[_Placed]]]:
    """Whose turn it is, and its blocks; of the system each message is one."""

    def turn(numbered: tuple[int, MessageParam]) -> tuple[str, int]:
        i, message = numbered
        return message.role, i if message.role == "system" else 0

    for (role, _), messages in itertools.groupby(enumerate(given), turn):
        blocks = [placed for i, message in messages for placed in _blocks(message, f"messages[{i}].content")]
        yield role, _joined(placed for placed in blocks if placed[1].get("type") not in _UNREAD[role])


_UNREAD: Mapping[str, tuple[str, ...]] = {"user": (), "system": (), "assistant": ("redacted_thinking",)}
"""Of another server's models: nobody here could read it."""


def _blocks(message: MessageParam, place: str) -> list[_Placed]:
    if isinstance(message.content, str):
        return [(place, {"type": "text", "text": message.content})]
    return [(f"{place}[{k}]", _block(block, f"{place}[{k}]")) for k, block in enumerate(message.content)]


def _joined(blocks: Iterable[_Placed]) -> list[_Placed]:
    """Texts that follow each other are one, in the place of the first."""
    found: list[_Placed] = []
    for texts, group in itertools.groupby(blocks, lambda placed: placed[1].get("type") == "text"):
        row = list(group)
        if texts:
            row = [(row[0][0], {"type": "text", "text": "\n".join(_string(b, "text", here) for here, b in row)})]
        found += row
    return found


def _block(block: Any, place: str) -> dict[str, Any]:
    if not isinstance(block, dict):
        raise InvalidRequestError(f"{place}: {short(block)} is not a block, which is an object", field=place)
    return {key: value for key, value in block.items() if value is not None}


def _read_assistant(turns: Turns, blocks: Sequence[_Placed]) -> None:
    for here, block in blocks:
        turns.place = here.partition(".")[0]
        match block.get("type"):
            case "text":
                turns.say(block["text"])
            case "thinking":
                turns.think(_string(block, "thinking", here))
            case "tool_use":
                arguments = block.get("input")
                if not isinstance(arguments, dict):
                    message = f"{here}.input: must be an object, got {short(arguments)}"
                    raise InvalidRequestError(message, field=f"{here}.input")
                turns.call(_string(block, "id", here), _string(block, "name", here), arguments)
            case kind:
                raise _unknown(kind, here, "text, thinking and tool_use")


def _read_other(turns: Turns, role: str, blocks: Sequence[_Placed]) -> None:
    for here, block in blocks:
        turns.place = here
        match block.get("type"):
            case "text":
                turns.message(role, block["text"])
            case "tool_result" if role == "user":
                content = _result_text(block.get("content", ""), f"{here}.content")
                turns.result(_string(block, "tool_use_id", here), content, "tool_use_id")
            case kind:
                raise _unknown(kind, here, "text and tool_result" if role == "user" else "text")


def _result_text(content: Any, place: str) -> str:
    """Text, or text blocks."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(f"{place}: must be text or a list of blocks, got {short(content)}", field=place)
    for m, part in enumerate(content):
        if not _is_text(part):
            kind = part.get("type") if isinstance(part, dict) else part
            raise _unknown(kind, f"{place}[{m}]", "text")
    return "\n".join(part["text"] for part in content)


def _string(block: Mapping[str, Any], name: str, place: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise InvalidRequestError(f"{place}.{name}: must be text, got {short(value)}", field=f"{place}.{name}")
    return value


def _unknown(kind: Any, place: str, known: str) -> InvalidRequestError:
    return InvalidRequestError(f"{place}: {short(kind)} is not supported here; there is {known}", field=place)
