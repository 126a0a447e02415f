"""Pairwise tables: complete, short, always the same."""

from __future__ import annotations

import itertools

from tests.support.pairwise import pairwise, product, row_id

AXES = {"a": (1, 2, 3), "b": ("x", "y"), "c": (True, False), "d": ("p", "q"), "e": (0, 1)}


def test_every_two_values_meet() -> None:
    rows = pairwise(AXES)
    for one, two in itertools.combinations(AXES, 2):
        assert {(row[one], row[two]) for row in rows} == set(itertools.product(AXES[one], AXES[two]))


def test_the_table_is_short_and_deterministic() -> None:
    assert len(product(AXES)) == 48
    assert len(pairwise(AXES)) <= 8
    assert pairwise(AXES) == pairwise(AXES)
    assert row_id(product(AXES)[0]) == "1-x-True-p-0"
