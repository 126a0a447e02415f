"""Which tokens are the text of an output's messages, where thoughts, calls and marks stand between them.

The output is read once more, token by token, so that the answer does not depend on which tokens came together. What
the parser gives out is found again in what it was given; the tokens that it was made of are the text's, also where
they hold a piece of a mark. Tokens that show nothing belong to the text behind them, at the end to that before them.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

import msgspec

from engine_core.types.sampling import TokenLogprobs
from services.router.chat.items import Closed, ItemKind, Items, Opened
from services.router.chat.output import ParserOf
from services.router.parsers.base import Part
from services.router.text.detokenizer import Detokenizer


class _Token(msgspec.Struct):
    """A token with its place among the characters of the output."""

    start: int
    end: int
    position: TokenLogprobs


class TextPositions:
    """State of one output. `run` counts its texts, as Item.run does."""

    def __init__(self, parser_of: ParserOf | None, detokenizer: Detokenizer) -> None:
        self._parser = None if parser_of is None else parser_of()
        self._detokenizer = detokenizer
        self._items = Items()
        self._tokens: deque[_Token] = deque()
        self._begin = self._end = 0
        """Where the characters begin that the parser has not given out, and where they end."""
        self._open = ""
        """Those characters."""
        self._follows = False
        """True when what the parser gives out next may be right at their beginning, with no mark before it."""
        self._found: defaultdict[int, deque[TokenLogprobs]] = defaultdict(deque)

    def add(self, positions: Sequence[TokenLogprobs]) -> None:
        """The next tokens."""
        if self._parser is None:
            self._found[0] += positions
            return
        for position in positions:
            text = self._detokenizer.add((position.token_id,))
            self._tokens.append(_Token(self._end, self._end + len(text), position))
            if text:
                self._push(text)
                self._take(self._parser.push(text))

    def finish(self) -> None:
        """The output ends."""
        if self._parser is None:
            return
        rest = self._detokenizer.flush()
        self._push(rest)
        self._take([*self._parser.push(rest), *self._parser.finish()])
        last = self._items.all[-1] if self._items.all else None
        if last is None or last.kind is ItemKind.TEXT:
            self._found[0 if last is None else last.run] += (token.position for token in self._tokens)
        self._tokens.clear()

    def take(self, run: int) -> list[TokenLogprobs]:
        """The tokens of text `run` that were not taken before."""
        found = list(self._found[run])
        self._found[run].clear()
        return found

    def _push(self, text: str) -> None:
        self._open += text
        self._end += len(text)

    def _take(self, parts: Sequence[Part]) -> None:
        for step in self._items.take(parts):
            if isinstance(step, Opened | Closed):
                self._follows = False
                continue
            item, piece = step.item, step.piece
            at = 0 if self._follows and self._open.startswith(piece) else self._open.rfind(piece)
            self._follows = True
            if at < 0:
                continue  # the parser's own: the arguments of a call that has none
            start, end = self._begin + at, self._begin + at + len(piece)
            while self._tokens and self._tokens[0].start < end:
                token = self._tokens.popleft()
                if item.kind is ItemKind.TEXT and (token.end > start or token.start >= start):
                    self._found[item.run].append(token.position)
            self._open, self._begin = self._open[at + len(piece) :], end
