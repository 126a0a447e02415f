"""Thoughts between two marks, at the beginning of an output: <think>…</think>, [THINK]…[/THINK].

Many templates write the first mark into the prompt: the output begins inside. Line breaks at either side of a mark
belong to the format, as the templates write them.
"""

from __future__ import annotations

from services.router.parsers.base import Content, OutputParser, Part, Reasoning, Source
from services.router.parsers.reader import SteppedParser, Steps

THINK = ("<think>", "</think>")
MISTRAL = ("[THINK]", "[/THINK]")


class ThinkParser(SteppedParser):
    """Gives reasoning, then everything else as content. `inside`: the prompt has the first mark."""

    def __init__(self, marks: tuple[str, str] = THINK, *, inside: bool = False) -> None:
        self._marks, self._inside = marks, inside
        self._breaks = ""
        """Line breaks that may turn out to stand before the last mark."""
        super().__init__()

    def read(self) -> Steps[None]:
        """See SteppedParser."""
        reader, (opening, closing) = self.reader, self._marks
        reader.hold()
        yield from reader.space()
        # A model may write the mark though the prompt has it.
        if (yield from reader.literal(opening)):
            reader.release()
        else:
            reader.rewind()
            if not self._inside:
                return
        yield from self._line_breaks()
        if (yield from reader.until((closing,), self._thought)):
            yield from self._line_breaks()
        else:
            self._flush()

    def _thought(self, text: str) -> None:
        kept = text.rstrip("\r\n")
        if kept:
            self.reader.part(Reasoning(self._breaks + kept), before=len(text) - len(kept))
            self._breaks = ""
        self._breaks += text[len(kept) :]

    def _flush(self) -> None:
        """The output ends within a thought: its line breaks are part of it."""
        if self._breaks:
            self.reader.part(Reasoning(self._breaks))

    def _line_breaks(self) -> Steps[None]:
        reader = self.reader
        while (yield from reader.peek()) in ("\n", "\r"):
            reader.at += 1


class ReasoningFirst:
    """One parser after the other: what `reasoning` leaves as content, `rest` reads."""

    def __init__(self, reasoning: ThinkParser, rest: OutputParser) -> None:
        self._reasoning, self._rest = reasoning, rest
        self._content_at = -1
        """Where the content begins that `rest` reads; there is nothing else behind."""
        self.sources: list[Source] = []

    def push(self, text: str) -> list[Part]:
        """See OutputParser."""
        return self._through(self._reasoning.push(text))

    def finish(self) -> list[Part]:
        """See OutputParser."""
        parts = self._through(self._reasoning.finish())
        last = self._rest.finish()
        self.sources += self._of_rest()
        return [*parts, *last]

    def _through(self, parts: list[Part]) -> list[Part]:
        out: list[Part] = []
        self.sources = []
        for part, source in zip(parts, self._reasoning.sources, strict=True):
            if isinstance(part, Content):
                self._content_at = source[0][0] if self._content_at < 0 else self._content_at
                out += self._rest.push(part.text)
                self.sources += self._of_rest()
            else:
                out.append(part)
                self.sources.append(source)
        return out

    def _of_rest(self) -> list[Source]:
        at = self._content_at
        return [[(at + start, at + end) for start, end in source] for source in self._rest.sources]
