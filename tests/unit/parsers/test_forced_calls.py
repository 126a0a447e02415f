"""Grammars of calls: what they allow is what the parsers read, in each family's own form."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

import msgspec
import pytest

from engine_core.grammar.compiler import ITEM_SEPARATOR, KEY_SEPARATOR
from engine_core.types.sampling import Grammar, GrammarKind
from services.router.parsers.base import Content, Part, Reasoning, ToolCallBegin
from services.router.parsers.choice import OutputFormat, choose_format
from services.router.parsers.forcing import MAX_CALLS, Function, after_thoughts, forced_calls, free_calls
from tests.support.byte_vocabulary import allows, byte_tokenizer, error_of
from tests.support.outputs import CALL, CALL_END, CALLS, CALLS_END, SEP, call, read

CITY = Function(
    "f",
    {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1}},
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"city": {"enum": ["Oslo", 'a"b']}},
    },
    strict=True,
)
NOTHING, STRICT = Function("g"), Function("g", strict=True)
NAMES = frozenset({"f", "g"})
GOOD, BAD = '{"city": "a\\"b", "days": 2}', '{"city": "Rome"}'
DEEPSEEK = (CALLS, CALLS_END, CALL, CALL_END, SEP)
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
TO_F = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
ANALYSIS = "<|channel|>analysis<|message|>Hm {\n<|end|><|start|>assistant"


class Form(msgspec.Struct, frozen=True):
    """A family's form: `one` call of f with what `%s` stands for, and a call of g behind it in `two`."""

    name: str
    tools: str
    special: Sequence[str]
    template: str
    one: str
    two: str
    text: str = "Let me {see}. "
    """What may stand before calls that are not forced."""


FORMS = [
    Form(
        "hermes",
        "hermes",
        (),
        "",
        '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
    ),
    Form(
        "llama 3",
        "llama3_json",
        ("<|python_tag|>",),
        "",
        '{"name": "f", "parameters": %s}',
        '{"name": "f", "parameters": %s}; {"name": "g", "parameters": {}}',
        "",
    ),
    Form(
        "json",
        "json",
        (),
        "",
        '{"name": "f", "arguments": %s}',
        '{"name": "f", "arguments": %s}\n{"name": "g", "arguments": {}}',
        "",
    ),
    Form(
        "mistral, a list",
        "mistral",
        ("[TOOL_CALLS]",),
        "",
        '[TOOL_CALLS] [{"name": "f", "arguments": %s}]',
        '[TOOL_CALLS] [{"name": "f", "arguments": %s}, {"name": "g", "arguments": {}}]',
    ),
    Form(
        "mistral",
        "mistral",
        ("[TOOL_CALLS]", "[ARGS]"),
        "",
        "[TOOL_CALLS]f[ARGS]%s",
        "[TOOL_CALLS]f[ARGS]%s[TOOL_CALLS]g[ARGS]{}",
    ),
    Form(
        "deepseek v3",
        "deepseek_v3",
        DEEPSEEK,
        "```json",
        f"{CALLS}{CALL}function{SEP}f\n```json\n%s\n```{CALL_END}{CALLS_END}",
        f"{CALLS}{CALL}function{SEP}f\n```json\n%s\n```{CALL_END}\n"
        f"{CALL}function{SEP}g\n```json\n{{}}\n```{CALL_END}{CALLS_END}",
    ),
    Form(
        "deepseek v3.1, marks that are plain text",
        "deepseek_v3",
        (),
        CALLS,
        f"{CALLS}{CALL}f{SEP}%s{CALL_END}{CALLS_END}",
        f"{CALLS}{CALL}f{SEP}%s{CALL_END}{CALL}g{SEP}{{}}{CALL_END}{CALLS_END}",
    ),
    Form(
        "gpt-oss",
        "gpt_oss",
        HARMONY,
        "",
        TO_F + "%s",
        "",
        "<|channel|>commentary<|message|>I {see}<|end|><|start|>assistant",
    ),
    Form("gpt-oss, marks that are plain text", "gpt_oss", (), "", TO_F + "%s", "", ANALYSIS),
]
by_form = pytest.mark.parametrize("form", FORMS, ids=lambda f: f.name)


