"""Breakers: what opens them, what closes them, and what they never hear of."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_core.types.errors import (
    CancelledSessionError,
    DeadlineError,
    FencedError,
    InternalError,
    InvalidRequestError,
    Leg,
    PdmeshError,
    PeerFailedError,
    QueueFullError,
    UnavailableError,
)
from services.router.routing.breaker import (
    FIRST_HOLD,
    LONGEST_HOLD,
    THRESHOLD,
    TRIAL_SECONDS,
    Breakers,
    BreakerState,
    Fault,
    faults_of,
)

P, D = 7, 9
CLOSED, OPEN, HALF_OPEN = BreakerState


def opened(at: float = 0.0) -> Breakers:
    breakers = Breakers()
    assert breakers.fault(Fault(D, no_doubt=True), at)
    return breakers


@pytest.mark.parametrize(
    ("failure", "faults"),
    [
        (PeerFailedError("x", leg=Leg.DECODE), (Fault(D),)),
        (PeerFailedError("x", leg=Leg.PREFILL), (Fault(P),)),
        (PeerFailedError("x", leg=Leg.TRANSFER, reason="LINK_DOWN"), (Fault((P, D)),)),
        (PeerFailedError("x", leg=Leg.TRANSFER, reason="KV_CORRUPT"), (Fault((P, D)),)),
        (UnavailableError("x", leg=Leg.TRANSFER, reason="QUARANTINE"), (Fault((P, D), no_doubt=True),)),
        (PeerFailedError("x", leg=Leg.DECODE, reason="CONNECT_FAILED"), (Fault(D, no_doubt=True),)),
        (PeerFailedError("x", leg=Leg.PREFILL, reason="CONNECT_FAILED"), (Fault((P, D), no_doubt=True), Fault(P))),
        (UnavailableError("x", leg=Leg.DECODE, reason="ENGINE_DIED"), (Fault(D, no_doubt=True),)),
        (UnavailableError("x", leg=Leg.PREFILL, reason="ENGINE_CRASHED"), (Fault(P, no_doubt=True),)),
        (DeadlineError("x", leg=Leg.DECODE, reason="TOKEN_STALL", retryable=True), (Fault(D),)),
        (InternalError("x", leg=Leg.DECODE), (Fault(D),)),
        # None of these is a worker's fault.
        (InvalidRequestError("x", leg=Leg.DECODE), ()),
        (QueueFullError("x", leg=Leg.PREFILL), ()),
        (FencedError("x", leg=Leg.DECODE, reason="INCARNATION_MISMATCH"), ()),
        (CancelledSessionError("x", leg=Leg.DECODE), ()),
        (DeadlineError("x", leg=Leg.DECODE), ()),
        (DeadlineError("x", leg=Leg.PREFILL, reason="QUEUE_TIMEOUT", retryable=True), ()),
        (UnavailableError("x", leg=Leg.DECODE, reason="DRAINING"), ()),
        (UnavailableError("x", leg=Leg.DECODE, reason="HANDOVER"), ()),
        (UnavailableError("x", leg=Leg.DECODE, reason="PREEMPTED"), ()),
        (UnavailableError("x", leg=Leg.PREFILL, reason="JOINING"), ()),
        (UnavailableError("x", leg=Leg.PREFILL, reason="PEER_UNKNOWN"), ()),
        (UnavailableError("x", leg=Leg.ROUTER, reason="NO_WORKER"), ()),
    ],
    ids=lambda value: f"{value.leg}-{value.reason}" if isinstance(value, PdmeshError) else "",
)
def test_who_is_blamed(failure: PdmeshError, faults: tuple[Fault, ...]) -> None:
    assert faults_of(failure, P, D) == faults


def test_a_worker_that_serves_alone_has_no_other_leg() -> None:
    assert faults_of(PeerFailedError("x", leg=Leg.PREFILL), 0, D) == ()
    assert faults_of(PeerFailedError("x", leg=Leg.DECODE), 0, D) == (Fault(D),)


def test_faults_in_a_row_open_it_and_a_success_between_them_does_not() -> None:
    breakers = Breakers()
    for _ in range(3):
        for _ in range(THRESHOLD - 1):
            assert not breakers.fault(Fault(D), 0.0)
        breakers.success(D)
    for _ in range(THRESHOLD - 1):
        breakers.fault(Fault(D), 0.0)
    assert breakers.fault(Fault(D), 0.0)
    assert breakers.state(D) is OPEN and breakers.blocked(0.0) == {D}
    assert breakers.state(P) is CLOSED


def test_it_closes_by_a_probe_on_probation() -> None:
    breakers = opened()
    assert breakers.tick(FIRST_HOLD - 0.01) == []
    assert breakers.tick(FIRST_HOLD) == [D]
    assert breakers.state(D) is HALF_OPEN
    breakers.probed(D, well=True, now=1.1)
    assert breakers.state(D) is CLOSED and breakers.blocked(1.1) == set()
    assert breakers.fault(Fault(D), 1.2), "on probation one fault is enough"
    assert breakers.tick(1.2 + FIRST_HOLD) == [], "and it holds for longer"
    assert breakers.tick(1.2 + 2 * FIRST_HOLD) == [D]
    breakers.probed(D, well=True, now=4.0)
    breakers.success(D)
    for _ in range(THRESHOLD - 1):
        assert not breakers.fault(Fault(D), 5.0)
    assert breakers.fault(Fault(D), 5.0)
    assert breakers.tick(5.0 + FIRST_HOLD) == [D], "a success made it forget"


def test_health_checks_that_fail_make_the_hold_longer_until_a_request_tries() -> None:
    breakers = opened()
    now, holds = 0.0, []
    for _ in range(3):
        began = now
        while not breakers.tick(now):
            now += 0.25
        holds.append(now - began)
        assert breakers.blocked(now) == {D}, "its health check is under way"
        breakers.probed(D, well=False, now=now)
    assert holds == [FIRST_HOLD, 2.0, 4.0]
    assert breakers.state(D) is HALF_OPEN and breakers.blocked(now) == set()
    breakers.begin_trials((D,), now)
    assert breakers.blocked(now) == {D}
    assert breakers.fault(Fault(D), now) and breakers.state(D) is OPEN
    assert breakers.tick(now + LONGEST_HOLD - 0.1) == [] and breakers.tick(now + LONGEST_HOLD) == [D]


def test_one_request_at_a_time_tries_a_pair() -> None:
    breakers, pair = Breakers(), (P, D)
    breakers.fault(Fault(pair, no_doubt=True), 0.0)
    breakers.tick(1.0)
    assert breakers.blocked(1.0) == set()
    breakers.begin_trials((D, P, pair), 1.0)
    assert breakers.blocked(1.1) == {pair}
    breakers.end_trials((D, P, pair))  # its client went away: nothing was learnt
    assert breakers.blocked(1.2) == set()
    breakers.begin_trials((pair,), 2.0)
    assert breakers.blocked(2.0 + TRIAL_SECONDS) == set(), "a trial that nobody reports on blocks nobody for ever"
    breakers.begin_trials((pair,), 8.0)
    assert breakers.success(pair)
    assert breakers.state(pair) is CLOSED and breakers.blocked(8.0) == set()


def test_a_failed_trial_opens_it_again() -> None:
    breakers, pair = Breakers(), (P, D)
    breakers.fault(Fault(pair, no_doubt=True), 0.0)
    breakers.tick(1.0)
    breakers.begin_trials((pair,), 1.0)
    assert breakers.fault(Fault(pair), 1.5)
    assert breakers.state(pair) is OPEN and breakers.tick(3.0) == [] and breakers.tick(3.5) == [pair]


def test_late_faults_of_an_open_one_change_nothing() -> None:
    breakers = opened()
    for _ in range(10):
        assert not breakers.fault(Fault(D, no_doubt=True), 0.9)
    assert breakers.tick(FIRST_HOLD) == [D]


def test_workers_that_are_gone_are_forgotten() -> None:
    breakers = opened()
    breakers.fault(Fault((P, D), no_doubt=True), 0.0)
    breakers.fault(Fault(P, no_doubt=True), 0.0)
    breakers.keep({P})
    assert breakers.blocked(0.0) == {P}


@given(
    st.lists(st.tuples(st.sampled_from(["fault", "sure", "success", "well", "ill", "begin", "end"]), st.floats(0, 3)))
)
def test_it_always_closes_again(script: list[tuple[str, float]]) -> None:
    """Whatever happened: once a worker is well again, its breaker is closed after one hold and a probe."""
    breakers, now = Breakers(), 0.0
    for what, wait in script:
        now += wait
        breakers.tick(now)
        match what:
            case "fault" | "sure":
                breakers.fault(Fault(D, what == "sure"), now)
            case "success":
                breakers.success(D)
            case "well" | "ill":
                breakers.probed(D, well=what == "well", now=now)
            case "begin":
                breakers.begin_trials((D,), now)
            case _:
                breakers.end_trials((D,))
    now += LONGEST_HOLD
    breakers.tick(now)
    breakers.probed(D, well=True, now=now)
    assert breakers.state(D) is CLOSED and breakers.blocked(now) == set()
