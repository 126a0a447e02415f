"""Calls as JSON in a list, with a mark before it. Families differ in the marks:

    granite        <|tool_call|>[{"name": "get_weather", "arguments": {"city": "Oslo"}}, …]
    hunyuan_a13b   <tool_calls>[{"name": …}]</tool_calls>      Apriel, too; MiniMax M1 has objects on lines there
    nemotron_json  <TOOLCALL>[{"name": …}]</TOOLCALL>
    xlam           [{"name": …}]                               the whole output

Objects that follow each other without a list are understood, too.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from services.router.parsers.call_object import Tools, call_object
from services.router.parsers.reader import SteppedParser, Steps


class ListMarks(msgspec.Struct, frozen=True):
    """What stands around a list; "" for nothing."""

    opening: str = ""
    closing: str = ""

    @property
    def special(self) -> tuple[str, ...]:
        """Marks that may be special tokens."""
        return tuple(filter(None, (self.opening, self.closing)))


FAMILIES: Mapping[str, ListMarks] = {
    "nemotron_json": ListMarks("<TOOLCALL>", "</TOOLCALL>"),
    "hunyuan_a13b": ListMarks("<tool_calls>", "</tool_calls>"),
    "granite": ListMarks("<|tool_call|>"),
    "xlam": ListMarks(),
}
SHOWN: Mapping[str, str] = {
    **{family: marks.opening for family, marks in FAMILIES.items() if marks.opening},
    "xlam": '[{"name": "tool_call_name", "arguments"',
}
"""How templates show each form."""


class JsonListParser(SteppedParser):
    """Reads lists behind their mark, or at the beginning of the output where there is none."""

    def __init__(self, tools: Tools, marks: ListMarks) -> None:
        self._tools, self._marks = tools, marks
        super().__init__()

    def read(self) -> Steps[None]:
        """See SteppedParser."""
        reader, opening = self.reader, self._marks.opening
        if not opening:
            reader.hold()
            if not (yield from self._calls()):
                reader.rewind()
            return
        while (yield from reader.until((opening,), reader.content)):
            reader.hold()
            if not (yield from self._calls()):
                reader.rewind()
                reader.content(opening)

    def _calls(self) -> Steps[bool]:
        """Calls up to the end of the list and its mark; False where there is none, and then the caller goes back."""
        reader = self.reader
        listed = (yield from reader.space()) == "["
        reader.at += listed
        if not (yield from self._call()):
            return False
        while True:
            reader.hold()
            char = yield from reader.space()
            if listed and char == "]":
                reader.at += 1
                reader.release()
                break
            reader.at += char == ","
            if not (yield from self._call()):
                reader.rewind()
                break
        if self._marks.closing:
            yield from reader.closing(self._marks.closing)
        return True

    def _call(self) -> Steps[bool]:
        reader, marks = self.reader, self._marks
        if (yield from reader.space()) != "{":
            return False
        ends = (marks.closing,) if marks.closing else ()
        return (yield from call_object(reader, self._tools, marked=bool(marks.opening), ends=ends))
