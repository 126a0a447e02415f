"""DeepSeek V3 and R1, and the shorter form from V3.1 on; line breaks inside the first are part of it.

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
```json
{"city": "Oslo"}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Oslo"}<｜tool▁call▁end｜>…
"""

from __future__ import annotations

import re

from services.router.parsers.call_object import Tools, stream_object
from services.router.parsers.reader import SteppedParser, Steps
from services.router.parsers.sections import read_sections

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEP = "<｜tool▁sep｜>"
_FENCE = "```"
_NAME_CHAR = re.compile(r"[a-zA-Z0-9_.-]")


class DeepSeekV3Parser(SteppedParser):
    """Reads both forms; a model that leaves out the outer marks is understood too."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        super().__init__()

    def read(self) -> Steps[None]:
        """See SteppedParser."""
        yield from read_sections(self.reader, (CALLS, CALLS_END), CALL, self._call)

    def _call(self) -> Steps[bool]:
        """One call behind its mark."""
        reader = self.reader
        yield from reader.space()
        name = yield from reader.matching(_NAME_CHAR, 256)
        if not (yield from reader.literal(SEP)):
            whole = self._tools.has(name) and name != "function" and (yield from reader.peek()) != ""
            return whole and reader.cut(name, marks=(SEP,))
        fenced = False
        if name == "function" and (yield from reader.space()) != "{":
            name = yield from reader.matching(_NAME_CHAR, 256)
            if not (yield from reader.peek()):
                return False
            yield from reader.space()
            fenced = yield from reader.literal(_FENCE)
            if fenced:
                yield from reader.literal("json")
        if not self._tools.has(name):
            return False
        if (yield from reader.space()) != "{":
            return reader.cut(name, marks=(_FENCE, "json"))
        reader.begin(name)
        yield from stream_object(reader, (CALL_END, CALLS_END))
        reader.hold()
        yield from reader.space()
        if fenced and (yield from reader.literal(_FENCE)):
            yield from reader.space()
        if (yield from reader.literal(CALL_END)):
            reader.release()
        else:
            reader.rewind()
        return True
