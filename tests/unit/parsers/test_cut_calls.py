"""Outputs that end in the middle of a call, at every character."""

from __future__ import annotations

import pytest

from services.router.parsers.base import Content, Part, Reasoning, ToolCallArguments, ToolCallBegin
from services.router.parsers.choice import OutputFormat
from tests.support.outputs import (
    CALL,
    CALLS,
    DEEPSEEK,
    DSML,
    GLM,
    GPT_OSS,
    HERMES,
    JSON,
    KIMI,
    LLAMA,
    MINIMAX,
    MISTRAL,
    NAMES,
    PYTHONIC,
    QWEN_CODER,
    RECORDED,
    SEP,
    Output,
    read,
)

HEAD = "<|channel|>commentary to=functions.get_time"
KIMI_HEAD = "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_time"
INVOKE = "<｜DSML｜invoke"
CASES = [
    (HERMES, '<tool_call>\n{"name": "get_time"', ', "arguments": ', "{}"),
    (HERMES, '<tool_call>{"id": "a1", "name": "get_time"', ',\n"more": nul', ""),
    (HERMES, '<tool_call>{"name": "get_time"', ', "arguments": nul', ""),
    (LLAMA, '<|python_tag|>{"type": "function", "name": "get_time"', ', "parameters": ', "{}"),
    (MISTRAL, '[TOOL_CALLS] [{"name": "get_time"', ', "arguments": ', "{}"),
    (MISTRAL, "[TOOL_CALLS]get_time[", "CALL_ID]a1B2c3D4e[ARGS]", "{}"),
    (MISTRAL, "[TOOL_CALLS]get_time[", "ARGS]", "{}"),
    (DEEPSEEK, f"{CALLS}{CALL}get_time<", SEP[1:], "{}"),
    (DEEPSEEK, f"{CALLS}{CALL}function{SEP}get_time\n", "```json\n", "{}"),
    (GPT_OSS, f"{HEAD} ", "<|constrain|>json<|message|>", "{}"),
    (GPT_OSS, f"{HEAD}<", "|message|>", "{}"),
    (KIMI, f"{KIMI_HEAD}:0", "<|tool_call_argument_begin|>", "{}"),
    (QWEN_CODER, "<tool_call>\n<function=get_time>", "\n<parameter", ""),
    (GLM, "<tool_call>get_time\n", "<arg_ke", ""),
    (MINIMAX, '<minimax:tool_call>\n<invoke name="get_time"', ">\n</invok", ""),
    (DSML, f'<｜DSML｜function_calls>\n{INVOKE} name="get_time"', ">\n<｜DSML｜par", ""),
]
"""The format; an output up to where its call is known; how it goes on, up to the arguments; these."""


@pytest.mark.parametrize(("written", "head", "tail", "arguments"), CASES)
def test_a_call_is_one_from_the_end_of_its_name_on(written: OutputFormat, head: str, tail: str, arguments: str) -> None:
    text = head + tail + arguments
    for at in range(1, len(text) + 1):
        parts = read_cut(written, text[:at])
        if at < len(head):
            assert parts == [Content(text[:at])], at
        else:
            shown = arguments[: max(at - len(head + tail), 0)]
            assert parts == [
                ToolCallBegin(0, "get_time", *ids(parts)),
                *([ToolCallArguments(0, shown)] if shown else []),
            ]


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (HERMES, '<tool_call>{"name": "get_time", "arguments": "{\\"zone'),
        (HERMES, '<tool_call>{"arguments": {"zone": 1}'),
        (HERMES, '<tool_call>{"name": "get_time", "arguments": [1'),
        (LLAMA, '{"name": "get_time", "parameters": '),
        (JSON, '{"name": "get_time", "argum'),
        (PYTHONIC, "[get_time("),
        (DEEPSEEK, f"{CALLS}{CALL}function{SEP}get_time"),
        (GPT_OSS, "<|channel|>analysis"),
    ],
)
def test_what_is_no_call_yet_is_text(written: OutputFormat, text: str) -> None:
    """Arguments that can't go out as they come, forms without marks, names that may go on."""
    assert read_cut(written, text) == [Content(text)]


@pytest.mark.parametrize("output", RECORDED, ids=lambda o: o.name)
def test_a_cut_takes_nothing_back(output: Output) -> None:
    """What a longer output shows, the same one that is cut later shows too, but for a tail that could become more."""
    certain: list[Part] = []
    parser = output.parser()
    for at in range(len(output.text) + 1):
        certain += parser.push(output.text[at - 1 : at]) if at else []
        cut = output.parser()
        told = [*cut.push(output.text[:at]), *cut.finish()]
        assert flat(told)[: len(flat(certain))] == flat(certain)
        calls = [part for part in told if isinstance(part, ToolCallBegin)]
        assert [part.index for part in calls] == list(range(len(calls)))
        assert all(part.name in NAMES for part in calls)


def flat(parts: list[Part]) -> list[object]:
    """Character by character."""
    out: list[object] = []
    for part in parts:
        if isinstance(part, ToolCallBegin):
            out.append((part.index, part.name))
        else:
            kind = part.index if isinstance(part, ToolCallArguments) else type(part)
            out += [(kind, char) for char in part.text]
    assert all(isinstance(part, Content | Reasoning | ToolCallBegin | ToolCallArguments) for part in parts)
    return out


def read_cut(written: OutputFormat, text: str) -> list[Part]:
    parser = written.parser(NAMES)
    assert parser is not None
    return read(parser, [text])


def ids(parts: list[Part]) -> list[str]:
    return [part.id for part in parts if isinstance(part, ToolCallBegin)]
