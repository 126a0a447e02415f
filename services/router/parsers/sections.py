"""Calls between marks of their own, which stand between outer marks, as DeepSeek and Kimi write them."""

from __future__ import annotations

from collections.abc import Callable

from services.router.parsers.reader import Reader, Steps


def read_sections(reader: Reader, outer: tuple[str, str], mark: str, call: Callable[[], Steps[bool]]) -> Steps[None]:
    """Reads a whole output. `call` reads one call behind its `mark`; False when it is none. A model that leaves out
    the outer marks is understood too; what turns out to be no call is content."""
    begin, end = outer
    while found := (yield from reader.until((begin, mark), reader.content)):
        reader.hold()
        if found == begin:
            yield from reader.space()
        begun = found == mark or (yield from reader.literal(mark))
        if not begun or not (yield from call()):
            reader.rewind()
            reader.content(found)
            continue
        while True:
            reader.hold()
            yield from reader.space()
            if not (yield from reader.literal(mark)) or not (yield from call()):
                reader.rewind()
                break
        yield from reader.closing(end)
