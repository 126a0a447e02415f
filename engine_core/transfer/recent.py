"""A dict that remembers the last so many keys."""

from __future__ import annotations

import collections
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(Generic[K, V]):
    """Bounded: setting a new key beyond `limit` forgets the key set longest ago."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items: collections.OrderedDict[K, V] = collections.OrderedDict()

    def __setitem__(self, key: K, value: V) -> None:
        self._items[key] = value
        self._items.move_to_end(key)
        if len(self._items) > self._limit:
            self._items.popitem(last=False)

    def __contains__(self, key: K) -> bool:
        return key in self._items

    def __len__(self) -> int:
        return len(self._items)

    def get(self, key: K) -> V | None:
        """The value, or None."""
        return self._items.get(key)

    def pop(self, key: K) -> V | None:
        """Forgets the key."""
        return self._items.pop(key, None)

    def values(self) -> list[V]:
        """Oldest first."""
        return list(self._items.values())
