"""Which tokens are the text of an output's messages, where thoughts and calls stand between them.

The output is read once more, token by token, so that the answer does not depend on which tokens came together. A
token that completes text belongs to that text with those before it that showed nothing yet; marks of the model's
format that showed nothing at all count to what they introduce.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

from engine_core.types.sampling import TokenLogprobs
from services.router.chat_output import ParserOf
from services.router.detokenizer import Detokenizer
from services.router.items import Closed, Grew, ItemKind, Items
from services.router.parsers.base import Content, Part


class TextPositions:
    """State of one output. `run` counts its texts, as Item.run does."""

    def __init__(self, parser_of: ParserOf | None, detokenizer: Detokenizer) -> None:
        self._parser = None if parser_of is None else parser_of()
        self._detokenizer = detokenizer
        self._items = Items()
        self._silent: list[TokenLogprobs] = []
        self._found: defaultdict[int, deque[TokenLogprobs]] = defaultdict(deque)

    def add(self, positions: Sequence[TokenLogprobs]) -> None:
        """The next tokens."""
        for position in positions:
            text = self._detokenizer.add((position.token_id,))
            self._silent.append(position)
            if self._parser is None:
                self._take([Content(text)])
            elif text:
                self._take(self._parser.push(text))

    def finish(self) -> None:
        """The output ends: what was silent belongs to the text before it."""
        rest = self._detokenizer.flush()
        if self._parser is None:
            self._take([Content(rest)])
        else:
            self._take([*self._parser.push(rest), *self._parser.finish()])
        last = self._items.all[-1] if self._items.all else None
        if last is None or last.kind is ItemKind.TEXT:
            self._found[0 if last is None else last.run] += self._silent
        self._silent = []

    def take(self, run: int) -> list[TokenLogprobs]:
        """The tokens of text `run` that were not taken before."""
        found = list(self._found[run])
        self._found[run].clear()
        return found

    def _take(self, parts: Sequence[Part]) -> None:
        steps = [step for step in self._items.take(parts) if not isinstance(step, Closed)]
        if not steps:
            return
        texts = [step.item for step in steps if isinstance(step, Grew) and step.item.kind is ItemKind.TEXT]
        if texts:
            self._found[texts[-1].run] += self._silent
        self._silent = []
