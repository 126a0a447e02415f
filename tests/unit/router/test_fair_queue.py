"""Shares of clients in the fair queue, whatever they send; items that give up."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.routing.fair_queue import FairQueue


class Item:
    def __init__(self, client: str, cost: float) -> None:
        self.client, self.cost = client, cost


def filled(*items: Item) -> FairQueue[Item]:
    queue: FairQueue[Item] = FairQueue()
    for item in items:
        queue.push(item, item.client, item.cost)
    return queue


def test_one_client_is_served_in_order() -> None:
    items = [Item("a", cost) for cost in (5, 1, 100, 1)]
    queue = filled(*items)
    assert [queue.pop() for _ in items] == items


def test_a_crowd_does_not_hold_up_one() -> None:
    crowd, one = [Item("crowd", 10) for _ in range(50)], Item("one", 10)
    queue = filled(*crowd, one)
    assert queue.ahead_of("other") == 2  # the crowd's first and "one": both have waited longer
    order = [queue.pop() for _ in range(51)]
    assert order.index(one) == 1


def test_shares_are_of_cost_and_not_of_count() -> None:
    queue = filled(*[Item("large", 100) for _ in range(20)], *[Item("small", 10) for _ in range(200)])
    served: Counter[str] = Counter()
    for _ in range(110):
        item = queue.pop()
        served[item.client] += int(item.cost)
    assert served == {"large": 1000, "small": 1000}


def test_idleness_is_not_saved_up() -> None:
    queue = filled(*[Item("busy", 10) for _ in range(10)])
    for _ in range(5):
        queue.pop()
    late = [Item("late", 10) for _ in range(5)]
    for item in late:
        queue.push(item, "late", item.cost)
    assert Counter(queue.pop().client for _ in range(6)) == {"busy": 3, "late": 3}


def test_who_gives_up_gives_the_share_back() -> None:
    first, second = Item("a", 1000), Item("a", 10)
    queue = filled(first, *[Item("b", 10) for _ in range(5)])
    assert queue.remove(first) and not queue.remove(first)
    queue.push(second, "a", 10)
    assert second in [queue.pop(), queue.pop()]
    assert queue.waiting("a") == 0


def test_what_may_not_be_pushed() -> None:
    item = Item("a", 1)
    queue = filled(item)
    with pytest.raises(ValueError):
        queue.push(item, "a", 1)
    with pytest.raises(ValueError):
        queue.push(Item("a", 0), "a", 0)
    queue.pop()
    with pytest.raises(IndexError):
        queue.pop()


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("push"), st.sampled_from("abc"), st.integers(1, 50)),
            st.tuples(st.just("pop"), st.just(""), st.just(0)),
            st.tuples(st.just("remove"), st.just(""), st.integers(0, 30)),
        ),
        max_size=120,
    )
)
def test_nobody_is_lost_and_shares_are_fair(moves: list[tuple[str, str, int]]) -> None:
    """Between two clients that both wait all the time, served costs never differ by more than two items' cost."""
    queue: FairQueue[Item] = FairQueue()
    there: list[Item] = []
    both: dict[tuple[str, str], dict[str, float]] = {}
    for move, client, number in moves:
        if move == "push":
            item = Item(client, number)
            queue.push(item, client, item.cost)
            there.append(item)
        elif move == "pop" and there:
            waiting = {i.client for i in there}
            item = queue.pop()
            there.remove(item)
            for pair in [p for p in both if not set(p) <= waiting]:
                del both[pair]
            for other in waiting - {item.client}:
                pair = (min(item.client, other), max(item.client, other))
                both.setdefault(pair, defaultdict(float))[item.client] += item.cost
                served = both[pair]
                assert abs(served[pair[0]] - served[pair[1]]) <= 2 * 50
        elif move == "remove" and number < len(there):
            item = there.pop(number)
            assert queue.remove(item)
            both.clear()
        assert len(queue) == len(there)
        assert {c: queue.waiting(c) for c in "abc"} == {c: sum(i.client == c for i in there) for c in "abc"}
    while there:
        there.remove(queue.pop())
