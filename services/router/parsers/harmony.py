"""gpt-oss: messages in channels. The prompt ends with <|start|>assistant, so an output begins with a channel.

    <|channel|>analysis<|message|>The user wants…<|end|>
    <|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": …}<|call|>
    <|start|>assistant<|channel|>final<|message|>It is cold.<|return|>

analysis is reasoning; final, and commentary to nobody (what the model says before it calls), are content; what goes to
functions.NAME is a call. The recipient may stand in the role, too: <|start|>assistant to=functions.x<|channel|>….
"""

from __future__ import annotations

import re
from collections.abc import Callable

from services.router.parsers.base import Content, Reasoning
from services.router.parsers.call_object import Tools, stream_object
from services.router.parsers.reader import SteppedParser, Steps

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
ENDS = (END, CALL, RETURN, START, CHANNEL)
"""What ends a message: the last two belong to the next one, for models that forget the end."""

_TO = " to="
_RECIPIENT = re.compile(r"to=(\S+)")
_WHOLE_NAME = re.compile(r"to=functions\.([\w.-]+)[\s<]")
_HEADER_LIMIT = 512
"""Longer headers are none."""


class HarmonyParser(SteppedParser):
    """Reads channels. Without `reasoning` the analysis is content; without tools calls are."""

    def __init__(self, tools: Tools | None, *, reasoning: bool = True) -> None:
        self._tools, self._reasoning = tools, reasoning
        super().__init__()

    def read(self) -> Steps[None]:
        """See SteppedParser."""
        reader = self.reader
        if (yield from reader.literal(_TO)):  # the role, which the prompt ends with, goes on
            yield from self._message(_TO)
        while mark := (yield from reader.until((START, CHANNEL), reader.content)):
            yield from self._message(mark)

    def _message(self, mark: str) -> Steps[None]:
        """One message behind its first mark; what is none that we know is content."""
        reader = self.reader
        reader.hold(len(mark))
        header, whole = yield from self._header(mark)
        out = (yield from self._body(header)) if whole else self._cut(header)
        if out is None:
            reader.rewind()
            reader.at += len(mark)
            reader.content(mark)
            return
        ending = yield from reader.until(ENDS, out)
        if ending in (START, CHANNEL):
            reader.at -= len(ending)

    def _header(self, mark: str) -> Steps[tuple[str, bool]]:
        """All up to <|message|>, with the mark, and True; False with what was read when it is no header."""
        reader, header = self.reader, mark
        while len(header) < _HEADER_LIMIT:
            char = yield from reader.peek()
            if char in ("", "\n"):
                break
            found = (yield from reader.one_of((MESSAGE, CHANNEL, CONSTRAIN))) if char == "<" else ""
            if found == MESSAGE:
                return header, True
            if not found:
                reader.at += 1
            header += found or char
        return header, False

    def _cut(self, header: str) -> Callable[[str], None] | None:
        """A call whose header the output's end cut behind the name."""
        found = _WHOLE_NAME.search(header)
        if found is None or self._tools is None or not self._tools.has(found[1]) or not self.reader.cut(found[1]):
            return None
        return self.reader.content

    def _body(self, header: str) -> Steps[Callable[[str], None] | None]:
        """Where the text of a message goes; None when the message is none that we know. A call's object is read."""
        reader = self.reader
        words = header.partition(CHANNEL)[2].split(CONSTRAIN)[0].split()
        channel = words[0] if words else ""
        recipient = _RECIPIENT.search(header)
        name = "" if recipient is None else recipient.group(1).removeprefix("functions.").partition("<|")[0]
        if recipient is not None and recipient.group(1).startswith("functions."):
            if self._tools is None or not self._tools.has(name):
                return None
            if (yield from reader.space()) != "{":
                return reader.content if reader.cut(name) else None
            reader.begin(name)
            yield from stream_object(reader, ENDS)
            return reader.content
        if channel == "analysis":
            reader.release()
            return self._thought if self._reasoning else self._shown
        if channel in ("final", "commentary") and recipient is None:
            reader.release()
            return self._shown
        return None

    def _thought(self, text: str) -> None:
        self.reader.part(Reasoning(text))

    def _shown(self, text: str) -> None:
        self.reader.part(Content(text))
