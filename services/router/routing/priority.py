"""What a request's `priority` does: lower goes earlier, 0 says nothing.

In the router's queue the most urgent class that waits goes first, and clients share its turns fairly. Nobody
starves: while somebody less urgent waits, one turn in eight is theirs, and goes to the class of the one that has
waited longest. So more urgent requests can never slow the others to less than an eighth of the pace.

In the engines a step of priority counts like 2.5 seconds of age, and never for more than 25. All their queues, and whom
they preempt, follow one number per request, its arrival; the rules that keep engines from waiting for each other ask no
more of it than that it is fixed once, outlives every attempt, and is the same to all workers. So the router moves the
number, and no worker knows of priorities. Before a request can come only those with a lesser number, and they end:
who comes 25 seconds later (50, where clients may go below 0) has a greater one. Ordering by priority itself would let
an unending stream of urgent requests keep another one without blocks, or preempt it again and again. Fifty seconds
are less than a request may wait in an engine (queue_timeout).
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from typing import Generic, TypeVar

from services.router.routing.fair_queue import FairQueue

T = TypeVar("T")

TURNS_FOR_ONE = 8
"""Of so many turns in a row, all taken while somebody less urgent waits, one is theirs."""
STEP_MS = 2_500
MOST_MS = 25_000


def order_ms(arrival_ms: int, priority: int) -> int:
    """What orders a request in the engines' queues: its arrival in Unix milliseconds, moved by its priority."""
    return max(1, arrival_ms + min(max(priority * STEP_MS, -MOST_MS), MOST_MS))


class PriorityQueue(Generic[T]):
    """A fair queue of clients for each priority. Items are told apart by identity. Pure."""

    def __init__(self) -> None:
        self._classes: dict[int, FairQueue[T]] = {}
        self._order: list[int] = []
        """Priorities of those that wait, the most urgent first."""
        self._class_of: dict[int, int] = {}
        self._numbers = itertools.count(1)
        self._passed = 0
        """Turns in a row that passed somebody less urgent by."""

    def __len__(self) -> int:
        return len(self._class_of)

    def push(self, item: T, client: str, cost: float, priority: int = 0) -> None:
        """Adds an item. Raises ValueError when it is there already or its cost is not above 0."""
        if id(item) in self._class_of:
            raise ValueError("an item waits once")
        queue = self._classes.get(priority) or FairQueue(self._numbers)
        queue.push(item, client, cost)
        if priority not in self._classes:
            self._classes[priority] = queue
            insort(self._order, priority)
        self._class_of[id(item)] = priority

    def peek(self) -> T | None:
        """The item whose turn it is, or None."""
        return self._classes[self._next()].peek() if self._order else None

    def pop(self) -> T:
        """Takes that item out. Raises IndexError when nobody waits."""
        if not self._order:
            raise IndexError("nobody waits")
        priority = self._next()
        self._passed = self._passed + 1 if priority == self._order[0] < self._order[-1] else 0
        item = self._classes[priority].pop()
        self._gone(item, priority)
        return item

    def remove(self, item: T) -> bool:
        """Takes an item out that gives up; its share goes back to its client. False when it isn't there."""
        priority = self._class_of.get(id(item))
        if priority is None:
            return False
        self._classes[priority].remove(item)
        self._gone(item, priority)
        return True

    def ahead_of(self, client: str, priority: int = 0) -> int:
        """About how many items would leave before a new one of this client, if no more came."""
        own = self._classes[priority].ahead_of(client) if priority in self._classes else 0
        above = sum(len(self._classes[p]) for p in self._order[: bisect_left(self._order, priority)])
        if not above:
            return own
        less_urgent = len(self) - len(self._classes[self._order[0]])
        return min(above + own, TURNS_FOR_ONE * (less_urgent + 1) - 1)

    def _next(self) -> int:
        first, *others = self._order
        if not others or self._passed < TURNS_FOR_ONE - 1:
            return first
        return min(others, key=lambda p: self._classes[p].longest_waiting)

    def _gone(self, item: T, priority: int) -> None:
        del self._class_of[id(item)]
        if not len(self._classes[priority]):
            del self._classes[priority]
            self._order.remove(priority)
