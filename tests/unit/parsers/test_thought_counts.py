"""Where parts stand in their output, and how many tokens are thoughts, however tokens and deltas are cut."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.chat.output import ChatOutput
from services.router.journey import Delta, SampleResult
from services.router.parsers.base import Content, OutputParser, Reasoning
from services.router.parsers.choice import OutputFormat
from services.router.text.detokenizer import ByteDetokenizer
from services.router.text.output_text import OutputText
from tests.support.outputs import BROKEN, GPT_OSS, MAGISTRAL, NAMES, NO_CALLS, QWEN3, RECORDED

TEXTS = [
    *((o.written, o.inside, o.text) for o in RECORDED),
    *((written, None, text) for written, text in NO_CALLS),
    *((written, None, text) for written, text, _, _ in BROKEN),
]
THOUGHTS = [
    *((o.written, o.inside, o.text) for o in RECORDED if o.written.thinks),
    (QWEN3, None, "<think>\n<b> 🦜é\r\n\n</think>\n\n\nso </think>"),
    (QWEN3, None, " \n<think>a < b</thinK></think><tool_call>"),
    (QWEN3, True, "<think>\n</th\n</think>"),
    (MAGISTRAL, None, "[THINK]日本[/THIN[/THINK]\n語"),
    (GPT_OSS, None, "<|channel|>analysis<|message|>é<|end|><|start|>assistant<|channel|>analysis<|message|>🦜<|"),
    (GPT_OSS, None, "<|channel|>final<|message|>no<|end|>\n<|channel|>analysis<|message|>\n<|start|>"),
]
_ENDS = r"<\|(?:end|call|return|start|channel)\|>"
_ANALYSIS = re.compile(rf"<\|channel\|>analysis<\|message\|>(.*?)(?={_ENDS}|\Z)", re.DOTALL)


def parser_of(written: OutputFormat, inside: bool | None, *, most: int | None = None) -> OutputParser:
    found = written.parser(NAMES, inside=inside, most=most)
    assert found is not None
    return found


def thoughts_of(written: OutputFormat, inside: bool | None, text: str) -> list[tuple[int, int]]:
    """Where a whole output's reasoning stands, in characters, found the plain way."""
    if written.reasoning == "gpt_oss":
        return [found.span(1) for found in _ANALYSIS.finditer(text)]
    opening, closing = map(re.escape, written.marks)
    begins = re.match(rf"\s*{opening}[\r\n]*" if not inside else rf"(?:\s*{opening})?[\r\n]*", text)
    if inside is False or begins is None:
        return []
    ends = re.compile(rf"[\r\n]*{closing}").search(text, begins.end())
    return [(begins.end(), len(text) if ends is None else ends.start())]


def counted(tokens: Sequence[bytes], text: str, thoughts: Sequence[tuple[int, int]]) -> int:
    """Tokens of which at least one byte is part of a thought."""
    inside = [(len(text[:start].encode()), len(text[:end].encode())) for start, end in thoughts]
    count, at = 0, 0
    for token in tokens:
        count += any(at < end and at + len(token) > start for start, end in inside if end > start and token)
        at += len(token)
    return count


def told(output: ChatOutput, tokens: Sequence[bytes], ends: Sequence[int], stops: Sequence[str]) -> tuple[str, int]:
    """The text that comes of the tokens in messages that end there, and what is counted."""
    state = OutputText(ByteDetokenizer(tokens.__getitem__), stops)
    shown, before = "", 0
    for start, end in itertools.pairwise([0, *ends, len(tokens)]):
        taken = len(state.token_ids)
        text = state.add(range(start, end))
        shown += text
        output.take(Delta(text, state.token_ids[taken:]))
        assert before <= output.reasoning_tokens <= len(state.token_ids)
        before = output.reasoning_tokens
        if state.stopped:
            break
    text = state.finish()
    output.take(Delta(text, [], SampleResult(1, 1, state.token_ids, "stop", None, 0, {})))
    assert output.reasoning_tokens >= before
    return shown + text, output.reasoning_tokens


