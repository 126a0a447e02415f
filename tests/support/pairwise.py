"""Tables of test cases in which every two values of different axes meet at least once."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

Row = dict[str, Any]


def product(axes: Mapping[str, Sequence[Any]]) -> list[Row]:
    """All rows, in order."""
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def pairwise(axes: Mapping[str, Sequence[Any]]) -> list[Row]:
    """Few rows that cover all pairs: each time the row that covers most of what is left, the first of equals."""
    rows = product(axes)
    left = set().union(*(_pairs(row) for row in rows))
    chosen = []
    while left:
        best = max(rows, key=lambda row: len(_pairs(row) & left))
        left -= _pairs(best)
        chosen.append(best)
    return chosen


def row_id(row: Row) -> str:
    """A test id."""
    return "-".join(str(value) for value in row.values())


def _pairs(row: Row) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    return set(itertools.combinations(sorted(row.items(), key=lambda item: item[0]), 2))
