"""Kimi K2. A call's id holds its name and counts the calls of the whole chat:

    <|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Oslo"}
    <|tool_call_end|><|tool_calls_section_end|>

without line breaks. The template writes ids as they are, so the client gets the model's own; one that the output has
twice is minted.
"""

from __future__ import annotations

import re

from services.router.parsers.call_object import Tools, stream_object
from services.router.parsers.reader import SteppedParser, Steps
from services.router.parsers.sections import read_sections

CALLS, CALLS_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
MARKS = (CALLS, CALLS_END, CALL, ARGUMENTS, CALL_END)
PREFIX = "functions."
_ID_CHAR = re.compile(r"[a-zA-Z0-9_.:-]")
_ID = re.compile(r"(?:functions\.)?([a-zA-Z0-9_.-]+?)(?::\d+)?")


class KimiK2Parser(SteppedParser):
    """Reads calls; a model that leaves out the outer marks is understood too."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._ids: set[str] = set()
        super().__init__()

    def read(self) -> Steps[None]:
        """See SteppedParser."""
        yield from read_sections(self.reader, (CALLS, CALLS_END), CALL, self._call)

    def _call(self) -> Steps[bool]:
        """One call behind its mark."""
        reader = self.reader
        yield from reader.space()
        call_id = yield from reader.matching(_ID_CHAR, 256)
        found = _ID.fullmatch(call_id)
        if found is None or not self._tools.has(found.group(1)):
            return False
        whole = ":" in call_id or (yield from reader.peek()) != ""
        yield from reader.space()
        if not (yield from reader.literal(ARGUMENTS)):
            return whole and reader.cut(found.group(1), marks=(ARGUMENTS,))
        if (yield from reader.space()) != "{":
            return reader.cut(found.group(1))
        fresh = call_id != found.group(1) and call_id not in self._ids
        self._ids.add(call_id)
        reader.begin(found.group(1), call_id if fresh else "")
        yield from stream_object(reader, (CALL_END, CALLS_END))
        yield from reader.closing(CALL_END)
        return True
