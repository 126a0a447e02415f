"""Outputs as rows of items, and which tokens are the text of which item."""

from __future__ import annotations

from functools import partial

import pytest

from engine_core.types.errors import InternalError
from engine_core.types.sampling import TokenLogprobs
from services.router.chat.items import Closed, ItemKind, Items, Opened, Step
from services.router.chat.output import ChatOutput
from services.router.chat.text_positions import TextPositions
from services.router.journey import Delta, SampleResult
from services.router.parsers.base import Content, OutputParser, Part, Reasoning, ToolCallArguments, ToolCallBegin
from services.router.parsers.choice import OutputFormat
from services.router.text.tokenizer import RouterTokenizer
from tests.support.models import tiny_model

PARTS: list[Part] = [
    Reasoning("h"), Reasoning("m"), Content("a"), Content(""), Content("b"), ToolCallBegin(0, "f", "c0"),
    ToolCallArguments(0, "{"), ToolCallArguments(0, "}"), ToolCallBegin(1, "g", "c1"), ToolCallArguments(1, "{}"),
    Content("z"),
]  # fmt: skip


def told(steps: list[Step]) -> list[str]:
    return [
        f"+{step.item.index}" if isinstance(step, Opened) else
        f"-{step.item.index}" if isinstance(step, Closed) else f"{step.item.index}:{step.piece}"
        for step in steps
    ]  # fmt: skip


@pytest.mark.parametrize("cut", range(len(PARTS) + 1))
def test_one_item_ends_where_the_next_begins(cut: int) -> None:
    items = Items()
    steps = items.take(PARTS[:cut]) + items.take(PARTS[cut:]) + items.end(cut=False)
    text = "".join(told(steps))
    assert text.replace("0:h0:m", "0:hm").replace("1:a1:b", "1:ab").replace("2:{2:}", "2:{}") == (
        "+00:hm-0+11:ab-1+22:{}-2+33:{}-3+44:z-4"
    )
    assert [(item.kind.value, item.run, item.text, item.name, item.call_id) for item in items.all] == [
        ("thought", 0, "hm", "", ""), ("text", 0, "ab", "", ""), ("call", 0, "{}", "f", "c0"),
        ("call", 1, "{}", "g", "c1"), ("text", 1, "z", "", ""),
    ]  # fmt: skip
    assert all(item.closed and not item.cut for item in items.all)


def test_pieces_that_come_together_are_one_step() -> None:
    assert told(Items().take(PARTS[:5])) == ["+0", "0:hm", "-0", "+1", "1:ab"]


def test_the_limit_cuts_the_last_item_alone() -> None:
    items = Items()
    items.take(PARTS[:7])
    assert told(items.end(cut=True)) == ["-2"]
    assert [item.cut for item in items.all] == [False, False, True]


def test_an_output_that_shows_nothing_is_an_empty_text() -> None:
    items = Items()
    assert told(items.end(cut=False)) == ["+0", "-0"]
    assert (items.all[0].kind, items.all[0].text) == (ItemKind.TEXT, "")


def test_arguments_of_a_call_that_is_not_open_are_a_fault() -> None:
    items = Items()
    items.take(PARTS[:9])
    with pytest.raises(InternalError, match="arguments of call 0"):
        items.take([ToolCallArguments(0, "!")])
    with pytest.raises(InternalError):
        Items().take([ToolCallArguments(0, "{}")])


# ---- which tokens are text ------------------------------------------------------------------------------------

TEXT = '<think>why 🦜</think>one 🦜<tool_call>{"name": "f", "arguments": {}}</tool_call>two'
EOS = 2


def runs_of(
    tokenizer: RouterTokenizer, parser: partial[OutputParser | None] | None, pieces: list[list[int]]
) -> list[list[int]]:
    """The tokens of each text of an output that comes in these pieces."""

    def made() -> OutputParser:
        assert parser is not None
        found = parser()
        assert found is not None
        return found

    output = ChatOutput(None if parser is None else made, tokenizer.detokenizer)
    found, state = TextPositions(tokenizer.detokenizer()), tokenizer.detokenizer()
    runs: list[list[int]] = [[], [], []]
    for i, some in enumerate(pieces):
        last = i == len(pieces) - 1
        text = state.add(some) + (state.flush() if last else "")
        result = SampleResult(1, 1, sum(pieces, []), "stop", None, 0, {}) if last else None
        parts = output.take(Delta(text, some, result))
        found.add([TokenLogprobs(token_id, -0.5, 1, ()) for token_id in some])
        found.take(parts, output.sources)
        if last:
            found.finish()
        for run, tokens in enumerate(runs):
            tokens += (position.token_id for position in found.new(run))
    return runs


def test_tokens_of_thoughts_and_calls_are_no_text() -> None:
    tokenizer = RouterTokenizer.load(tiny_model())
    parser = partial(OutputFormat("hermes", "deepseek_r1").parser, {"f"})
    ids = [*tokenizer.encode(TEXT, add_special_tokens=False), EOS]
    for cut in range(len(ids) + 1):
        runs = runs_of(tokenizer, parser, [ids[:cut], ids[cut:]])
        assert tokenizer.decode(runs[0]) == "one 🦜"
        assert tokenizer.decode(runs[1]) == "two" and runs[1][-1] == EOS and runs[2] == []


def test_without_a_parser_all_tokens_are_text_in_their_order() -> None:
    tokenizer = RouterTokenizer.load(tiny_model())
    ids = [*tokenizer.encode(TEXT, add_special_tokens=False), EOS]
    assert runs_of(tokenizer, None, [ids[:3], ids[3:]]) == [ids, [], []]
    assert runs_of(tokenizer, None, [[EOS]]) == [[EOS], [], []]
