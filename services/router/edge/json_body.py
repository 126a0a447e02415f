"""JSON bodies: strict reading, and finding the field at fault when that fails."""

from __future__ import annotations

import json
import math
from typing import Any

import orjson

from engine_core.types.errors import InvalidRequestError


def parse_json(body: bytes) -> dict[str, Any]:
    """Reads a JSON object. Raises InvalidRequestError; names the field that holds invalid UTF-8, half a
    surrogate pair, NaN or Infinity."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as exc:
        name, what = _find_culprit(body)
        if what:
            raise InvalidRequestError(f"{name or 'body'}: {what}", field=name) from None
        raise InvalidRequestError(f"the body is not JSON: {exc}") from None
    if not isinstance(data, dict):
        raise InvalidRequestError("the body must be a JSON object")
    return data


class _NotJson:
    """Stands where NaN or Infinity stood."""

    def __init__(self, name: str) -> None:
        self.name = name


def _find_culprit(body: bytes) -> tuple[str, str]:
    """Reads again, leniently, to say which field is at fault; ("", "") when it is the syntax."""
    try:
        data = json.loads(body.decode("utf-8", "surrogateescape"), parse_constant=_NotJson, parse_int=float)
    except (ValueError, RecursionError):
        try:
            body.decode("utf-8")
        except UnicodeDecodeError as exc:
            return "", f"not valid UTF-8 at byte {exc.start}"
        return "", ""
    stack: list[tuple[str, Any]] = [("", data)]
    while stack:
        path, value = stack.pop()
        if isinstance(value, _NotJson):
            return path, f"{value.name} is not a JSON number"
        if isinstance(value, float) and not math.isfinite(value):
            return path, "is beyond what a number can be"
        if isinstance(value, str) and any("\ud800" <= c <= "\udfff" for c in value):
            return path, "holds bytes that are not UTF-8, or half a surrogate pair"
        if isinstance(value, dict):
            stack.extend((f"{path}.{k}" if path else str(k), v) for k, v in value.items())
        elif isinstance(value, list):
            stack.extend((f"{path}[{i}]", v) for i, v in enumerate(value))
    return "", ""


def short(value: Any) -> str:
    """The value as JSON, cut to 80 characters, for messages."""
    try:
        text = orjson.dumps(value).decode()
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
