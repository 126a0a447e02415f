"""How a chat template wants its chats, by what its text shows, and chats brought into that form.

Mistral's                 ids of nine letters and digits
Kimi's                    ids that hold the function's name and count the calls: functions.NAME:0
Llama 3's, gpt-oss's      one call per message: several become messages of their own, each before its result
DeepSeek's, Phi's         arguments as text, which is found out when they refuse objects
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from services.router.text.template_sandbox import to_json

_LOOPS_OVER_CALLS = re.compile(r"\bin\s+[\w.]+(\.|\[['\"])tool_calls")
_KIMI_ID = re.compile(r"functions\.[^:]+:\d+")
_SAID_ONCE = frozenset({"content", "reasoning_content", "thinking", "reasoning"})
"""What several calls of one message have in common."""
_NOTHING: Mapping[str, Any] = {"type": "object", "properties": {}}


class Habits(msgspec.Struct, frozen=True):
    """What a template knows, and how it wants it."""

    developer: bool
    """The role developer; without, it is system."""
    tools: bool
    calls: bool
    """Past calls."""
    one_call: bool
    """It writes the first call of a message alone."""
    short_ids: bool
    counted_ids: bool

    @classmethod
    def of(cls, source: str) -> Habits:
        """What a template's text shows."""
        return cls(
            developer="developer" in source,
            tools=knows_tools(source),
            calls="tool_calls" in source,
            one_call="tool_calls[0]" in source and _LOOPS_OVER_CALLS.search(source) is None,
            short_ids=re.search(r"strings with length (>= )?9\b", source) is not None,
            counted_ids="<|tool_call_argument_begin|>" in source,
        )

    def fitted(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The same messages as the template wants them."""
        out = list(messages)
        if not self.developer:
            out = [{**m, "role": "system"} if m.get("role") == "developer" else m for m in out]
        if self.one_call:
            out = one_call_each(out)
        if self.short_ids:
            out = _renamed(out, _short, short_id)
        if self.counted_ids:
            out = _renamed(out, _counted, str)
        return out


def knows_tools(source: str) -> bool:
    """True where a template's text speaks of tools; others get them in words."""
    return re.search(r"\btools\b", source) is not None


def short_id(call_id: str) -> str:
    """An id of nine letters and digits, for each always the same."""
    if len(call_id) == 9 and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]


def one_call_each(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with one call each: further ones follow the results of those before."""
    out: list[dict[str, Any]] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        calls = message.get("tool_calls")
        if not isinstance(calls, list) or len(calls) < 2:
            out.append(message)
            continue
        results = []
        while at < len(messages) and messages[at].get("role") == "tool":
            results.append(messages[at])
            at += 1
        for i, call in enumerate(calls):
            own = message if i == 0 else {k: v for k, v in message.items() if k not in _SAID_ONCE} | {"content": ""}
            out.append({**own, "tool_calls": [call]})
            # The results of the last call, and those of no call at all, are what is left.
            mine = [r for r in results if i == len(calls) - 1 or r.get("tool_call_id") == call.get("id")]
            results = [r for r in results if not any(r is m for m in mine)]
            out += mine
    return out


def with_text_arguments(messages: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages with their calls' arguments as JSON text."""
    return [_with_text(message) if message.get("tool_calls") else message for message in messages]


def filled(tools: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The tools, each with a description and parameters, which a client may leave out."""
    out: list[Mapping[str, Any]] = []
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, Mapping):
            whole = {"description": "", "parameters": _NOTHING} | {k: v for k, v in function.items() if v is not None}
            tool = {**tool, "function": whole}
        out.append(tool)
    return out


def _with_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    calls = [
        {**call, "function": {**call["function"], "arguments": to_json(call["function"].get("arguments"))}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _calls(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = message.get("tool_calls")
    return found if isinstance(found, list) else []


def _renamed(
    messages: Iterable[dict[str, Any]], of_call: Callable[[Mapping[str, Any], int], str], other: Callable[[str], str]
) -> list[dict[str, Any]]:
    """The messages with other ids: of a call by itself and how many came before it; of a result its call's, or
    `other` where there is none."""
    out, names, count = [], dict[Any, str](), 0
    for message in messages:
        calls = []
        for call in _calls(message):
            names[call.get("id")] = of_call(call, count)
            calls.append({**call, "id": names[call.get("id")]})
            count += 1
        if calls:
            message = {**message, "tool_calls": calls}
        if isinstance(found := message.get("tool_call_id"), str):
            message = {**message, "tool_call_id": names.get(found) or other(found)}
        out.append(message)
    return out


def _short(call: Mapping[str, Any], count: int) -> str:
    call_id = call.get("id")
    return short_id(call_id if isinstance(call_id, str) else f"call {count}")


def _counted(call: Mapping[str, Any], count: int) -> str:
    call_id = call.get("id")
    if isinstance(call_id, str) and _KIMI_ID.fullmatch(call_id):
        return call_id
    return f"functions.{call['function'].get('name')}:{count}"
