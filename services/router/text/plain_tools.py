"""Tools for chat templates that know none: they become part of the messages, in words.

    tools                 a system message's text, one JSON object per function and line, and how to call one
    an assistant's calls  its text, and each call as it is asked for: {"name": …, "arguments": {…}} on a line
    a tool's result       a user's message that says what it is the result of; those that follow each other are one

The parser `json` reads what a model answers to that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_ASK = """You can call functions. These are all there are, one per line, each with the JSON schema of its parameters:
{functions}
To call a function, answer with this and nothing else, on one line: {{"name": "…", "arguments": {{…}}}}
Further calls go on lines of their own. You get the results in the next message."""


def in_words(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same chat without tools, calls and results as such."""
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
        if calls := message.get("tool_calls"):
            text = "\n".join([*([text] if text else []), *map(_written, calls)])
        out.append({**rest, "content": text} if calls else rest)
    return _with_tools(out, tools) if tools else out


def _with_tools(messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    functions = "\n".join(json.dumps(_described(tool), ensure_ascii=False) for tool in tools)
    text = _ASK.format(functions=functions)
    first = messages[0] if messages else {}
    if first.get("role") in ("system", "developer"):
        before = str(first.get("content") or "")
        return [{**first, "content": f"{before}\n\n{text}" if before else text}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _described(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function", {})
    return {k: function[k] for k in ("name", "description", "parameters") if function.get(k) is not None}


def _written(call: Mapping[str, Any]) -> str:
    function = _function(call)
    found = {"name": function.get("name", ""), "arguments": function.get("arguments") or {}}
    return json.dumps(found, ensure_ascii=False)


def _function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function")
    return function if isinstance(function, Mapping) else call
