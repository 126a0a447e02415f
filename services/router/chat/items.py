"""An output as a row of items, as OpenAI's responses and Anthropic's messages have it: thoughts, text and calls follow
each other, and one ends where the next begins.

    parts of a chat's output ─▶ Items.take ─▶ Opened, Grew…, Closed; Opened, …
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec

from engine_core.types.errors import InternalError
from services.router.parsers.base import Content, Part, Reasoning, ToolCallBegin


class ItemKind(enum.Enum):
    """What an item is."""

    THOUGHT = "thought"
    TEXT = "text"
    CALL = "call"


class Item(msgspec.Struct):
    """One item. `index` is its place in the output, `run` its place among those of its kind; `call` is the index of a
    call in the parser's parts."""

    kind: ItemKind
    index: int
    run: int
    name: str = ""
    call_id: str = ""
    call: int = -1
    closed: bool = False
    cut: bool = False
    """True when the limit of tokens ended it."""
    pieces: list[str] = msgspec.field(default_factory=list)

    @property
    def text(self) -> str:
        """All of it so far; of a call, its arguments."""
        return "".join(self.pieces)


class Opened(msgspec.Struct, frozen=True):
    """An item begins, empty."""

    item: Item


class Grew(msgspec.Struct, frozen=True):
    """An item goes on."""

    item: Item
    piece: str


class Closed(msgspec.Struct, frozen=True):
    """An item has ended."""

    item: Item


Step = Opened | Grew | Closed


class Items:
    """The items of one output."""

    def __init__(self) -> None:
        self.all: list[Item] = []

    def take(self, parts: Sequence[Part]) -> list[Step]:
        """What the next parts do. Raises InternalError for arguments of a call that is not open."""
        steps: list[Step] = []
        for part in parts:
            if isinstance(part, ToolCallBegin):
                self._open(steps, ItemKind.CALL, part.name, part.id, part.index)
                continue
            if not part.text:
                continue
            if isinstance(part, Content | Reasoning):
                kind = ItemKind.TEXT if isinstance(part, Content) else ItemKind.THOUGHT
                if self._last is None or self._last.kind is not kind:
                    self._open(steps, kind)
            elif self._last is None or self._last.call != part.index:
                raise InternalError(f"arguments of call {part.index} came when it was not open")
            item = self.all[-1]
            item.pieces.append(part.text)
            if steps and isinstance(steps[-1], Grew):  # of the same item: one that opens stands between
                steps[-1] = Grew(item, steps[-1].piece + part.text)
            else:
                steps.append(Grew(item, part.text))
        return steps

    def end(self, *, cut: bool) -> list[Step]:
        """The output ends, `cut` by the limit of tokens. One that shows nothing is an empty text."""
        steps: list[Step] = []
        if not self.all:
            self._open(steps, ItemKind.TEXT)
        if self._last is not None:
            self._last.cut = cut
        self._close(steps)
        return steps

    @property
    def _last(self) -> Item | None:
        return self.all[-1] if self.all and not self.all[-1].closed else None

    def _open(self, steps: list[Step], kind: ItemKind, name: str = "", call_id: str = "", call: int = -1) -> None:
        self._close(steps)
        run = sum(item.kind is kind for item in self.all)
        self.all.append(Item(kind, len(self.all), run, name, call_id, call))
        steps.append(Opened(self.all[-1]))

    def _close(self, steps: list[Step]) -> None:
        if self._last is not None:
            steps.append(Closed(self._last))
            self._last.closed = True
