"""Hermes 2 and 3, Qwen 2.5 and 3, and who follows them.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Oslo"}}
    </tool_call>

Several calls are several such blocks. Text may stand before them.
"""

from __future__ import annotations

from services.router.parsers.call_object import Tools, call_object
from services.router.parsers.reader import SteppedParser, Steps

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(SteppedParser):
    """Reads <tool_call> blocks."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        super().__init__()

    def read(self) -> Steps[None]:
        """See SteppedParser."""
        reader = self.reader
        while (yield from reader.until((OPEN,), reader.content)):
            reader.hold()
            if (yield from reader.space()) == "{" and (
                yield from call_object(reader, self._tools, marked=True, ends=(CLOSE,))
            ):
                yield from reader.closing(CLOSE)
            else:
                reader.rewind()
                reader.content(OPEN)
