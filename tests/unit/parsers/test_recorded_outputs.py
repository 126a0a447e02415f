"""Outputs of each family, cut in every way, become the same parts."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.parsers.base import Content, OutputParser, Reasoning, ToolCallArguments, ToolCallBegin
from services.router.parsers.choice import OutputFormat
from tests.support.outputs import BROKEN, FORMATS, HERMES, NAMES, NO_CALLS, RECORDED, SCHEMAS, Output, read

ALL_TEXTS = [
    *((o.written, o.inside, o.text) for o in RECORDED),
    *((written, None, text) for written, text in NO_CALLS),
    *((written, None, text) for written, text, _, _ in BROKEN),
]


@pytest.mark.parametrize("output", RECORDED, ids=lambda o: o.name)
def test_an_output_becomes_its_parts(output: Output) -> None:
    assert read(output.parser(), [output.text]) == list(output.parts)


@pytest.mark.parametrize("output", RECORDED, ids=lambda o: o.name)
def test_arguments_are_json(output: Output) -> None:
    for part in read(output.parser(), [output.text]):
        if isinstance(part, ToolCallArguments):
            assert isinstance(json.loads(part.text), dict)


@pytest.mark.parametrize(("written", "text"), NO_CALLS)
def test_what_is_no_call_is_content(written: OutputFormat, text: str) -> None:
    assert read(_parser(written), [text]) == [Content(text)]


@pytest.mark.parametrize(("written", "text", "arguments", "content"), BROKEN)
def test_a_call_that_goes_wrong_keeps_what_the_model_wrote(
    written: OutputFormat, text: str, arguments: str, content: str
) -> None:
    expected = [ToolCallBegin(0, "get_time"), ToolCallArguments(0, arguments)]
    assert read(_parser(written), [text]) == expected + ([Content(content)] if content else [])


@pytest.mark.parametrize(("written", "inside", "text"), ALL_TEXTS)
def test_no_cut_changes_the_parts(written: OutputFormat, inside: bool | None, text: str) -> None:
    whole = read(_parser(written, inside), [text])
    assert read(_parser(written, inside), list(text)) == whole
    for at in range(1, len(text)):
        assert read(_parser(written, inside), [text[:at], text[at:]]) == whole, at


@given(data=st.data())
def test_no_cuts_change_the_parts(data: st.DataObject) -> None:
    """Outputs follow each other, with anything in between."""
    written, inside, _ = data.draw(st.sampled_from(ALL_TEXTS))
    texts = [text for other, _, text in ALL_TEXTS if other == written]
    pieces = st.one_of(st.sampled_from(texts), st.text(alphabet='<>|[]{}":,\\ \na1', max_size=12))
    text = "".join(data.draw(st.lists(pieces, max_size=4)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    whole = read(_parser(written, inside), [text])
    edges = [0, *cuts, len(text)]
    assert read(_parser(written, inside), [text[a:b] for a, b in zip(edges, edges[1:], strict=False)]) == whole


@settings(max_examples=20)
@given(text=st.text(alphabet=st.characters(), max_size=60))
@pytest.mark.parametrize("written", FORMATS, ids=lambda f: f"{f.tools}-{f.reasoning}")
def test_text_without_marks_is_content(written: OutputFormat, text: str) -> None:
    if text.lstrip()[:1] not in ("", "{", "<", "[") and not any(c in text for c in "<["):
        assert read(_parser(written), [text]) == [Content(text)]


@pytest.mark.parametrize(
    ("written", "pieces", "shown"),
    [
        (HERMES, ["Hello <", "b>"], ["Hello ", "<b>"]),
        (HERMES, ["a<tool_cal", "l"], ["a", ""]),
        (HERMES, ["a<tool_call", "x"], ["a", "<tool_callx"]),
        (HERMES, ["<tool_call> no"], ["<tool_call> no"]),
        (HERMES, ['<tool_call>{"name": "nobody"', ", more"], ['<tool_call>{"name": "nobody"', ", more"]),
    ],
)
def test_no_more_is_held_than_could_begin_a_call(written: OutputFormat, pieces: list[str], shown: list[str]) -> None:
    parser = _parser(written)
    for piece, expected in zip(pieces, shown, strict=True):
        assert "".join(p.text for p in parser.push(piece) if isinstance(p, Content)) == expected


def test_arguments_come_as_they_are_written() -> None:
    parser = _parser(HERMES)
    assert parser.push('<tool_call>{"name": "get_time", "arguments": ') == []
    assert parser.push('{"a') == [ToolCallBegin(0, "get_time"), ToolCallArguments(0, '{"a')]
    assert parser.push('": [1, ') == [ToolCallArguments(0, '": [1, ')]
    assert parser.push("2]}}") == [ToolCallArguments(0, "2]}")]
    assert parser.push("</tool_call>") == []
    assert parser.finish() == []


def test_thoughts_come_as_they_are_written() -> None:
    parser = OutputFormat("json", "deepseek_r1").parser(None, inside=True)
    assert parser is not None
    assert parser.push("\nHm") == [Reasoning("Hm")]
    assert parser.push("\n") == []
    assert parser.push("so </thi") == [Reasoning("\nso ")]
    assert parser.push("nk>\n\nYes") == [Content("Yes")]


def test_without_tools_calls_are_content() -> None:
    for written in FORMATS:
        if not written.thinks:
            assert written.parser(None) is None
    text = '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>'
    parser = OutputFormat("hermes", "deepseek_r1").parser(None)
    assert parser is not None
    assert read(parser, [text]) == [Content(text)]


@pytest.mark.parametrize("output", [o for o in RECORDED if len({getattr(p, "index", 0) for p in o.parts}) > 1])
def test_one_call_at_most_where_no_more_are_wanted(output: Output) -> None:
    parser = output.written.parser(NAMES, schemas=SCHEMAS, inside=output.inside, most=1)
    assert parser is not None
    assert read(parser, list(output.text)) == [p for p in output.parts if getattr(p, "index", 0) == 0]


def test_deep_values_end_before_they_are_too_deep() -> None:
    deep = '{"a":' * 5000
    parts = read(_parser(HERMES), [f'<tool_call>{{"name": "get_time", "arguments": {deep}', "1}</tool_call>!"])
    assert parts == [ToolCallBegin(0, "get_time"), ToolCallArguments(0, deep + "1}"), Content("!")]


def _parser(written: OutputFormat, inside: bool | None = None) -> OutputParser:
    parser = written.parser(NAMES, schemas=SCHEMAS, inside=inside)
    assert parser is not None
    return parser