@settings(max_examples=150)
@given(data=st.data())
def test_the_count_is_of_the_tokens_not_of_how_they_came(data: st.DataObject) -> None:
    """Tokens that are any bytes, messages of any size, outputs that end anywhere, stop strings that cut them."""
    written, inside, text = data.draw(st.sampled_from(THOUGHTS))
    raw = text[: data.draw(st.integers(0, len(text)))].encode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(raw)), max_size=40)))
    tokens = [raw[start:end] for start, end in itertools.pairwise([0, *cuts, len(raw)])]
    ends = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=10)))
    stops = data.draw(st.sampled_from([(), (), ("s",), ("</",), ("🦜",), (">\n",), ("k>", "end")]))
    output = ChatOutput(lambda: parser_of(written, inside), lambda: ByteDetokenizer(tokens.__getitem__))
    shown, count = told(output, tokens, ends, stops)
    assert count == counted(tokens, shown, thoughts_of(written, inside, shown))


@pytest.mark.parametrize(
    ("tokens", "count"),
    [
        ([b"<think>", b"a", b"<", b"b", b"</think>", b"c"], 3),
        ([b"<think>", b"<", b"b", b"</think>", b"c"], 2),  # held back at first
        ([b"<th", b"ink>\n", b"\n", b"why ", b"not</", b"think>", b"\n", b"so"], 2),
        ([b"<think>wh", b"y</th", b"ink>so"], 2),  # tokens that hold a mark's end and more
        ([b"<think>why</think>so"], 1),
        ([b"<think>", b"\n\n", b"</think>", b"\n\n", b"so"], 0),  # nothing is shown
        ([b"<think>", b"why", b"\n\n"], 2),  # cut: the line breaks are shown
        ([b"<think>", b"\xf0\x9f", b"\xa6", b"\x9c", b"\xe2", b"</think>"], 4),
        ([b"<think>", b"why", b"</thi"], 2),
        ([b"<think>", b"", b"why", b"", b"</think>", b""], 1),  # special tokens that show nothing
    ],
)
def test_counts_at_the_marks(tokens: list[bytes], count: int) -> None:
    for ends in itertools.chain.from_iterable(
        itertools.combinations(range(1, len(tokens)), n) for n in range(len(tokens))
    ):
        output = ChatOutput(lambda: parser_of(QWEN3, None), lambda: ByteDetokenizer(tokens.__getitem__))
        assert told(output, tokens, ends, ())[1] == count, ends


def places(parser: OutputParser, text: str, cuts: Sequence[int], *, whole: str) -> dict[int, type]:
    """By the characters of an output what kind of part they became."""
    found: dict[int, type] = {}
    for start, end in itertools.pairwise([0, *cuts, len(text), -1]):
        parts = parser.finish() if end < 0 else parser.push(text[start:end])
        for part, source in zip(parts, parser.sources, strict=True):
            if isinstance(part, Content | Reasoning):
                assert "".join(whole[a:b] for a, b in source) == part.text
                found |= {at: type(part) for a, b in source for at in range(a, b)}
            else:
                assert not source
    return found


@pytest.mark.parametrize("most", [None, 1], ids=["all calls", "the first call"])
@given(data=st.data())
def test_parts_stand_where_they_were_read(most: int | None, data: st.DataObject) -> None:
    written, inside, first = data.draw(st.sampled_from([*TEXTS, *THOUGHTS]))
    others = [text for other, _, text in TEXTS if other == written]
    text = first + "".join(data.draw(st.lists(st.sampled_from([*others, " ", "\n", "a"]), max_size=2)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    once = places(parser_of(written, inside, most=most), text, (), whole=text)
    assert places(parser_of(written, inside, most=most), text, cuts, whole=text) == once
