"""Stages of a sample: they follow each other and add up to its whole time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.router.timings import STAGES, Borders, stages_of, timings_json

SECONDS = st.floats(0, 100, allow_nan=False)


def passed(arrival: float, *states: tuple[str, float]) -> Borders:
    borders = Borders(arrival)
    for state, at in states:
        if state == "ADMITTED":
            borders.admitted = at
        else:
            borders.move(state, at)
    return borders


def test_a_request_over_prefill() -> None:
    borders = passed(
        10.0, ("QUEUED", 10.001), ("ADMITTED", 10.003), ("PLACED", 10.004), ("SENT", 10.004), ("FIRST_TOKEN", 10.104),
        ("FINISHED", 10.204),
    )  # fmt: skip
    timings = {
        "decode_queued": 0.050, "decode_starting": 0.045, "prefill_queued": 0.010, "prefill_computing": 0.030,
        "decode_transferring": 0.060, "decode_first_token": 0.052, "prefill_transferring": 0.040,
    }  # fmt: skip
    assert stages_of(borders, timings) == {
        "tokenize": 1000, "router_queue": 2000, "placement": 1000, "earlier_attempts": 0, "decode_queue": 5000,
        "prefill_queue": 10000, "prefill_compute": 30000, "first_token": 55000, "transfer": 8000, "decode": 92000,
    }  # fmt: skip
    told = timings_json(borders, timings, 3, 1)
    assert (told["index"], told["attempts"], told["ttft_ms"], told["total_ms"]) == (3, 1, 104.0, 204.0)
    assert told["transfer_total_ms"] == 40.0 and told["stages_ms"]["first_token"] == 55.0


def test_a_mixed_worker_computes_the_prompt_itself() -> None:
    borders = passed(1.0, ("QUEUED", 1.0), ("ADMITTED", 1.0), ("PLACED", 1.0), ("FIRST_TOKEN", 1.5), ("FINISHED", 2.0))
    stages = stages_of(borders, {"decode_queued": 0.1, "decode_computing": 0.3})
    assert (stages["decode_queue"], stages["prefill_compute"], stages["first_token"]) == (100_000, 300_000, 100_000)
    assert (stages["prefill_queue"], stages["transfer"], stages["decode"]) == (0, 0, 500_000)


def test_a_resumed_request_counts_what_was_lost() -> None:
    borders = passed(
        0.0, ("QUEUED", 1.0), ("ADMITTED", 1.0), ("PLACED", 2.0), ("FIRST_TOKEN", 3.0), ("RESUMING", 5.0),
        ("PLACED", 6.0), ("RESUMED", 7.0), ("FINISHED", 9.0),
    )  # fmt: skip
    stages = stages_of(borders, {})
    assert (stages["placement"], stages["earlier_attempts"], stages["first_token"]) == (10**6, 4 * 10**6, 10**6)
    assert stages["decode"] == 2 * 10**6
    assert timings_json(borders, {}, 0, 2)["ttft_ms"] == 3000.0, "token 1 came in the first attempt"


@given(st.lists(SECONDS, min_size=7, max_size=7), st.dictionaries(st.sampled_from(sorted(
    ["decode_queued", "decode_starting", "decode_computing", "decode_transferring", "decode_first_token",
     "prefill_queued", "prefill_computing", "prefill_transferring"])), SECONDS))  # fmt: skip
def test_stages_are_whole_and_never_negative(gaps: list[float], timings: dict[str, float]) -> None:
    times = [100.0]
    for gap in gaps:
        times.append(times[-1] + gap)
    names = ("QUEUED", "ADMITTED", "PLACED", "PLACED", "RESUMED", "FINISHED")
    borders = passed(times[0], *zip(names, times[1:], strict=False))
    stages = stages_of(borders, timings)
    assert tuple(stages) == STAGES and min(stages.values()) >= 0
    assert sum(stages.values()) == round((borders.finished - borders.arrival) * 1e6)


def test_what_never_happened_takes_no_time() -> None:
    assert sum(stages_of(passed(5.0, ("QUEUED", 5.5)), {"decode_queued": 9.0}).values()) == 500_000
