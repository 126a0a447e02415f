"""Lists of calls behind a mark, LFM2's marks, Mistral's ids: what is read, what templates show, what is forced."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from services.router.parsers import pythonic
from services.router.parsers.base import Content, OutputParser, Part
from services.router.parsers.choice import choose_format
from services.router.parsers.forcing import Function, forced_calls, free_calls
from tests.support.byte_vocabulary import allows, byte_tokenizer
from tests.support.outputs import call, read
from tests.unit.parsers.test_output_format import Vocabulary

HARD = json.dumps(
    {"note": "a \"b\"\n'c' </tool_calls> ] é", "n": [-1.5, None, True], "in": {"": {}}}, ensure_ascii=False
)
ONE = f'{{"name": "get_weather", "arguments": {HARD}}}'
TWO = '{"name": "get_time", "arguments": {}, "id": "0"}'
CALLS = [*call(0, "get_weather", HARD), *call(1, "get_time", "{}")]
FORMS = {
    "nemotron_json": ("<TOOLCALL>", "</TOOLCALL>"),
    "hunyuan_a13b": ("<tool_calls>", "</tool_calls>"),
    "granite": ("<|tool_call|>", ""),
    "xlam": ("", ""),
}
by_form = pytest.mark.parametrize("family", FORMS)


def parts_of(family: str, text: str, step: int = 1) -> list[Part]:
    parser = choose_format(family, "none", "", Vocabulary()).parser({"get_weather", "get_time"})
    assert parser is not None
    return read(parser, [text[i : i + step] for i in range(0, len(text), step)])


@by_form
@pytest.mark.parametrize("step", [1, 2, 7, 1000])
def test_lists_of_calls(family: str, step: int) -> None:
    opening, closing = FORMS[family]
    for text in (f"[{ONE}, {TWO}]", f"[\n{ONE},\n{TWO}\n]\n", f"\n{ONE}\n{TWO}\n", f" [{ONE},{TWO}"):
        assert parts_of(family, f"{opening}{text}{closing}", step) == CALLS
    assert parts_of(family, f"{opening}[{ONE}]{closing}", step) == CALLS[:2]


@pytest.mark.parametrize("family", ["nemotron_json", "hunyuan_a13b", "granite"])
def test_text_around_marked_lists(family: str) -> None:
    opening, closing = FORMS[family]
    assert parts_of(family, f"Let me see.\n{opening}[{ONE}]{closing}\n") == [Content("Let me see.\n"), *CALLS[:2]]
    for text in (f"{opening}none{closing}", f'{opening}[{{"name": "rm", "arguments": {{}}}}]{closing}', f"[{ONE}]"):
        assert parts_of(family, text) == [Content(text)]


def test_a_list_that_is_no_call_is_an_answer() -> None:
    for text in (
        "[1, 2]",
        '[{"name": "rm", "arguments": {}}]',
        '[{"name": "get_time", "age": 3}]',
        "[] ",
        f"A: [{ONE}]",
    ):
        assert parts_of("xlam", text) == [Content(text)]


def test_lfm2_writes_pythons_form_between_marks_of_its_own() -> None:
    text = "Ok.<|tool_call_start|>[get_weather(city='Os\"lo', days=[1], now=True), get_time()]<|tool_call_end|>"
    assert parts_of("pythonic", text) == [
        Content("Ok."),
        *call(0, "get_weather", '{"city": "Os\\"lo", "days": [1], "now": true}'),
        *call(1, "get_time", "{}"),
    ]
    assert parts_of("pythonic", "<|tool_call_start|>[]") == [Content("<|tool_call_start|>[]")]


@pytest.mark.parametrize(
    ("template", "special", "family", "variant"),
    [
        ("<tool_call></tool_call> <tool_calls>[", (), "hunyuan_a13b", False),
        ("<TOOLCALL>[ <think></think>", (), "nemotron_json", False),
        ("respond with <|tool_call|> and a list", ("<|tool_call|>",), "granite", False),
        ('[{"name": "tool_call_name", "arguments": {"arg1": "value1"}}]', (), "xlam", False),
        ("<|tool_list_start|>", pythonic.LFM2, "pythonic", True),
        ("{% set d = '｜DSML｜' %}{{ '<' + d + 'tool_calls>' }}", (), "deepseek_v32", True),
        ("{% set d = '｜DSML｜' %}{{ '<' + d + 'function_calls>' }}{{ m.tool_calls}}>", (), "deepseek_v32", False),
        ('<tool_call> <invoke name="f">', (), "json", False),
        ("<|python_tag|> <function=f>{}</function>", ("<|python_tag|>",), "json", False),
    ],
)
def test_which_templates_show_these(template: str, special: Sequence[str], family: str, variant: bool) -> None:
    vocabulary = Vocabulary({mark: i for i, mark in enumerate(special)})
    found = choose_format("auto", "none", template + "{{ tools }}", vocabulary)
    assert (found.tools, found.variant) == (family, variant)


F = Function("get_weather", {"type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"]}, True)
G = Function("get_time")
FIRST, BAD = (f'{{"name": "get_weather", "arguments": {{"city": "{city}"}}}}' for city in ("Oslo", "Rome"))
SECOND = '{"name": "get_time", "arguments": {}}'


@by_form
def test_forced_lists(family: str) -> None:
    opening, closing = FORMS[family]
    special = tuple(filter(None, FORMS[family])) if family == "granite" else ()
    written = choose_format(family, "none", "", byte_tokenizer(special))
    forced, free = forced_calls(written, [F, G]), free_calls(written, [F, G])
    for text in (f"[{FIRST}]", f"[{FIRST}, {SECOND}]"):
        assert allows(special, forced, opening + text + closing)
        assert allows(special, free, opening + text + closing)
    assert not allows(special, forced, f"{opening}[{BAD}]{closing}")
    assert not allows(special, free, f"{opening}[{BAD}]{closing}")
    assert not allows(special, forced, "Cold.")
    assert allows(special, free, "Cold.")
    assert not allows(special, forced, f"{opening}[]{closing}")


def test_forced_calls_of_lfm2() -> None:
    written = choose_format("pythonic", "none", "", byte_tokenizer(pythonic.LFM2))
    forced, free = forced_calls(written, [F, G]), free_calls(written, [F, G])
    good = '<|tool_call_start|>[get_weather(city="Oslo"), get_time()]<|tool_call_end|>'
    assert allows(pythonic.LFM2, forced, good)
    assert allows(pythonic.LFM2, free, "Let me see. " + good)
    assert allows(pythonic.LFM2, free, "") and allows(pythonic.LFM2, free, "A [list].")
    for text in (good.replace("Oslo", "Rome"), '[get_weather(city="Rome")]'):
        assert not allows(pythonic.LFM2, forced, text)
        assert not allows(pythonic.LFM2, free, text)


def test_mistrals_calls_may_have_ids_where_there_is_a_mark_for_them() -> None:
    marks = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    plain, with_id = "[TOOL_CALLS]get_time[ARGS]{}", "[TOOL_CALLS]get_time[CALL_ID]a1B2c3D4e[ARGS]{}"
    grammar = forced_calls(choose_format("mistral", "none", "", byte_tokenizer(marks)), [G])
    assert allows(marks, grammar, plain) and allows(marks, grammar, with_id)
    assert not allows(marks, grammar, with_id.replace("a1B2c3D4e", "a1"))
    without = forced_calls(choose_format("mistral", "none", "", byte_tokenizer(marks[:2])), [G])
    assert allows(marks[:2], without, plain)
    assert parts_of("mistral", with_id) == call(0, "get_time", "{}", "a1B2c3D4e")


def test_thoughts_and_calls_may_begin_on_a_line_of_their_own() -> None:
    written = choose_format("hermes", "deepseek_r1", "", byte_tokenizer(()))
    grammar = forced_calls(written, [G])

    def parser() -> OutputParser:
        found = written.parser({"get_time"})
        assert found is not None
        return found

    block = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
    for before in ("", "\n\n", "<think>Hm</think>\n", "\n<think>Hm</think>\n\n\n"):
        assert allows((), grammar, before + block)
        assert read(parser(), [before + block])[-2:] == call(0, "get_time", "{}")
        assert not any(isinstance(part, Content) for part in read(parser(), list(before + block)))
    assert not allows((), grammar, "\n\n\n<think>Hm</think>\n" + block)
