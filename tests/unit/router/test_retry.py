"""Counts, waits and the budget of new attempts."""

from __future__ import annotations

import random

import pytest

from engine_core.types.errors import FencedError, Leg, PdmeshError, PeerFailedError, QueueFullError, UnavailableError
from services.router.routing.retry import FIRST_WAIT, LONGEST_WAIT, Attempts, RetryBudget, backoff, charged

DIED = PeerFailedError("died", leg=Leg.DECODE)


def reason(name: str) -> PdmeshError:
    return UnavailableError("x", leg=Leg.DECODE, reason=name)


def test_attempts_count_in_a_row() -> None:
    attempts = Attempts(2)
    for new_tokens, spent in ((0, 1), (3, 0), (0, 1), (1, 0), (0, 1)):
        attempts.failed(DIED, new_tokens, open_stream=True)
        assert (attempts.spent, attempts.exhausted) == (spent, False)
    attempts.failed(DIED, 0, open_stream=True)
    assert attempts.exhausted


@pytest.mark.parametrize(
    ("failure", "closed", "opened"),
    [
        (DIED, 1, 1),
        (reason("HANDOVER"), 0, 0),
        (reason("PREEMPTED"), 0, 0),
        (reason("DRAINING"), 1, 0),
        (reason("CONNECT_FAILED"), 1, 0),
        (QueueFullError("full", leg=Leg.DECODE), 1, 0),
        (FencedError("another", leg=Leg.DECODE), 1, 0),
        (reason("ENGINE_CRASHED"), 1, 1),
    ],
)
def test_what_an_attempt_costs(failure: PdmeshError, closed: int, opened: int) -> None:
    for open_stream, cost in ((False, closed), (True, opened)):
        attempts = Attempts(9)
        attempts.failed(failure, 0, open_stream=open_stream)
        assert (attempts.spent, attempts.fruitless) == (cost, 1)


def test_waits_double_up_to_a_limit_and_vary() -> None:
    rng = random.Random(1)
    for n in (1, 2, 3, 6, 7, 50, 10_000):
        longest = min(FIRST_WAIT * 2.0 ** min(n - 1, 60), LONGEST_WAIT)
        waits = [backoff(n, rng) for _ in range(200)]
        assert longest / 2 <= min(waits) < 0.6 * longest and 0.9 * longest < max(waits) <= longest


def test_a_budget_bounds_what_retries_add() -> None:
    """1,000 requests a second for a minute, all failing: retries stay near a fifth of them, after the burst."""
    budget = RetryBudget(share=0.2, floor=10.0, burst=100.0)
    retried = 0
    for i in range(60_000):
        budget.request()
        retried += budget.take(i / 1000)
    assert 12_000 + 600 <= retried <= 12_000 + 600 + 100 + 1


def test_a_quiet_router_may_retry_its_few_requests() -> None:
    budget = RetryBudget(share=0.0, floor=10.0, burst=5.0)
    assert [budget.take(0.0) for _ in range(7)] == [True] * 5 + [False] * 2
    assert [budget.take(0.1), budget.take(0.1), budget.take(0.2)] == [True, False, True]
    assert budget.take(1e9) and budget.tokens == 4.0


@pytest.mark.parametrize("name", ["HANDOVER", "PREEMPTED", "DRAINING", "JOINING"])
def test_an_upgrade_costs_no_budget(name: str) -> None:
    assert not charged(reason(name))
    assert not charged(FencedError("another incarnation", leg=Leg.DECODE))
    assert charged(DIED) and charged(QueueFullError("full", leg=Leg.DECODE))
