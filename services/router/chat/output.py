"""One choice of a chat: from the deltas of its sample to parts (content, reasoning, tool calls), and what they count.

Each way of replying (chunks of chat completions, whole messages, other APIs' events) makes its own form of them.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

import msgspec
import orjson

from services.router.chat.text_positions import ThoughtCount
from services.router.journey import Delta, SampleResult
from services.router.parsers.base import (
    Content,
    OutputParser,
    Part,
    Reasoning,
    Source,
    ToolCallArguments,
    ToolCallBegin,
)
from services.router.text.detokenizer import Detokenizer

ParserOf = Callable[[], OutputParser]
"""Makes the parser of one output."""


class ChatOutput:
    """State of one choice. Without a parser all text is content."""

    def __init__(self, parser_of: ParserOf | None, detokenizer_of: Callable[[], Detokenizer]) -> None:
        self._parser = None if parser_of is None else parser_of()
        self._detokenizer_of = detokenizer_of
        self._thoughts: ThoughtCount | None = None
        self._tokens: list[int] = []
        """Those before the first reasoning: most outputs have none, and nothing to count."""
        self._shown = 0
        self.sources: Sequence[Source] = ()
        """Where the text of each part of the last delta stands in the output."""
        self.called = False
        """True once the model has called a tool."""
        self._last_call: list[str] | None = None
        """The arguments of the call that came last, while nothing follows it."""

    @property
    def reasoning_tokens(self) -> int:
        """Tokens so far of which at least one byte is reasoning that was shown; marks around it don't count."""
        return 0 if self._thoughts is None else self._thoughts.count

    def take(self, delta: Delta) -> list[Part]:
        """The parts that are certain with this delta. Begins of calls have ids."""
        if self._parser is None:
            return self._all_content(delta.text)
        parts = self._parser.push(delta.text) if delta.text else []
        sources = [*self._parser.sources] if delta.text else []
        if delta.result is not None:
            parts = [*parts, *self._parser.finish()]
            sources += self._parser.sources
        for i, part in enumerate(parts):
            if isinstance(part, ToolCallBegin):
                self.called, self._last_call = True, []
                if not part.id:
                    parts[i] = msgspec.structs.replace(part, id=new_call_id())
            elif not isinstance(part, ToolCallArguments):
                self._last_call = None
            elif self._last_call is not None:
                self._last_call.append(part.text)
        self.sources = sources
        self._count(parts, delta.token_ids)
        return parts

    def finish_reason(self, result: SampleResult) -> str:
        """tool_calls when the model has called tools and ended by itself, or where the client's stop cuts no call."""
        called = self.called and result.finish_reason == "stop" and not self.is_cut(result)
        return "tool_calls" if called else result.finish_reason

    def is_cut(self, result: SampleResult) -> bool:
        """Whether the last part was cut: by the limit, or a call by what the client wants outputs to stop at."""
        if result.finish_reason == "stop" and result.stop_reason is not None and self._last_call is not None:
            return not _is_json("".join(self._last_call))
        return result.finish_reason == "length"

    def _all_content(self, text: str) -> list[Part]:
        start, self._shown = self._shown, self._shown + len(text)
        self.sources = [[(start, self._shown)]] if text else []
        return [Content(text)] if text else []

    def _count(self, parts: Sequence[Part], token_ids: Sequence[int]) -> None:
        if self._thoughts is None:
            self._tokens += token_ids
            if not any(isinstance(part, Reasoning) for part in parts):
                return
            self._thoughts = ThoughtCount(self._detokenizer_of())
            token_ids, self._tokens = self._tokens, []
        self._thoughts.add(token_ids)
        self._thoughts.take(parts, self.sources)


def _is_json(text: str) -> bool:
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return True


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
