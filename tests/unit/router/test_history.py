"""The history of a router: percentiles from buckets, seconds that are closed and forgotten."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from services.router.routing.history import WINDOW_SECONDS, History, bucket_of, middle_of, percentile

LATENCIES = st.floats(1e-4, 600.0)


@given(LATENCIES)
def test_a_bucket_is_at_most_a_twelfth_off(seconds: float) -> None:
    assert 1 / 1.085 <= middle_of(bucket_of(seconds)) / seconds <= 1.085


@given(st.lists(LATENCIES, min_size=1, max_size=200), st.sampled_from([0.5, 0.95, 1.0]))
def test_percentiles_are_those_of_the_values(values: list[float], share: float) -> None:
    counts: dict[int, int] = {}
    for value in values:
        counts[bucket_of(value)] = counts.get(bucket_of(value), 0) + 1
    exact = sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
    found = percentile(counts, share)
    assert found is not None and 1 / 1.085 <= found / exact <= 1.085


def test_without_values_there_is_no_percentile() -> None:
    assert percentile({}, 0.5) is None
    second = History().tick(10.0, 0, 0)
    assert (second.ttft_p50, second.itl_p95, second.tokens, second.requests) == (None, None, 0, 0)


def test_a_second_counts_what_happened_in_it() -> None:
    history = History()
    history.first_token(0.5, 2)
    history.tokens(0.02, 3)
    for how in ("ok", "cancelled", "invalid", "error", "rejected"):
        history.end(how)
    second = history.tick(10.0, in_flight=4, queued=1)
    assert (second.tokens, second.requests, second.errors) == (5, 5, 2)
    assert (second.in_flight, second.queued, second.time) == (4, 1, 10.0)
    assert second.ttft_p50 is not None and abs(second.ttft_p50 - 0.5) < 0.05
    assert second.itl_p95 is not None and abs(second.itl_p95 - 0.02) < 0.002
    after = history.tick(11.0, 0, 0)
    assert (after.tokens, after.requests) == (0, 0)


def test_latencies_are_of_the_last_seconds() -> None:
    history = History()
    history.first_token(1.0)
    for at in range(WINDOW_SECONDS):
        assert history.tick(float(at), 0, 0).ttft_p50 is not None
    assert history.tick(99.0, 0, 0).ttft_p50 is None


def test_only_what_is_new_is_told_and_the_old_is_forgotten() -> None:
    history = History(kept=3)
    for at in range(5):
        history.tokens(0.01, at)
        history.tick(float(at), 0, 0)
    assert history.since(0.0)["time"] == [2.0, 3.0, 4.0]
    assert history.since(3.0) == {
        **{name: [None] for name in ("ttft_p50", "ttft_p95")},
        **{name: history.since(3.0)[name] for name in ("itl_p50", "itl_p95")},
        "time": [4.0], "tokens": [4], "requests": [0], "errors": [0], "in_flight": [0], "queued": [0],
    }  # fmt: skip
    assert history.since(4.0)["time"] == []
