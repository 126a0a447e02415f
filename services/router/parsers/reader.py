"""What the parsers are made of: a reader over text that comes in pieces.

A format is written as a generator that reads from the front to the end, as if all text were there; where there is no
more, it yields and goes on with the next piece. Where it may turn out to be wrong it can go back:

    reader.hold()             a call may begin here
    …                         reading on; nothing goes out
    reader.begin(name)        it is one; what was read for it is done with
    reader.rewind()           or it is none: read the same again, as content
    reader.cut(name)          or the output ended behind its name: it is one, without arguments
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from functools import cache
from typing import TypeVar

from services.router.parsers.base import Content, Part, Reasoning, Source, ToolCallArguments, ToolCallBegin
from services.router.text.token_spans import Span

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Reading that may have to wait for text; returns a T."""

_SPACE = frozenset(" \t\r\n")


class Reader:
    """The text that is there, how far it is read, and the parts that are certain."""

    def __init__(self) -> None:
        self.text = ""
        self._dropped = 0
        """Characters of the output before `text`."""
        self.at = 0
        """Where to read on in `text`."""
        self.ended = False
        """True when no more text comes."""
        self._held = -1
        """Where to go back to, -1 for nowhere. Text from here on is not dropped."""
        self.calls = 0
        """Calls that have begun."""
        self._parts: list[Part] = []
        self._sources: list[Source] = []
        self._blank = ""
        """White space before the first content, or since the last call: not shown when a call follows."""
        self._blanks: list[Span] = []
        """Where it stands."""
        self._is_blank = True

    # ---- in ---------------------------------------------------------------------------------------

    def add(self, text: str) -> None:
        """Takes the next text."""
        drop = self.at if self._held < 0 else self._held
        self.text = self.text[drop:] + text
        self._dropped += drop
        self.at -= drop
        if self._held >= 0:
            self._held -= drop

    def hold(self, before: int = 0) -> None:
        """Remembers this place, or the one `before` characters ago, to go back to."""
        self._held = self.at - before

    def rewind(self) -> None:
        """Goes back to the place that is held."""
        self.at = self._held
        self._held = -1

    def release(self) -> None:
        """There is no way back any more."""
        self._held = -1

    def peek(self) -> Steps[str]:
        """The next character, "" at the end."""
        while self.at >= len(self.text):
            if self.ended:
                return ""
            yield
        return self.text[self.at]

    def space(self) -> Steps[str]:
        """Reads over white space; returns the character behind it, "" at the end."""
        while True:
            char = yield from self.peek()
            if char == "" or char not in _SPACE:
                return char
            self.at += 1

    def literal(self, literal: str) -> Steps[bool]:
        """Reads `literal` if it is next; else nothing."""
        while True:
            here = self.text[self.at : self.at + len(literal)]
            if here == literal:
                self.at += len(literal)
                return True
            if self.ended or not literal.startswith(here):
                return False
            yield

    def closing(self, literal: str) -> Steps[None]:
        """Reads `literal`, and the white space before it, if that is next; else nothing."""
        self.hold()
        yield from self.space()
        if (yield from self.literal(literal)):
            self.release()
        else:
            self.rewind()

    def one_of(self, literals: Sequence[str]) -> Steps[str]:
        """Reads whichever literal is next; "" when none is. None may begin with another."""
        while True:
            rest = self.text[self.at : self.at + max(map(len, literals))]
            for literal in literals:
                if rest.startswith(literal):
                    self.at += len(literal)
                    return literal
            if self.ended or not any(literal.startswith(rest) for literal in literals):
                return ""
            yield

    def until(self, marks: Sequence[str], out: Callable[[str], None]) -> Steps[str]:
        """Gives all text before the next mark to `out` and reads the mark; returns it, "" at the end.

        Holds back no more than the longest suffix that could begin a mark.
        """
        pattern = _any_of(tuple(marks))
        while True:
            found = pattern.search(self.text, self.at)
            if found is not None:
                self._give(found.start(), out)
                self.at = found.end()
                return found.group()
            end = len(self.text)
            self._give(end if self.ended else end - held_back(self.text, self.at, marks), out)
            if self.ended:
                return ""
            yield

    def matching(self, chars: re.Pattern[str], limit: int) -> Steps[str]:
        """Reads characters that match, at most `limit`."""
        found = ""
        while len(found) < limit:
            char = yield from self.peek()
            if not char or not chars.match(char):
                break
            self.at += 1
            found += char
        return found

    def _give(self, end: int, out: Callable[[str], None]) -> None:
        if end > self.at:
            text, self.at = self.text[self.at : end], end
            out(text)

    # ---- out --------------------------------------------------------------------------------------

    def content(self, text: str) -> None:
        """Text for the user, which was read last."""
        source = [self._span_of(text)]
        if self._is_blank:
            self._blank += text
            self._blanks += source
            if not text.strip():
                return
            text, source = self._blank, self._blanks
            self._blank, self._blanks, self._is_blank = "", [], False
        self._add(Content(text), source)

    def begin(self, name: str, call_id: str = "") -> None:
        """A call begins; what was read for it may be dropped."""
        self.release()
        self._blank, self._blanks, self._is_blank = "", [], True
        self.part(ToolCallBegin(self.calls, name, call_id))
        self.calls += 1

    def cut(self, name: str, call_id: str = "", marks: Sequence[str] = ()) -> bool:
        """Whether the output ended here, or within one of `marks`: then the call that would go on here begins, and
        nothing more comes. The name must be whole: what is read says where it ends."""
        rest = self.text[self.at :]
        if not self.ended or (rest and not any(mark.startswith(rest) for mark in marks)):
            return False
        self.at = len(self.text)
        self.begin(name, call_id)
        return True

    def arguments(self, text: str) -> None:
        """More of the last call's arguments."""
        if text:
            self.part(ToolCallArguments(self.calls - 1, text))

    def end(self) -> None:
        """The output is over: white space that nothing followed is content where no call was made."""
        if self._blank and not self.calls:
            self._add(Content(self._blank), self._blanks)
        self._blank, self._blanks = "", []

    def part(self, part: Part, before: int = 0) -> None:
        """One more part. Where it is content or reasoning it was read last, or ends `before` characters before that."""
        self._add(part, [self._span_of(part.text, before)] if isinstance(part, Content | Reasoning) else ())

    def take(self) -> tuple[list[Part], list[Source]]:
        """The parts since the last time, and where each stands; pieces of content that follow each other are one."""
        parts, sources = self._parts, self._sources
        self._parts, self._sources = [], []
        return _joined(parts, sources)

    def _add(self, part: Part, source: Source) -> None:
        self._parts.append(part)
        self._sources.append(source)

    def _span_of(self, text: str, before: int = 0) -> Span:
        end = self._dropped + self.at - before
        return end - len(text), end


