"""What a parser of outputs is. One parser object reads one sample's output; text goes in as it comes, parts come out.

A parser never holds back more than the longest suffix that could begin one of its marks, and the parts do not
depend on how the text was cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from services.router.text.token_spans import Span


class Content(msgspec.Struct, frozen=True):
    """Text for the user."""

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """Text that the model thought before it answered."""

    text: str


class ToolCallBegin(msgspec.Struct, frozen=True):
    """Call `index` (from 0) of function `name` begins. Its id is the reply's to mint, unless the model wrote one."""

    index: int
    name: str
    id: str = ""


class ToolCallArguments(msgspec.Struct, frozen=True):
    """The next piece of call `index`'s arguments: joined, they are one JSON object."""

    index: int
    text: str


Part = Content | Reasoning | ToolCallBegin | ToolCallArguments

Source = Sequence[Span]
"""Where a part's text stands among the characters of the output, in order."""


class OutputParser(Protocol):
    """State of one output."""

    @property
    def sources(self) -> Sequence[Source]:
        """One per part that push or finish returned last: what is content or reasoning stands in the output as it is;
        empty for calls. They depend on the text alone, as the parts do."""

    def push(self, text: str) -> list[Part]:
        """Takes the next text; returns the parts that are now certain. Never raises: what is no call is content."""

    def finish(self) -> list[Part]:
        """The output ends here: returns what was held back."""
