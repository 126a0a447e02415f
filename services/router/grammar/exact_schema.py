"""JSON schemas as llguidance follows them to the letter.

Two things it would follow in another sense than the schema's, so that an output would parse and not validate:

- A class of characters that holds every control character also lets `\\"` and `\\\\` into the JSON, whether or not it
  holds the quote and the backslash: `[^"]` among them. Without one control character the class is what it says, so
  classes lose NUL.
- Bounds of integers are kept within 64 bits: a minimum above that would be a smaller one. Such bounds are refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from engine_core.types.errors import InvalidRequestError

_VALUES = frozenset({"const", "default", "enum", "example", "examples"})
"""Keywords that hold values, not schemas."""
_NAMED = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
"""Keywords that hold schemas by names, which may be those of keywords."""
_LEAST, _MOST = -(2**63), 2**63 - 1
_SET = re.compile(r"\\[pP](\{[^}]*\}|.)|\\.|\[", re.DOTALL)
_WITHOUT_NUL = r"--\x00]"
_MAY_HOLD_CONTROLS = re.compile(r"\[\^|[\\\x00-\x1f]|.\[", re.DOTALL)


def exact_schema(schema: Mapping[str, Any], field: str) -> dict[str, Any]:
    """The schema with such patterns written anew. Raises InvalidRequestError naming `field`."""
    try:
        return dict(_exact(schema, field))
    except RecursionError:
        raise InvalidRequestError(f"{field}: is nested too deeply", field=field) from None


def _exact(schema: Any, field: str) -> Any:
    if isinstance(schema, list):
        return [_exact(part, field) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    _check_bounds(schema, field)
    return {key: _keyword(key, value, field) for key, value in schema.items()}


def _keyword(key: str, value: Any, field: str) -> Any:
    if key in _VALUES:
        return value
    if key == "pattern" and isinstance(value, str):
        return exact_pattern(value)
    if key in _NAMED and isinstance(value, Mapping):
        patterns = key == "patternProperties"
        return {exact_pattern(name) if patterns else name: _exact(v, field) for name, v in value.items()}
    return _exact(value, field)


def _check_bounds(schema: Mapping[str, Any], field: str) -> None:
    for name in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        bound = schema.get(name)
        if isinstance(bound, bool) or not isinstance(bound, int | float):
            continue
        if bound > _MOST if name.endswith("inimum") else bound < _LEAST:
            raise InvalidRequestError(f"{field}: {name} {bound} is beyond 64 bits", field=field)


def exact_pattern(pattern: str) -> str:
    """The pattern with NUL taken out of classes that may hold all control characters."""
    written, at = "", 0
    while (found := _SET.search(pattern, at)) is not None:
        end = _class_end(pattern, found.start()) if found.group() == "[" else found.end()
        if end < 0:
            break  # it is never closed: whoever compiles it says so
        part = pattern[found.start() : end]
        may = found.group(1) is not None or (found.group() == "[" and _MAY_HOLD_CONTROLS.search(part))
        if may and not part.endswith(_WITHOUT_NUL):
            part = f"[{part}{_WITHOUT_NUL}"
        written += pattern[at : found.start()] + part
        at = end
    return written + pattern[at:]


def _class_end(pattern: str, at: int) -> int:
    """Behind the class that begins at `at`, by the rules of Rust's regex: classes nest, and a bracket that closes at
    the very beginning is itself; -1 when nothing closes it."""
    depth = 0
    while at < len(pattern):
        char = pattern[at]
        at += 2 if char == "\\" else 1
        if char == "[":
            depth += 1
            at += pattern.startswith("^", at)
            at += pattern.startswith("]", at)
        elif char == "]":
            depth -= 1
            if not depth:
                return at
    return -1
