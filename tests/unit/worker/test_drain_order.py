"""Drains by a virtual clock."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engine_core.types.request import Role
from services.worker.drain import HANDOVER_GRACE, Drain, DrainOrder, Verdict


def ordered(at: float = 0.0, **order: Any) -> Drain:
    drain = Drain()
    drain.give(DrainOrder(**order), at)
    return drain


def look(drain: Drain, now: float, streams: int = 1, *, quiet: bool = False, last_pair: bool = False) -> Verdict:
    return drain.look(now, streams=streams, quiet=quiet, last_pair=last_pair)


def test_without_an_order_nothing_happens() -> None:
    drain = Drain()
    assert look(drain, 5.0, 0, quiet=True) is Verdict.WAIT
    assert (drain.note, drain.done, drain.order) == ("", False, None)


def test_without_a_limit_it_waits_until_all_is_quiet() -> None:
    drain = ordered()
    assert look(drain, 1e9, 3) is Verdict.WAIT and drain.note == "waits for 3 streams"
    assert look(drain, 1e9, 0) is Verdict.WAIT and drain.note == "waits for the engine's last sessions"
    assert look(drain, 1e9, 0, quiet=True) is Verdict.DONE and drain.done and drain.note == "drained"


def test_at_the_limit_it_hands_over_and_gives_that_a_moment() -> None:
    drain = ordered(at=10.0, limit=2.0, stop=True)
    assert look(drain, 11.0) is Verdict.WAIT and drain.note == "waits for 1 streams, at most 1 s"
    assert look(drain, 12.0) is Verdict.HAND_OVER
    assert look(drain, 12.1, 0) is Verdict.WAIT  # the engine still has something in flight
    assert look(drain, 12.0 + HANDOVER_GRACE, 0) is Verdict.DONE
    assert "no peer has proved quiet" in drain.note


def test_who_stays_waits_for_the_proof_of_quiet() -> None:
    drain = ordered(limit=0.0)
    assert look(drain, 0.0) is Verdict.HAND_OVER
    assert look(drain, 1e6, 0) is Verdict.WAIT
    assert look(drain, 1e6, 0, quiet=True) is Verdict.DONE


def test_the_last_pair_waits_unless_it_is_forced_or_somebody_comes() -> None:
    drain = ordered(limit=0.0)
    assert look(drain, 50.0, last_pair=True) is Verdict.WAIT and "force hands over" in drain.note
    assert look(drain, 51.0, last_pair=False) is Verdict.HAND_OVER
    assert look(ordered(limit=0.0, force=True), 50.0, last_pair=True) is Verdict.HAND_OVER


def test_the_last_order_counts_but_a_stop_stays_a_stop() -> None:
    drain = ordered(limit=0.0, role=Role.PREFILL)
    drain.give(DrainOrder(limit=5.0), 1.0)
    assert drain.order == DrainOrder(limit=5.0) and look(drain, 2.0) is Verdict.WAIT
    assert look(drain, 6.0) is Verdict.HAND_OVER
    drain.give(DrainOrder(limit=1.0, stop=True), 7.0)
    drain.give(DrainOrder(limit=3.0, role=Role.DECODE), 8.0)
    assert drain.order == DrainOrder(limit=3.0, stop=True)
    assert look(drain, 10.9) is Verdict.WAIT and look(drain, 11.0) is Verdict.HAND_OVER


@given(
    st.one_of(st.none(), st.floats(0, 100)), st.booleans(), st.booleans(),
    st.lists(st.tuples(st.floats(0, 30), st.integers(0, 3), st.booleans()), max_size=20),
)  # fmt: skip
def test_streams_are_handed_over_only_when_the_order_allows_it(
    limit: float | None, force: bool, stop: bool, looks: list[tuple[float, int, bool]]
) -> None:
    drain, now = ordered(limit=limit, force=force, stop=stop), 0.0
    for step, streams, last_pair in looks:
        now += step
        verdict = look(drain, now, streams, quiet=False, last_pair=last_pair)
        if verdict is Verdict.HAND_OVER:
            assert limit is not None and now >= limit and streams and (force or not last_pair)
        if verdict is Verdict.DONE:
            assert stop and limit is not None and now >= limit + HANDOVER_GRACE
