"""Tools, calls and results on their way into a chat template."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine_core.types.errors import InvalidRequestError
from services.router.parsers.base import ToolCallArguments, ToolCallBegin
from services.router.parsers.choice import OutputFormat
from services.router.text.chat_template import ChatTemplate
from services.router.text.plain_tools import in_words
from tests.support.outputs import read

PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
KNOWING = (
    "{% if tools %}{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.id }}:{{ c.function.name }}={{ c.function.arguments | tojson }}{% endfor %}"
    "{{ m.tool_call_id }}\n{% endfor %}"
)
APPENDING = "{% if tools %}{% endif %}{% for m in messages %}{% for c in m.tool_calls or [] %}" + (
    "{{ c.type + ':' + c.function.arguments }}{% endfor %}{% endfor %}"
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather now.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "strict": True,
    },
}
ASKED: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call_1",
            "type": "function",
            "function": {"name": "get_weather", "arguments": {"city": "Malmö"}},
        },
        {"id": "call_2", "type": "function", "function": {"name": "get_time", "arguments": {}}},
    ],
}
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "How is it?"},
    ASKED,
    {"role": "tool", "tool_call_id": "call_1", "content": "cold"},
    {"role": "tool", "tool_call_id": "call_2", "content": "noon"},
]
WORDS = (
    "You can call functions. These are all there are, one per line, each with the JSON schema of its parameters:\n"
    '{"name": "get_weather", "description": "The weather now.", '
    '"parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}\n'
    'To call a function, answer with this and nothing else, on one line: {"name": "…", "arguments": {…}}\n'
    "Further calls go on lines of their own. You get the results in the next message."
)


def test_a_template_without_tools_gets_words() -> None:
    rendered = ChatTemplate(PLAIN, {}).render(CHAT, tools=[WEATHER])
    assert rendered == (
        f"[system]Be short.\n\n{WORDS}\n"
        "[user]How is it?\n"
        '[assistant]{"name": "get_weather", "arguments": {"city": "Malmö"}}\n{"name": "get_time", "arguments": {}}\n'
        "[user]Result of get_weather: cold\nResult of get_time: noon\n"
    )


def test_words_stand_in_a_system_message_of_their_own() -> None:
    assert in_words([{"role": "user", "content": "Hi"}], [WEATHER]) == [
        {"role": "system", "content": WORDS},
        {"role": "user", "content": "Hi"},
    ]


def test_chats_without_tools_stay_as_they_are() -> None:
    chat = [{"role": "user", "content": "Hi", "name": "Ada"}, {"role": "assistant", "content": "Hi!"}]
    assert in_words(chat, []) == chat
    assert in_words([{"role": "tool", "content": "1"}], []) == [
        {"role": "user", "content": "Result of the function: 1"}
    ]


def test_calls_in_words_are_what_the_parser_reads() -> None:
    written = in_words([ASKED], [])[0]["content"]
    parser = OutputFormat("json").parser({"get_weather", "get_time"})
    assert parser is not None
    assert read(parser, [written]) == [
        ToolCallBegin(0, "get_weather"),
        ToolCallArguments(0, '{"city": "Malmö"}'),
        ToolCallBegin(1, "get_time"),
        ToolCallArguments(1, "{}"),
    ]


def test_a_template_with_tools_gets_them_as_transformers_gives_them() -> None:
    rendered = ChatTemplate(KNOWING, {}).render(CHAT, tools=[WEATHER])
    assert rendered == (
        json.dumps(WEATHER) + "\n[system]Be short.\n[user]How is it?\n"
        '[assistant]call_1:get_weather={"city": "Malmö"}call_2:get_time={}\n'
        "[tool]coldcall_1\n[tool]nooncall_2\n"
    )


def test_a_template_that_appends_arguments_gets_text() -> None:
    assert ChatTemplate(APPENDING, {}).render(CHAT) == 'function:{"city": "Malmö"}function:{}'


def test_other_type_errors_are_still_the_templates() -> None:
    with pytest.raises(InvalidRequestError, match=r"the chat template refuses messages\[0\]: can only concatenate"):
        ChatTemplate("{% if tools %}{% endif %}{{ messages[0].content + 1 }}", {}).render(CHAT)


def test_ids_are_short_where_the_template_wants_them_so() -> None:
    template = ChatTemplate("{# strings with length 9 #}" + KNOWING, {})
    rendered = template.render([ASKED, {"role": "tool", "tool_call_id": "call_1", "content": "cold"}])
    first, second = rendered.splitlines()
    short = second.removeprefix("[tool]cold")
    assert len(short) == 9 and short.isalnum()
    assert first.startswith(f"[assistant]{short}:get_weather=")
    kept = template.render([{"role": "tool", "tool_call_id": "a1B2c3D4e", "content": ""}])
    assert kept == "[tool]a1B2c3D4e\n"
