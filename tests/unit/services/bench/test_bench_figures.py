"""Figures of a level: they mean what those of benchmarks/bench_openai.py mean, and nothing failed hides in them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from benchmarks import bench_openai
from services.bench.outcome import Failure, Objectives, Outcome, percentile
from services.bench.report import Rejections, TokenCheck
from services.bench.summary import in_flight, spread, summarize, timeline


def outcome(index: int = 0, due: float = 0.0, **given: Any) -> Outcome:
    """Sent when due, token 1 after 0.5 s, then four gaps of 0.1 s."""
    whole = {
        "sent": due, "first": due + 0.5, "gaps": (0.1,) * 4, "end": due + 1.0, "prompt_asked": 10, "output_asked": 5,
        "prompt_tokens": 10, "output_tokens": 5, "cached_tokens": 0, "status": 200,
    }  # fmt: skip
    return Outcome(index=index, request_id=f"r{index}", due=due, **(whole | given))


def failed(failure: Failure, due: float = 0.0, **given: Any) -> Outcome:
    return Outcome(index=9, request_id="f", due=due, sent=due, end=due + 0.25, failure=failure, **given)


def test_percentiles_and_spreads_are_those_of_the_other_load_client() -> None:
    rng = random.Random(1)
    for count in (1, 2, 3, 10, 101, 500):
        values = [rng.lognormvariate(0, 1) for _ in range(count)]
        for q in (0, 50, 90, 99, 100):
            assert percentile(values, q) == pytest.approx(bench_openai.percentile(values, q))
        ours, theirs = spread(values), bench_openai.spread(values)
        assert [ours.p50, ours.p90, ours.p99, ours.mean] == pytest.approx([theirs[n] for n in theirs], abs=0.002)
        assert ours.curve[50] == ours.p50 and ours.curve[100] == ours.max and list(ours.curve) == sorted(ours.curve)
    assert percentile([], 50) is None and spread([]).p50 is None and spread([]).curve == ()


def test_times_count_from_when_a_request_was_due() -> None:
    late = outcome(due=1.0, sent=3.0, first=3.5, end=4.0)
    assert (late.ttft, late.latency, late.tokens, late.chunks) == (2.5, 3.0, 5, 5)
    assert late.tpot == pytest.approx(0.1)
    level = summarize("x", 1, [late], wall=4.0, objectives=Objectives())
    assert (level.ttft_ms.p50, level.e2e_ms.p50, level.send_lag_ms.max) == (2500.0, 3000.0, 2000.0)


def test_a_level_counts_throughput_over_its_wall_time_and_keeps_failures_out() -> None:
    outcomes = [
        outcome(0),
        outcome(1, due=1.0),
        failed(Failure.SERVER_ERROR, due=2.0, status=503, detail="nobody"),
        failed(Failure.TIMEOUT, due=2.0, detail="late"),
        failed(Failure.REJECTED, due=2.0, status=429, retry_afters=(2.0,)),
    ]
    level = summarize("x", 2, outcomes, wall=4.0, objectives=Objectives(), client_cpu=0.2)
    assert (level.requests, level.completed, level.errors) == (5, 2, 2)
    assert level.error_kinds == {"server_error_503": 1, "timeout": 1}
    assert level.error_examples == {"server_error_503": "nobody", "timeout": "late"}
    assert (level.requests_per_s, level.output_tokens_per_s, level.total_tokens_per_s) == (0.5, 2.5, 7.5)
    assert (level.ttft_ms.count, level.ttft_ms.p99, level.itl_ms.count) == (2, 500.0, 8)
    assert (level.prompt_tokens_mean, level.output_tokens_mean) == (10.0, 5.0)
    assert level.goodput is None and level.client_cpu == 0.2
    assert [slow.request_id for slow in level.slowest] == ["r0", "r1"]


def test_rejections_are_counted_with_what_they_were_told() -> None:
    outcomes = [
        outcome(0, retry_afters=(1.0, 3.0)),
        failed(Failure.REJECTED, retry_afters=(2.0,)),
        failed(Failure.REJECTED, retry_afters=(None,)),
    ]
    level = summarize("x", 1, outcomes, wall=1.0, objectives=Objectives())
    assert level.rejections == Rejections(4, 2, 1, 1.0, 2.0, 3.0)
    assert (level.errors, level.error_kinds) == (0, {})


def test_goodput_is_of_all_requests_and_names_what_was_missed() -> None:
    outcomes = [
        outcome(0),
        outcome(1, first=0.9),
        outcome(2, gaps=(0.1, 0.1, 0.1, 0.4)),
        outcome(3, end=9.0),
        failed(Failure.CONNECTION),
    ]
    limits = Objectives(ttft_ms=600, itl_ms=200, e2e_ms=2000)
    level = summarize("x", 1, outcomes, wall=10.0, objectives=limits)
    assert level.goodput is not None
    assert (level.goodput.requests, level.goodput.share) == (1, 0.2)
    assert (level.goodput.requests_per_s, level.goodput.output_tokens_per_s) == (0.1, 0.5)
    assert level.goodput.missed == {"ttft": 1, "itl": 1, "e2e": 1}
    by_mean = Objectives(tpot_ms=150)
    assert [by_mean.met(o) for o in outcomes] == [True, True, False, True, False]
    assert limits.missed(outcomes[4]) == ("ttft", "itl", "e2e")


def test_an_objective_is_kept_at_its_limit_and_asks_nothing_of_one_token() -> None:
    assert Objectives(ttft_ms=500).met(outcome())
    assert not Objectives(ttft_ms=499.9).met(outcome())
    single = outcome(gaps=(), output_tokens=1)
    assert single.tpot is None and Objectives(itl_ms=1, tpot_ms=1).met(single)


def test_token_counts_are_checked_against_what_was_asked_for() -> None:
    whole = [
        outcome(0),
        outcome(1, prompt_tokens=13),
        outcome(2, output_tokens=4, gaps=(0.1,) * 3),
        outcome(3, output_tokens=6),
        outcome(4, output_tokens=5, gaps=(0.1,) * 9),
        outcome(5, output_tokens=None, prompt_tokens=None),
    ]
    level = summarize("x", 1, whole, wall=1.0, objectives=Objectives())
    assert level.tokens == TokenCheck(5, 1, 4, 3, 3, 1, 1, 1)
    assert whole[5].tokens == 5


def test_the_share_of_cached_prompt_tokens() -> None:
    outcomes = [outcome(0, cached_tokens=5), outcome(1, cached_tokens=0), outcome(2, cached_tokens=None)]
    assert summarize("x", 1, outcomes, wall=1.0, objectives=Objectives()).cached_share == 0.25
    assert summarize("x", 1, outcomes[2:], wall=1.0, objectives=Objectives()).cached_share is None


def test_requests_in_flight_from_due_to_end() -> None:
    mean, most = in_flight([outcome(0), outcome(1, due=0.5), outcome(2, due=2.0)], 3.0)
    assert (mean, most) == (1.0, 2)


@pytest.mark.parametrize("count", (1, 7, 90))
def test_the_course_of_a_level_adds_up_to_its_figures(count: int) -> None:
    rng = random.Random(count)
    outcomes = [outcome(i, due=rng.uniform(0, 20)) for i in range(count)]
    outcomes.append(failed(Failure.REJECTED, due=3.0))
    wall = max(o.end for o in outcomes)
    moments = timeline(outcomes, wall)
    edges = [*(m.at_s for m in moments), wall]
    spans = [b - a for a, b in zip(edges, edges[1:], strict=False)]
    assert len(moments) <= 61 and sum(m.completed for m in moments) == count and sum(m.failed for m in moments) == 1
    tokens = sum(m.output_tokens_per_s * s for m, s in zip(moments, spans, strict=True))
    busy = sum(m.in_flight * s for m, s in zip(moments, spans, strict=True))
    assert tokens == pytest.approx(5 * count, rel=0.02) and busy == pytest.approx(count + 0.25, rel=0.05)


def test_a_sliver_at_the_end_is_no_bin_of_its_own() -> None:
    moments = timeline([outcome(0), outcome(1, due=5.01)], 6.01)
    assert [m.at_s for m in moments] == [round(i * 0.2, 3) for i in range(30)]
    assert max(m.output_tokens_per_s for m in moments) <= 2 / 0.1


def test_a_level_in_which_nothing_came_back_has_no_percentiles() -> None:
    level = summarize("x", 1, [failed(Failure.CONNECTION)], wall=0.25, objectives=Objectives(ttft_ms=1))
    assert (level.completed, level.errors, level.requests_per_s, level.ttft_ms.p50) == (0, 1, 0.0, None)
    assert level.goodput is not None and level.goodput.share == 0.0
    empty = summarize("x", 1, [], wall=0.0, objectives=Objectives())
    assert (empty.requests, empty.output_tokens_per_s, empty.timeline) == (0, 0.0, ())
