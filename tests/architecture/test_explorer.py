"""The explorer over fixed seeds. A failing seed prints its trace; `run_seed(N, trace=True)`
replays it."""

from __future__ import annotations

import pytest

from tests.support.explorer import explore, record, run_seed

CHUNK = 500
CI_SEEDS = 3_000
SLOW_CHUNK = 5_000
SLOW_SEEDS = 100_000


@pytest.mark.parametrize("first", range(0, CI_SEEDS, CHUNK))
def test_every_interleaving_keeps_the_rules(first: int) -> None:
    failure = explore(range(first, first + CHUNK))
    assert failure is None, str(failure)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", range(CI_SEEDS, CI_SEEDS + SLOW_SEEDS, SLOW_CHUNK))
def test_a_hundred_thousand_interleavings_keep_the_rules(first: int) -> None:
    failure = explore(range(first, first + SLOW_CHUNK))
    assert failure is None, str(failure)


@pytest.mark.parametrize("seed", (3, 14, 159))
def test_a_seed_replays_exactly(seed: int) -> None:
    first, second = record(seed), record(seed)
    assert first == second
    assert len(first) > 20
    assert run_seed(seed) is None
