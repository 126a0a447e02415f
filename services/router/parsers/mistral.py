"""Mistral's two forms.

    [TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Oslo"}}, …]
    [TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]…      (tokenizers from v11 on)

In the second, [CALL_ID]… may stand before [ARGS], and [ARGS] may be missing. Thoughts are [THINK]…[/THINK].
"""

from __future__ import annotations

import re

from services.router.parsers.call_object import Tools, call_object, stream_object
from services.router.parsers.reader import SteppedParser, Steps

CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_NAME_CHAR = re.compile(r"[a-zA-Z0-9_.-]")
_ID_CHAR = re.compile(r"[a-zA-Z0-9_-]")


class MistralParser(SteppedParser):
    """Reads both forms."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        super().__init__()

    def read(self) -> Steps[None]:
        """See SteppedParser."""
        reader = self.reader
        while (yield from reader.until((CALLS,), reader.content)):
            reader.hold()
            char = yield from reader.space()
            if char == "[":
                read = yield from self._array()
            elif char == "{":
                read = yield from call_object(reader, self._tools, marked=True, ends=(CALLS,))
            else:
                read = yield from self._named()
            if not read:
                reader.rewind()
                reader.content(CALLS)

    def _array(self) -> Steps[bool]:
        reader = self.reader
        reader.at += 1
        yield from reader.space()
        if not (yield from call_object(reader, self._tools, marked=True, ends=(CALLS,))):
            return False
        while True:
            reader.hold()
            char = yield from reader.space()
            reader.at += 1 if char else 0
            if char == "]":
                reader.release()
                return True
            if char == ",":
                yield from reader.space()
            if char != "," or not (yield from call_object(reader, self._tools, marked=True, ends=(CALLS,))):
                reader.rewind()
                return True

    def _named(self) -> Steps[bool]:
        reader = self.reader
        name = yield from reader.matching(_NAME_CHAR, 256)
        if not self._tools.has(name) or not (yield from reader.peek()):
            return False
        mark, call_id = (yield from reader.one_of((CALL_ID, ARGS))), ""
        if mark == CALL_ID:
            call_id = yield from reader.matching(_ID_CHAR, 256)
            yield from reader.literal(ARGS)
        if (yield from reader.space()) != "{":
            return reader.cut(name, call_id, (CALL_ID, ARGS))
        reader.begin(name, call_id)
        yield from stream_object(reader, (CALLS,))
        return True
