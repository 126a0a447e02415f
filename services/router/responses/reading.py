"""The items of a request's input, and the chat's messages that they are.

message                          a message; what the assistant says may have thoughts before it and calls behind
reasoning                        thoughts, where they are in the clear
function_call, …_call_output     a call, and what it gave
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine_core.types.errors import InvalidRequestError
from services.router.chat.turns import Turns
from services.router.edge.json_body import short

_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_PARTS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {"type": {"enum": list(_TEXTS)}, "text": {"type": "string"}},
        "required": ["type", "text"],
    },
    {
        "type": "object",
        "properties": {"type": {"enum": ["refusal"]}, "refusal": {"type": "string"}},
        "required": ["type", "refusal"],
    },
]
_PARTS_SCHEMA: dict[str, Any] = {"type": "array", "items": {"anyOf": _PARTS}}
_TEXT_SCHEMA: dict[str, Any] = {"anyOf": [{"type": "string"}, _PARTS_SCHEMA]}


def _item_schema(kind: str, required: list[str], **properties: Any) -> dict[str, Any]:
    """A message may leave its type out."""
    message = kind == "message"
    known = {"type": {"enum": [kind, None] if message else [kind]}, **properties}
    return {"type": "object", "properties": known, "required": required if message else ["type", *required]}


_STRING = {"type": "string"}
_OPTIONAL = {"anyOf": [_PARTS_SCHEMA, {"type": "null"}]}
_ITEM_SCHEMA = {
    "anyOf": [
        _item_schema("message", ["role", "content"], role={"enum": list(_ROLES)}, content=_TEXT_SCHEMA),
        _item_schema("function_call", ["call_id", "name", "arguments"], call_id=_STRING, name=_STRING,
                     arguments=_STRING),
        _item_schema("function_call_output", ["call_id", "output"], call_id=_STRING, output=_TEXT_SCHEMA),
        _item_schema("reasoning", [], content=_OPTIONAL, summary=_OPTIONAL),
    ]
}  # fmt: skip
CONTENT_SCHEMA = {
    "anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "items": _ITEM_SCHEMA, "minItems": 1}]
}
"""For /openapi.json."""


def read_items(given: str | list[Any], instructions: str | None) -> Turns:
    """The conversation, `instructions` first as the system's. Raises InvalidRequestError that names the item."""
    turns = Turns()
    if instructions:
        turns.place = "instructions"
        turns.message("system", instructions)
    if isinstance(given, str):
        turns.place = "input"
        turns.message("user", given)
        return turns
    for i, item in enumerate(given):
        turns.place = place = f"input[{i}]"
        if not isinstance(item, dict):
            raise InvalidRequestError(f"{place}: {short(item)} is not an item, which is an object", field=place)
        _read_item(turns, {key: value for key, value in item.items() if value is not None}, place)
    if len(turns.messages()) == bool(instructions):
        raise InvalidRequestError("input: holds no message", field="input")
    return turns


def _read_item(turns: Turns, item: Mapping[str, Any], place: str) -> None:
    match item.get("type", "message"):
        case "message":
            role = item.get("role")
            if role not in _ROLES:
                message = f"{place}.role: {short(role)} must be one of {', '.join(_ROLES)}"
                raise InvalidRequestError(message, field=f"{place}.role")
            text = _text(item.get("content"), f"{place}.content")
            if role == "assistant":
                turns.say(text)
            else:
                turns.message(role, text)
        case "reasoning":
            text = "".join(_texts(item.get("content", []), f"{place}.content"))
            summary = "\n\n".join(_texts(item.get("summary", []), f"{place}.summary"))
            text = text or summary
            if text:
                turns.think(text)
        case "function_call":
            name, arguments = _string(item, "name", place), _string(item, "arguments", place)
            turns.call(_string(item, "call_id", place), name, arguments)
        case "function_call_output":
            output = _text(item.get("output"), f"{place}.output")
            turns.result(_string(item, "call_id", place), output, "call_id")
        case "item_reference":
            message = f"{place}: nothing is stored here that item_reference could mean; send the item itself"
            raise InvalidRequestError(message, field=place)
        case kind:
            message = (
                f"{place}.type: {short(kind)} is not supported; "
                "there are message, reasoning, function_call and function_call_output"
            )
            raise InvalidRequestError(message, field=f"{place}.type")


def _string(item: Mapping[str, Any], name: str, place: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidRequestError(f"{place}.{name}: must be text, got {short(value)}", field=f"{place}.{name}")
    return value


def _text(content: Any, place: str) -> str:
    """Text, or parts that are text; line breaks join several, as in chats."""
    return content if isinstance(content, str) else "\n".join(_texts(content, place))


def _texts(parts: Any, place: str) -> list[str]:
    if not isinstance(parts, list):
        raise InvalidRequestError(f"{place}: must be text or a list of text parts, got {short(parts)}", field=place)
    found = []
    for i, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
        if kind not in (*_TEXTS, "refusal") or not isinstance(text, str):
            message = f"{place}[{i}]: {short(kind)} is not supported: this model reads text only"
            raise InvalidRequestError(message, field=f"{place}[{i}]")
        found.append(text)
    return found