class SteppedParser(ABC):
    """A parser whose format is a generator over a reader."""

    def __init__(self) -> None:
        self.reader = Reader()
        self._steps = self._run()
        self._over = False
        self.sources: list[Source] = []

    @abstractmethod
    def read(self) -> Steps[None]:
        """Reads the whole output."""

    def push(self, text: str) -> list[Part]:
        """See OutputParser."""
        self.reader.add(text)
        return self._step()

    def finish(self) -> list[Part]:
        """See OutputParser."""
        self.reader.ended = True
        return self._step()

    def _step(self) -> list[Part]:
        if not self._over:
            self._over = next(self._steps, True) is True
        parts, self.sources = self.reader.take()
        return parts

    def _run(self) -> Generator[None, None, None]:
        reader = self.reader
        yield from self.read()
        yield from reader.until((), reader.content)  # what the format leaves over
        reader.end()


def joined(parts: Sequence[Part]) -> list[Part]:
    """The same parts, with neighbours of one kind as one."""
    return _joined(parts, [()] * len(parts))[0]


def _joined(parts: Sequence[Part], sources: Sequence[Source]) -> tuple[list[Part], list[Source]]:
    out: list[Part] = []
    places: list[list[Span]] = []
    for part, source in zip(parts, sources, strict=True):
        last = out[-1] if out else None
        if isinstance(part, ToolCallArguments) and isinstance(last, ToolCallArguments) and last.index == part.index:
            out[-1] = ToolCallArguments(part.index, last.text + part.text)
        elif not isinstance(part, ToolCallArguments | ToolCallBegin) and last is not None and type(part) is type(last):
            out[-1] = type(part)(last.text + part.text)
            places[-1] += source
        else:
            out.append(part)
            places.append(list(source))
    return out, list(places)


def held_back(text: str, start: int, marks: Sequence[str]) -> int:
    """The length of the longest suffix of text[start:] that could begin a mark."""
    longest = min(len(text) - start, max(map(len, marks), default=1) - 1)
    for length in range(longest, 0, -1):
        tail = text[-length:]
        if any(mark.startswith(tail) for mark in marks):
            return length
    return 0


@cache
def _any_of(marks: tuple[str, ...]) -> re.Pattern[str]:
    if not marks:
        return re.compile(r"(?!)")
    return re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))))
