"""Chats in the form that a family's template wants, by templates of our own that show the same."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from engine_core.types.errors import InvalidRequestError
from services.router.parsers.base import ToolCallArguments, ToolCallBegin
from services.router.parsers.choice import choose_format
from services.router.text.chat_habits import Habits
from services.router.text.chat_template import ChatTemplate
from services.router.text.plain_tools import (
    DEEPSEEK,
    DEEPSEEK_FENCED,
    GRANITE,
    JSON_LINES,
    LFM2,
    CallForm,
    form_of,
    in_words,
)
from tests.support.outputs import read
from tests.unit.parsers.test_output_format import Vocabulary

FIRST_ALONE = (
    "{% if tools %}tools {% endif %}{% for m in messages %}[{{ m.role }}]{{ m.thinking }}{{ m.content }}"
    "{% if m.tool_calls %}{% set c = m.tool_calls[0].function %}{{ c.name }}{{ c.arguments | tojson }}{% endif %}"
    "{{ '\\n' }}{% endfor %}"
)
IDS = (
    "{% if tools %}{% endif %}{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.id }};{% endfor %}"
    "{% if m.tool_call_id %}{{ m.tool_call_id }};{% endif %}{% endfor %}"
)
ONLY_TOOLS = "{% if tools %}<|tool_list_start|>{{ tools | tojson }}\n{% endif %}" + (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}\n{% endfor %}"
)
USER = {"role": "user", "content": "How is it?"}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}


def called(call_id: str | None, name: str = "get_weather", **arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def asked(*calls: dict[str, Any], content: str = "", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls), **more}


def result(call_id: str | None, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def rendered(source: str, messages: Sequence[dict[str, Any]], **options: Any) -> str:
    return ChatTemplate(source, {}).render(messages, **options)


# ---- one call per message -----------------------------------------------------------------------------


def test_a_template_that_writes_one_call_gets_each_before_its_result() -> None:
    chat = [
        USER,
        asked(called("a", city="Oslo"), called("b", "get_time"), content="Both.", reasoning_content="Hm. "),
        result("b", "noon"),
        result("a", "cold"),
        USER,
    ]
    assert rendered(FIRST_ALONE, chat).splitlines() == [
        "[user]How is it?",
        '[assistant]Hm. Both.get_weather{"city": "Oslo"}',
        "[tool]cold",
        "[assistant]get_time{}",
        "[tool]noon",
        "[user]How is it?",
    ]


def test_results_that_name_no_call_stay_behind_the_last() -> None:
    chat = [asked(called("a"), called("b"), called("c")), result("b", "2"), result(None, "?"), result("a", "1")]
    roles = [line[:6] for line in rendered(FIRST_ALONE, chat).splitlines()]
    assert roles == ["[assis", "[tool]", "[assis", "[tool]", "[assis", "[tool]"]
    assert rendered(FIRST_ALONE, chat).splitlines()[-1] == "[tool]?"


@pytest.mark.parametrize(
    ("source", "alone"),
    [
        ("{{ message.tool_calls[0].function }}", True),
        ("{% if m.tool_calls[0] %}{% for c in m.tool_calls %}{% endfor %}{% endif %}", False),
        ("{% for c in message['tool_calls'] %}{{ message.tool_calls[0] }}{% endfor %}", False),
        ("{% for c in m.tool_calls %}{% endfor %}", False),
    ],
)
def test_which_templates_write_the_first_call_alone(source: str, alone: bool) -> None:
    assert Habits.of(source).one_call is alone


# ---- ids ----------------------------------------------------------------------------------------------


def test_kimis_ids_hold_the_name_and_count_the_calls() -> None:
    source = IDS + "{# <|tool_call_argument_begin|> #}"
    chat = [
        asked(called("call_1"), called("functions.get_time:1", "get_time")),
        result("call_1", ""),
        result("functions.get_time:1", ""),
        asked(called("call_1", "get_time")),
        result("call_1", ""),
        result("lost", ""),
    ]
    assert rendered(source, chat).split(";")[:-1] == [
        "functions.get_weather:0",
        "functions.get_time:1",
        "functions.get_weather:0",
        "functions.get_time:1",
        "functions.get_time:2",
        "functions.get_time:2",
        "lost",
    ]


def test_mistrals_ids_are_short_in_both_of_its_templates_words() -> None:
    for words in ("strings with length 9!", "strings with length >= 9!"):
        first, second, third, last = rendered(
            IDS + f"{{# {words} #}}",
            [asked(called("call_1"), called(None), called(None)), result("call_1", "")],
        ).split(";")[:-1]
        assert first == last and len({first, second, third}) == 3
        assert all(len(i) == 9 and i.isalnum() for i in (first, second, third))
    assert rendered(IDS + "{# strings with length 90 #}", [result("call_1", "")]) == "call_1;"


# ---- what a template lacks ----------------------------------------------------------------------------


def test_calls_that_a_template_would_leave_out_are_written_in_its_models_form() -> None:
    chat = [USER, asked(called("a", city='"Å"', days=[1, None]), called("b", "get_time"), content="So:")]
    assert rendered(ONLY_TOOLS, chat, tools=[TOOL]) == (
        json.dumps([TOOL]).join(["<|tool_list_start|>", "\n"])
        + '[user]How is it?\n[assistant]So:\n<|tool_call_start|>[get_weather(city="\\"Å\\"", days=[1, null]), '
        "get_time()]<|tool_call_end|>\n"
    )
    call = '{"name": "get_weather", "arguments": {"city": "Oslo"}}'
    for cut in ('{"city": "Os', "[1]", ""):  # a limit may have, and the client sends back what it got
        again = asked({"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": cut}})
        assert rendered(ONLY_TOOLS, [again]) == f"[assistant]<|tool_call_start|>[get_weather({cut})]<|tool_call_end|>\n"
    for mark, written in (("", call), ("<|tool_call|>", f"<|tool_call|>[{call}]")):
        source = ONLY_TOOLS.replace("<|tool_list_start|>", mark)
        assert rendered(source, [asked(called("a", city="Oslo"))]) == f"[assistant]{written}\n"


def test_tools_in_words_go_to_the_user_where_there_may_be_no_system_message() -> None:
    text = rendered(NO_SYSTEM, [USER, asked(called("a"))], tools=[TOOL])
    assert text.startswith("[user]You can call functions.")
    assert text.endswith('in the next message.\n\nHow is it?\n[assistant]{"name": "get_weather", "arguments": {}}\n')
    with pytest.raises(InvalidRequestError, match=r"no system here"):
        rendered(NO_SYSTEM, [{"role": "system", "content": "Be short."}, USER], tools=[TOOL])


def test_what_a_tool_may_leave_out_is_there_for_templates_that_need_it() -> None:
    needs = "{% for t in tools %}{{ t.function.name + ': ' + t.function.description }} {{ t.function.parameters.type }}"
    bare = [{"type": "function", "function": {"name": "ping", "description": None}}]
    assert rendered(needs + "{% endfor %}", [USER], tools=bare) == "ping:  object"
    shown = "{{ tools | tojson }}"
    assert rendered(shown, [USER], tools=bare) == json.dumps(bare)
    with pytest.raises(InvalidRequestError, match="has no attribute 'returns'"):
        rendered("{{ tools[0].function.returns + 'x' }}", [USER], tools=bare)


# ---- a model's own form in words ----------------------------------------------------------------------

V3 = "{{ '<｜tool▁calls▁begin｜>' }}{{ '\\n```json\\n' }}"
V31 = "{{ '<｜tool▁calls▁begin｜>' }}"


@pytest.mark.parametrize(
    ("source", "form", "family"),
    [
        ("{{ messages }}", JSON_LINES, "json"),
        ("{{ messages }}<tool_call>", JSON_LINES, "json"),
        (V3, DEEPSEEK_FENCED, "deepseek_v3"),
        (V31, DEEPSEEK, "deepseek_v3"),
    ],
)
def test_the_parser_reads_what_a_template_without_tools_asks_for(source: str, form: CallForm, family: str) -> None:
    marks = ("<｜tool▁calls▁begin｜>", "[TOOL_CALLS]") if family == "json" else ()
    found = choose_format("auto", "none", source, Vocabulary(dict(zip(marks, (5, 6), strict=False))))
    assert (found.tools, found.variant, form_of(source)) == (family, form is DEEPSEEK, form)
    written = in_words([asked(called("a", city="Malmö"), called("b", "get_time"))], [], form)[0]["content"]
    parser = found.parser({"get_weather", "get_time"})
    assert parser is not None
    assert read(parser, [written]) == [
        ToolCallBegin(0, "get_weather"),
        ToolCallArguments(0, '{"city": "Malmö"}'),
        ToolCallBegin(1, "get_time"),
        ToolCallArguments(1, "{}"),
    ]
    told = in_words([USER], [TOOL], form)[0]["content"]
    assert '"name": "get_weather"' in told and "{…}" in told and "{{" not in told


def test_forms_of_templates_that_tell_how_to_call() -> None:
    assert form_of(ONLY_TOOLS) is LFM2
    assert form_of("{{ tools }}<|tool_call|>") is GRANITE
    assert form_of("<|tool_call|>") is JSON_LINES
