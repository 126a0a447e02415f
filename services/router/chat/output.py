"""One choice of a chat: from the deltas of its sample to parts (content, reasoning, tool calls), and what they count.

Each way of replying (chunks of chat completions, whole messages, other APIs' events) makes its own form of them.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

import msgspec

from services.router.journey import Delta, SampleResult
from services.router.parsers.base import (
    Content,
    OutputParser,
    Part,
    Reasoning,
    ToolCallArguments,
    ToolCallBegin,
)
from services.router.text.detokenizer import Detokenizer

ParserOf = Callable[[], OutputParser]
"""Makes the parser of one output."""


class ChatOutput:
    """State of one choice. Without a parser all text is content."""

    def __init__(self, parser_of: ParserOf | None, detokenizer_of: Callable[[], Detokenizer]) -> None:
        self._parser_of, self._detokenizer_of = parser_of, detokenizer_of
        self._parser = None if parser_of is None else parser_of()
        self._counter: _ReasoningCount | None = None
        self._tokens: list[int] = []
        self.called = False
        """True once the model has called a tool."""

    @property
    def reasoning_tokens(self) -> int:
        """Tokens so far whose text is, at least in part, reasoning; marks around it don't count."""
        return 0 if self._counter is None else self._counter.count

    def take(self, delta: Delta) -> list[Part]:
        """The parts that are certain with this delta. Begins of calls have ids."""
        if self._parser is None:
            return [Content(delta.text)] if delta.text else []
        parts = self._parser.push(delta.text) if delta.text else []
        if delta.result is not None:
            parts = [*parts, *self._parser.finish()]
        for i, part in enumerate(parts):
            if isinstance(part, ToolCallBegin):
                self.called = True
                if not part.id:
                    parts[i] = msgspec.structs.replace(part, id=new_call_id())
        self._count(parts, delta)
        return parts

    def finish_reason(self, result: SampleResult) -> str:
        """tool_calls when the model has called tools and ended by itself."""
        return "tool_calls" if self.called and result.finish_reason == "stop" else result.finish_reason

    def _count(self, parts: Sequence[Part], delta: Delta) -> None:
        if self._counter is None:
            self._tokens += delta.token_ids
            if not any(isinstance(part, Reasoning) for part in parts):
                return
            assert self._parser_of is not None
            self._counter = _ReasoningCount(self._parser_of(), self._detokenizer_of())
            self._counter.add(self._tokens)
            self._tokens = []
        else:
            self._counter.add(delta.token_ids)
        if delta.result is not None:
            self._counter.finish()


class _ReasoningCount:
    """Counts the tokens of reasoning: reads the output once more, token by token, so that the count does not depend on
    which tokens came together."""

    def __init__(self, parser: OutputParser, detokenizer: Detokenizer) -> None:
        self._parser, self._detokenizer = parser, detokenizer
        self._inside = False
        self._silent = 0
        """Tokens since the last part, which may turn out to be reasoning."""
        self.count = 0

    def add(self, token_ids: Sequence[int]) -> None:
        """The next tokens."""
        for token_id in token_ids:
            text = self._detokenizer.add((token_id,))
            self._silent += 1
            self._take(self._parser.push(text) if text else [])

    def finish(self) -> None:
        """The output ends."""
        self._take([*self._parser.push(self._detokenizer.flush()), *self._parser.finish()])

    def _take(self, parts: Sequence[Part]) -> None:
        if not parts:
            return
        if any(isinstance(part, Reasoning) for part in parts):
            # Before its first part the silent ones were its mark, all but this one.
            self.count += self._silent if self._inside else min(self._silent, 1)
        self._inside = isinstance(parts[-1], Reasoning)
        self._silent = 0


def new_call_id() -> str:
    """An id of a tool call."""
    return f"call_{secrets.token_hex(12)}"


class ToolCall(msgspec.Struct):
    """One call, as far as it has come."""

    id: str
    name: str
    arguments: str = ""


class Gathered:
    """The parts of an output, put together."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._arguments: dict[int, list[str]] = {}
        self._begun: dict[int, ToolCallBegin] = {}

    def add(self, parts: Sequence[Part]) -> None:
        """The next parts."""
        for part in parts:
            match part:
                case Content(text):
                    self._content.append(text)
                case Reasoning(text):
                    self._reasoning.append(text)
                case ToolCallBegin(index):
                    self._begun[index] = part
                case ToolCallArguments(index, text):
                    self._arguments.setdefault(index, []).append(text)

    @property
    def content(self) -> str:
        """Text for the user."""
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        """What was thought before."""
        return "".join(self._reasoning)

    @property
    def calls(self) -> list[ToolCall]:
        """The calls, in order."""
        return [
            ToolCall(begun.id, begun.name, "".join(self._arguments.get(index, ())))
            for index, begun in sorted(self._begun.items())
        ]
