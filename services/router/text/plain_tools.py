"""Tools for chat templates that know none: they become part of the messages, in words.

    tools                 a system message's text, one JSON object per function and line, and how to call one
    an assistant's calls  its text, and each call as it is asked for
    a tool's result       a user's message that says what it is the result of; those that follow each other are one

Models are asked for calls in their own form where the template shows that they have one, else for JSON, which the
parser `json` reads: {"name": …, "arguments": {…}} on a line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from services.router.text.chat_habits import knows_tools

_ASK = """You can call functions. These are all there are, one per line, each with the JSON schema of its parameters:
{functions}
"""
_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEP, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


class CallForm(msgspec.Struct, frozen=True):
    """How calls are asked for and written."""

    ask: str
    written: Callable[[Sequence[tuple[str, Any]]], str]
    """Names and arguments to text."""


def _json_lines(calls: Sequence[tuple[str, Any]]) -> str:
    return "\n".join(_dumped({"name": name, "arguments": arguments}) for name, arguments in calls)


def _deepseek(calls: Sequence[tuple[str, Any]]) -> str:
    each = (f"{_CALL}{name}{_SEP}{_dumped(arguments)}{_CALL_END}" for name, arguments in calls)
    return f"{_CALLS}{''.join(each)}{_CALLS_END}"


def _deepseek_fenced(calls: Sequence[tuple[str, Any]]) -> str:
    each = (f"{_CALL}function{_SEP}{name}\n```json\n{_dumped(arguments)}\n```{_CALL_END}" for name, arguments in calls)
    return f"{_CALLS}{chr(10).join(each)}{_CALLS_END}"


def _python_list(calls: Sequence[tuple[str, Any]]) -> str:
    each = (f"{name}({_keywords(arguments)})" for name, arguments in calls)
    return f"<|tool_call_start|>[{', '.join(each)}]<|tool_call_end|>"


def _keywords(arguments: Any) -> str:
    """Arguments that are no object, as where a limit cut them, stand as they are."""
    if not isinstance(arguments, Mapping):
        return arguments if isinstance(arguments, str) else _dumped(arguments)
    return ", ".join(f"{key}={_dumped(value)}" for key, value in arguments.items())


def _json_list(calls: Sequence[tuple[str, Any]]) -> str:
    return "<|tool_call|>" + _dumped([{"name": name, "arguments": arguments} for name, arguments in calls])


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


_MARKED = (
    f"Further calls stand between the same outer marks, each from {_CALL} to {_CALL_END}. You get the results in the "
    "next message."
)
JSON_LINES = CallForm(
    _ASK
    + """To call a function, answer with this and nothing else, on one line: {{"name": "…", "arguments": {{…}}}}
Further calls go on lines of their own. You get the results in the next message.""",
    _json_lines,
)
DEEPSEEK = CallForm(
    f"{_ASK}To call a function, answer with this and nothing else:\n"
    f"{_CALLS}{_CALL}NAME{_SEP}{{{{…}}}}{_CALL_END}{_CALLS_END}\n{_MARKED}",
    _deepseek,
)
DEEPSEEK_FENCED = CallForm(
    f"{_ASK}To call a function, answer with this and nothing else:\n"
    f"{_CALLS}{_CALL}function{_SEP}NAME\n```json\n{{{{…}}}}\n```{_CALL_END}{_CALLS_END}\n{_MARKED}",
    _deepseek_fenced,
)
LFM2, GRANITE = CallForm(JSON_LINES.ask, _python_list), CallForm(JSON_LINES.ask, _json_list)
"""Templates that tell how to call, but may leave past calls out."""


def form_of(source: str) -> CallForm:
    """The form of the calls of a model with this template."""
    if _CALLS in source:
        return DEEPSEEK_FENCED if "```json" in source else DEEPSEEK
    if knows_tools(source):
        return LFM2 if "<|tool_list_start|>" in source else GRANITE if "<|tool_call|>" in source else JSON_LINES
    return JSON_LINES


def in_words(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    form: CallForm = JSON_LINES,
    *,
    system: bool = True,
) -> list[dict[str, Any]]:
    """The same chat without tools, calls and results as such. Without `system` the first user's message tells of the
    tools, where the chat has no system message."""
    names = {
        str(call.get("id")): _function(call).get("name", "")
        for message in messages
        for call in message.get("tool_calls") or ()
    }
    out: list[dict[str, Any]] = []
    results = 0
    for message in messages:
        rest = {k: v for k, v in message.items() if k not in ("tool_calls", "tool_call_id")}
        text = str(message.get("content") or "")
        if message.get("role") == "tool":
            name = message.get("name") or names.get(str(message.get("tool_call_id"))) or "the function"
            text = f"Result of {name}: {text}"
            if results and out[-1]["role"] == "user":
                out[-1]["content"] += "\n" + text
            else:
                out.append({"role": "user", "content": text})
            results += 1
            continue
        results = 0
        out.append(with_calls_in_words(message, form) if message.get("tool_calls") else rest)
    return _with_tools(out, tools, form, system=system) if tools else out


def with_calls_in_words(message: Mapping[str, Any], form: CallForm) -> dict[str, Any]:
    """A message of the assistant whose calls are part of its text."""
    rest = {k: v for k, v in message.items() if k != "tool_calls"}
    text = str(message.get("content") or "")
    functions = map(_function, message.get("tool_calls") or ())
    written = form.written([(f.get("name", ""), f.get("arguments") or {}) for f in functions])
    return {**rest, "content": f"{text}\n{written}" if text else written}


def _with_tools(
    messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]], form: CallForm, *, system: bool
) -> list[dict[str, Any]]:
    text = form.ask.format(functions="\n".join(_dumped(_described(tool)) for tool in tools))
    first = messages[0] if messages else {}
    role = first.get("role")
    if role in ("system", "developer") or (role == "user" and not system):
        said = str(first.get("content") or "")
        content = f"{text}\n\n{said}" if role == "user" else f"{said}\n\n{text}" if said else text
        return [{**first, "content": content}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _described(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function", {})
    return {k: function[k] for k in ("name", "description", "parameters") if function.get(k) is not None}


def _function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function")
    return function if isinstance(function, Mapping) else call
