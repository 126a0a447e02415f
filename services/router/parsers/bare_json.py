"""Calls that are the whole output, with no mark around them.

    llama3_json   {"name": "get_weather", "parameters": {"city": "Oslo"}}; {"name": …}
                  <|python_tag|> may stand before them, and text before that
    json          {"name": "get_weather", "arguments": {"city": "Oslo"}}, each on a line of its own

An object is a call when it names a function that there is and holds its arguments and nothing unknown: an answer in
JSON is content.
"""

from __future__ import annotations

from services.router.parsers.call_object import Tools, call_object
from services.router.parsers.reader import SteppedParser, Steps

PYTHON_TAG = "<|python_tag|>"


class BareJsonParser(SteppedParser):
    """Reads objects at the beginning of the output, or behind `tag`."""

    def __init__(self, tools: Tools, *, tag: str = "", separator: str = "") -> None:
        self._tools, self._tag, self._separator = tools, tag, separator
        super().__init__()

    def read(self) -> Steps[None]:
        """See SteppedParser."""
        reader = self.reader
        reader.hold()
        if (yield from reader.space()) == "{" and (yield from call_object(reader, self._tools, marked=False)):
            yield from self._more()
        else:
            reader.rewind()
        while self._tag and (yield from reader.until((self._tag,), reader.content)):
            reader.hold()
            if (yield from reader.space()) == "{" and (yield from call_object(reader, self._tools, marked=True)):
                yield from self._more()
            else:
                reader.rewind()
                reader.content(self._tag)

    def _more(self) -> Steps[None]:
        """Calls behind a call."""
        reader = self.reader
        while True:
            reader.hold()
            if (yield from reader.space()) == self._separator and self._separator:
                reader.at += 1
            if (yield from reader.space()) != "{" or not (yield from call_object(reader, self._tools, marked=False)):
                reader.rewind()
                return
