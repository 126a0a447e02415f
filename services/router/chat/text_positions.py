"""Which tokens are thoughts, and which are the text of an output's messages, where thoughts, calls and marks stand
between them.

The parser says where in the output each part stands, the tokens' own spans which of them it is made of: so neither
depends on which tokens came together.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

from engine_core.types.sampling import TokenLogprobs
from services.router.parsers.base import Content, Part, Reasoning, Source, ToolCallBegin
from services.router.text.detokenizer import Detokenizer
from services.router.text.token_spans import Span, TokenSpans


class ThoughtCount:
    """Counts the tokens of which at least one byte is reasoning."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._spans = TokenSpans(detokenizer)
        self._tokens: deque[Span] = deque()
        """Those that may still be counted."""
        self.count = 0

    def add(self, token_ids: Sequence[int]) -> None:
        """The next tokens; they come before their parts, or with them."""
        self._tokens.extend(self._spans.add(token_ids))

    def take(self, parts: Sequence[Part], sources: Sequence[Source]) -> None:
        """The next parts."""
        tokens = self._tokens
        for part, source in zip(parts, sources, strict=True):
            if not isinstance(part, Reasoning):
                continue
            for start, end in source:
                while tokens and tokens[0][0] < end:
                    first, last = tokens.popleft()
                    self.count += last > max(first, start)


class TextPositions:
    """The tokens of each text of one output. `run` counts its texts, as Item.run does. A token that holds a piece of a
    text is its; those that show nothing belong to the text behind them, at the end (where a stop string may have cut
    them off) to that before them."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._spans = TokenSpans(detokenizer)
        self._tokens: deque[tuple[Span, TokenLogprobs]] = deque()
        self._run = -1
        self._inside = True
        """Whether a text, or nothing yet, came last."""
        self._found: defaultdict[int, deque[TokenLogprobs]] = defaultdict(deque)

    def add(self, positions: Sequence[TokenLogprobs]) -> None:
        """The next tokens; they come before their parts, or with them."""
        spans = self._spans.add([position.token_id for position in positions])
        self._tokens.extend(zip(spans, positions, strict=True))

    def take(self, parts: Sequence[Part], sources: Sequence[Source]) -> None:
        """The next parts."""
        for part, source in zip(parts, sources, strict=True):
            if isinstance(part, ToolCallBegin) or (part.text and not isinstance(part, Content)):
                self._inside = False
            elif part.text and isinstance(part, Content):
                if self._run < 0 or not self._inside:
                    self._run += 1
                self._inside = True
                for span in source:
                    self._take(span)

    def finish(self) -> None:
        """The output ends."""
        if self._inside:
            self._found[max(self._run, 0)] += (position for _, position in self._tokens)
        self._tokens.clear()

    def new(self, run: int) -> list[TokenLogprobs]:
        """The tokens of text `run` that this didn't return before."""
        found = list(self._found[run])
        self._found[run].clear()
        return found

    def _take(self, span: Span) -> None:
        start, end = span
        while self._tokens and self._tokens[0][0][0] < end:
            (first, last), position = self._tokens.popleft()
            if last > start or first >= start:
                self._found[self._run].append(position)