@by_form
def test_forced_calls_are_calls(form: Form) -> None:
    written = _format(form)
    text = form.one % GOOD
    assert _read(written, text) == call(0, "f", GOOD)
    for most in (1, 16):
        grammar = forced_calls(written, [CITY, NOTHING], most=most)
        assert allows(form.special, grammar, text)
        for other in (
            "",
            "Hello",
            form.one % BAD,
            form.one % "{}",
            form.one % '{"city": "Oslo", "more": 1}',
            text + "x",
        ):
            assert not allows(form.special, grammar, other), other
        if form.text:
            before = form.text if form.text == ANALYSIS else ""
            assert allows(form.special, grammar, before + text)


@by_form
def test_further_calls_only_where_they_are_wanted(form: Form) -> None:
    written = _format(form)
    if not form.two:
        return
    text = form.two % GOOD
    assert _read(written, text) == [*call(0, "f", GOOD), *call(1, "g", "{}")]
    assert allows(form.special, forced_calls(written, [CITY, NOTHING]), text)
    assert not allows(form.special, forced_calls(written, [CITY, NOTHING], most=1), text)
    assert not allows(form.special, forced_calls(written, [CITY]), text)


def repeated(form: Form, calls: int) -> str:
    """So many calls: what `two` has beyond `one`, again and again."""
    one, two = form.one % GOOD, form.two % GOOD
    head = os.path.commonprefix([one, two])
    more = two[len(head) : len(head) + len(two) - len(one)]
    return head + more * (calls - 1) + one[len(head) :]


@by_form
def test_no_grammar_allows_more_calls_than_the_bound(form: Form) -> None:
    if not form.two:
        return
    written = _format(form)
    assert MAX_CALLS == 16 and repeated(form, 2) == form.two % GOOD
    assert [part for part in _read(written, repeated(form, 16)) if isinstance(part, ToolCallBegin)][15].index == 15
    tools = [CITY, NOTHING]
    for most, bound in ((16, 16), (5, 5), (2**31, 16)):
        for grammar in (forced_calls(written, tools, most=most), free_calls(written, [CITY, STRICT], most=most)):
            assert allows(form.special, grammar, repeated(form, bound))
            too_many = repeated(form, bound + 1)
            assert not allows(form.special, grammar, too_many)
    assert allows(form.special, forced_calls(written, tools), repeated(form, 16))


@pytest.mark.parametrize("most", [1, 2, 5])
@by_form
def test_a_parser_leaves_out_calls_beyond_the_wanted_ones(form: Form, most: int) -> None:
    parser = _format(form).parser(NAMES, most=most)
    assert parser is not None
    text = repeated(form, 4) if form.two else form.one % GOOD
    begun = [part.index for part in read(parser, list(text)) if isinstance(part, ToolCallBegin)]
    assert begun == [*range(min(most, 4 if form.two else 1))]


@by_form
def test_strict_functions_keep_their_schema_where_calls_are_free(form: Form) -> None:
    written = _format(form)
    grammar = free_calls(written, [CITY, NOTHING])
    assert allows(form.special, grammar, form.text + form.one % GOOD)
    assert not allows(form.special, grammar, form.text + form.one % BAD)
    answer = "<|channel|>final<|message|>He{llo" if written.tools == "gpt_oss" else "He{llo"
    assert allows(form.special, grammar, answer)
    loose = free_calls(written, [msgspec.structs.replace(CITY, strict=False), NOTHING])
    assert allows(form.special, loose, form.text + form.one % BAD)


