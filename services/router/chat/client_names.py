"""Errors in the words of the API that was asked: its requests become chats, whose fields have other names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from engine_core.types.errors import InvalidRequestError


@contextmanager
def client_names(names: Mapping[str, str]) -> Iterator[None]:
    """Errors about a field of chats name the client's field instead."""
    try:
        yield
    except InvalidRequestError as exc:
        field = renamed(exc.field, names)
        if field != exc.field:
            if exc.message.startswith(exc.field):
                exc.message = field + exc.message[len(exc.field) :]
            exc.field = field
        raise


def renamed(field: str, names: Mapping[str, str]) -> str:
    """The longest known beginning of a field counts: it ends where a part of the name does."""
    for name in sorted(names, key=len, reverse=True):
        if field == name or (field.startswith(name) and field[len(name)] in ".["):
            return names[name] + field[len(name) :]
    return field
