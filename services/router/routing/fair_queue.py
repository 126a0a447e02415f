"""Who goes next when more wait than can run: start-time fair queueing between clients. Pure.

An item's start tag is the later of the queue's virtual time and its client's last finish tag; its finish
tag lies `cost` further on. The least start tag leaves first, and the virtual time follows it. So clients
that wait get equal shares of the served cost, whatever each of them sends, and one that was idle has saved
nothing up. (Goyal, Vin, Cheng: Start-Time Fair Queueing, SIGCOMM 1996.)
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Items with the client that they belong to and a cost above 0. Items are told apart by identity.

    `numbers` counts items in the order in which they come; queues that share it can tell whose waits longer.
    """

    def __init__(self, numbers: Iterator[int] | None = None) -> None:
        self._heap: list[tuple[float, int]] = []
        self._items: dict[int, tuple[T, str, float]] = {}
        self._keys: dict[int, int] = {}
        self._finish: dict[str, float] = {}
        self._waiting: Counter[str] = Counter()
        self._virtual = 0.0
        self._numbers = itertools.count(1) if numbers is None else numbers

    def __len__(self) -> int:
        return len(self._items)

    @property
    def longest_waiting(self) -> int:
        """Number of the item that came first of those that wait. Raises StopIteration when nobody does."""
        return next(iter(self._items))

    def waiting(self, client: str) -> int:
        """Items of a client."""
        return self._waiting[client]

    def push(self, item: T, client: str, cost: float) -> None:
        """Adds an item. Raises ValueError when it is there already or its cost is not above 0."""
        if cost <= 0 or id(item) in self._keys:
            raise ValueError("an item waits once, and costs something")
        start = self._tag(client)
        self._finish[client] = start + cost
        number = next(self._numbers)
        self._items[number] = (item, client, cost)
        self._keys[id(item)] = number
        self._waiting[client] += 1
        heapq.heappush(self._heap, (start, number))

    def peek(self) -> T | None:
        """The item whose turn it is, or None."""
        self._skip_removed()
        return self._items[self._heap[0][1]][0] if self._heap else None

    def pop(self) -> T:
        """Takes that item out. Raises IndexError when nobody waits."""
        self._skip_removed()
        start, key = heapq.heappop(self._heap)
        self._virtual = max(self._virtual, start)
        item, client, _ = self._items.pop(key)
        self._gone(item, client)
        return item

    def remove(self, item: T) -> bool:
        """Takes an item out that gives up; its share goes back to its client. False when it isn't there."""
        key = self._keys.get(id(item))
        if key is None:
            return False
        _, client, cost = self._items.pop(key)
        if client in self._finish:
            self._finish[client] = max(self._virtual, self._finish[client] - cost)
        self._gone(item, client)
        return True

    def ahead_of(self, client: str) -> int:
        """How many items would leave before a new one of this client."""
        tag = self._tag(client)
        return sum(1 for start, key in self._heap if key in self._items and start <= tag)

    def _tag(self, client: str) -> float:
        return max(self._virtual, self._finish.get(client, 0.0))

    def _gone(self, item: T, client: str) -> None:
        del self._keys[id(item)]
        self._waiting[client] -= 1
        if not self._waiting[client]:
            del self._waiting[client]
        if not self._items:  # all are equal again
            self._heap.clear()
            self._finish.clear()
            self._virtual = 0.0
        elif len(self._finish) > 2 * len(self._waiting) + 64:  # clients that left long ago
            self._finish = {c: f for c, f in self._finish.items() if c in self._waiting or f > self._virtual}

    def _skip_removed(self) -> None:
        while self._heap and self._heap[0][1] not in self._items:
            heapq.heappop(self._heap)