@by_form
def test_text_holds_no_call_that_is_spelt_with_ordinary_tokens(form: Form) -> None:
    """What parsers read as calls follows the schemas, whatever tokens it is made of."""
    grammar = free_calls(_format(form), [CITY, NOTHING])
    for head in ("<|channel|>final<|message|>", "<|channel|>analysis<|message|>") if form.tools == "gpt_oss" else ("",):
        assert not allows(form.special, grammar, head, form.text + form.one % BAD)
    if form.tools == "llama3_json":
        assert not allows(form.special, grammar, "", f"<|python_tag|>{form.one % BAD}")
    elif form.tools == "gpt_oss":
        assert allows(form.special, grammar, "<|channel|>final<|message|>", "a < b, <|tool_call|>")
    elif form.text:
        assert allows(form.special, grammar, "", "a < b, <tool_")


@by_form
def test_an_answer_of_a_form_or_calls(form: Form) -> None:
    written = _format(form)
    schema = Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"type": "object", "required": ["x"]}))
    grammar = free_calls(written, [CITY], most=1, answer=schema)
    head = "<|channel|>final<|message|>" if written.tools == "gpt_oss" else ""
    assert allows(form.special, grammar, head + '{"x": 1}')
    assert not allows(form.special, grammar, head + "Hello")
    assert allows(form.special, grammar, form.one % GOOD)
    assert not allows(form.special, grammar, form.one % BAD)


QUOTES = [
    ("qwen3_coder", '{"x": "Write <tool_call><function=g></function></tool_call>."}'),
    ("glm45", '["<tool_call>g</tool_call>"]'),
    ("kimi_k2", '{"x": "<|tool_calls_section_begin|><|tool_call_begin|>functions.g:0<|tool_call_argument_begin|>{}"}'),
    ("deepseek_v3", f'{{"{CALLS}{CALL}g{SEP}{{": 1}}'),
]


@pytest.mark.parametrize("cut", [1, 3, 1000])
@pytest.mark.parametrize(("family", "text"), QUOTES)
@pytest.mark.parametrize("reasoning", ["none", "deepseek_r1"])
def test_an_answer_in_json_may_quote_calls(family: str, text: str, reasoning: str, cut: int) -> None:
    written = choose_format(family, reasoning, "", byte_tokenizer(()))
    for before in ("", "\n ", "<think>Hm</think>\n") if reasoning != "none" else ("", "\n "):
        parser = written.parser(NAMES, answers=True)
        assert parser is not None
        output = before + text
        *thought, answer = read(parser, [output[i : i + cut] for i in range(0, len(output), cut)])
        assert thought == ([Reasoning("Hm")] if "Hm" in before else [])
        assert isinstance(answer, Content) and answer.text.strip() == text


@by_form
def test_calls_are_read_where_an_answer_might_stand(form: Form) -> None:
    for text in (form.one % GOOD, "\n" + form.one % GOOD):
        if form.tools != "gpt_oss":
            parser = _format(form).parser(NAMES, answers=True)
            assert parser is not None and read(parser, [*text]) == call(0, "f", GOOD)
    for text in (form.one[:5], " \n"):  # what ends before it can be told is read as without
        parser, other = _format(form).parser(NAMES, answers=True), _format(form).parser(NAMES)
        assert parser is not None and other is not None
        assert read(parser, [*text]) == read(other, [*text])


THOUGHTS = [((), "deepseek_r1", "<think>", "</think>"), (("[THINK]", "[/THINK]"), "mistral", "[THINK]", "[/THINK]")]


