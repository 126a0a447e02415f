"""Protobuf messages with nonsense in them, for hypothesis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.protobuf.message import Message
from hypothesis import strategies as st

INTEGERS = (0, 1, -1, 2, 15, 16, 17, 325, 4096, 2**31 - 1, -(2**31), 2**32 - 1, 2**63 - 1, -(2**63))
FLOATS = (0.0, -1.0, 0.5, 1e-45, 3e38, float("nan"), float("inf"), float("-inf"))


@st.composite
def spoilt(draw: st.DrawFn, good: Message, kept: Sequence[str]) -> Message:
    """A copy of which some fields, at any depth, hold other values of their type, or nothing. Fields named in `kept`
    stay as they are."""
    message = type(good)()
    message.CopyFrom(good)
    for _ in range(draw(st.integers(1, 3))):
        _spoil(draw, message, kept)
    return message


def _spoil(draw: st.DrawFn, message: Message, kept: Sequence[str]) -> None:
    fields = [f for f in message.DESCRIPTOR.fields if f.name not in kept]
    if not fields:
        return
    field = draw(st.sampled_from(fields))
    map_field = field.message_type is not None and field.message_type.GetOptions().map_entry
    if map_field or draw(st.integers(0, 5)) == 0:
        message.ClearField(field.name)
    elif field.is_repeated:
        items = getattr(message, field.name)
        if field.message_type is not None:
            _spoil(draw, items[0] if items and draw(st.booleans()) else items.add(), kept)
        else:
            items.extend([draw(_values(field))] * draw(st.sampled_from((1, 2, 1000))))
    elif field.message_type is not None:
        _spoil(draw, getattr(message, field.name), kept)
    else:
        setattr(message, field.name, draw(_values(field)))


def _values(field: Any) -> st.SearchStrategy[Any]:
    kinds = {
        field.CPPTYPE_DOUBLE: st.sampled_from(FLOATS),
        field.CPPTYPE_FLOAT: st.sampled_from(FLOATS),
        field.CPPTYPE_BOOL: st.booleans(),
    }
    if field.cpp_type == field.CPPTYPE_STRING:
        if field.type == field.TYPE_BYTES:
            return st.binary(max_size=300)
        return st.one_of(st.text(max_size=20), st.sampled_from(["x" * 600, "\0", "é" * 300]))
    if field.cpp_type in kinds:
        return kinds[field.cpp_type]
    low, high = {
        field.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
        field.CPPTYPE_UINT32: (0, 2**32 - 1),
        field.CPPTYPE_UINT64: (0, 2**64 - 1),
    }.get(field.cpp_type, (-(2**31), 2**31 - 1))
    return st.sampled_from([i for i in INTEGERS if low <= i <= high])