@pytest.mark.parametrize(("special", "reasoning", "opening", "closing"), THOUGHTS)
def test_thoughts_stand_before_forced_calls(
    special: tuple[str, ...], reasoning: str, opening: str, closing: str
) -> None:
    written = choose_format("hermes", reasoning, "", byte_tokenizer(special))
    text = FORMS[0].one % GOOD
    thought = f"Hm, {{ </\n{closing}\n\n"
    free = forced_calls(written, [CITY], most=1)
    begun = forced_calls(written, [CITY], most=1, inside=True)
    ended = forced_calls(written, [CITY], most=1, inside=False)
    for grammar, expected in (
        (free, (True, False, True)),
        (begun, (False, True, not special)),
        (ended, (True, False, False)),
    ):
        for output, allowed in zip((text, thought + text, opening + thought + text), expected, strict=True):
            assert allows(special, grammar, output) == allowed, (output, grammar)
    assert _read(written, opening + thought + text) == [Reasoning("Hm, { </"), *call(0, "f", GOOD)]
    if special:  # spelt with ordinary tokens it would be read as the end all the same
        assert allows(special, begun, "", "Hm </", closing + text)
        assert not allows(special, begun, "", f"Hm {closing}", closing + text)


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (Grammar(GrammarKind.JSON_SCHEMA, '{"type": "integer"}'), "12", "x"),
        (Grammar(GrammarKind.REGEX, r"a/b+\/\\"), "a/bb/\\", "a/"),
        (Grammar(GrammarKind.REGEX, "a\nb"), "a\nb", "ab"),
        (Grammar(GrammarKind.LARK, 'start: WORD\nWORD: "yes" | "no"'), "no", "maybe"),
    ],
)
def test_thoughts_stand_before_answers_of_a_form(grammar: Grammar, good: str, bad: str) -> None:
    written = OutputFormat("hermes", "deepseek_r1")
    begun = after_thoughts(written, grammar, inside=True)
    assert allows((), begun, f"Hm</think>\n\n{good}")
    assert not allows((), begun, f"Hm</think>\n\n{bad}")
    assert not allows((), begun, good)
    assert after_thoughts(written, grammar, inside=False) == grammar
    assert after_thoughts(OutputFormat("hermes"), grammar) == grammar
    harmony = after_thoughts(OutputFormat("gpt_oss", "gpt_oss"), grammar)
    assert allows((), harmony, f"{ANALYSIS}<|channel|>final<|message|>{good}")
    assert not allows((), harmony, good)


def _format(form: Form) -> OutputFormat:
    reasoning = "gpt_oss" if form.tools == "gpt_oss" else "none"
    return choose_format(form.tools, reasoning, form.template, byte_tokenizer(tuple(form.special)))


def _read(written: OutputFormat, text: str) -> list[Part]:
    parser = written.parser(NAMES)
    assert parser is not None
    return [part for part in read(parser, [text]) if part != Content("")]


@by_form
def test_white_space_is_bounded(form: Form) -> None:
    grammar = forced_calls(_format(form), [CITY], most=1)
    assert allows(form.special, grammar, form.one % '{"city":"Oslo","days": 2}')
    assert not allows(form.special, grammar, form.one % '{"city":  "Oslo"}')
    assert not allows(form.special, grammar, form.one % '{\n"city": "Oslo"}')
    schema = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}')
    free = free_calls(_format(form), [CITY], most=1, answer=schema)
    assert not allows(form.special, free, '{ "x": 1}')


def test_the_options_are_those_of_other_schemas() -> None:
    grammar = after_thoughts(OutputFormat("json", "deepseek_r1"), Grammar(GrammarKind.JSON_SCHEMA, "{}"), inside=True)
    for separator in (ITEM_SEPARATOR, KEY_SEPARATOR):
        assert json.dumps(separator) in grammar.text


def test_keywords_that_are_not_known_are_left_out_unless_strict() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "colour": "red", "minProperties": 1}}}
    odd = Function("f", {**schema, "unevaluatedProperties": False})
    assert error_of(forced_calls(OutputFormat("json"), [odd], most=1)) == ""
    strict = msgspec.structs.replace(odd, strict=True)
    assert "unevaluatedProperties" in error_of(forced_calls(OutputFormat("json"), [strict], most=1))
