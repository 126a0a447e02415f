"""When requests arrive, and how long they are: by the seed, at the rate asked for, with errors that help."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_core.types.errors import ConfigError
from services.bench.arrivals import Arrival, TraceEntry, arrival_times, first_arrivals, read_trace
from services.bench.lengths import parse_lengths

MANY = 4000


@pytest.mark.parametrize("kind", Arrival)
@pytest.mark.parametrize("rate", (0.5, 20.0))
def test_arrivals_ascend_at_the_rate_and_repeat_with_the_seed(kind: Arrival, rate: float) -> None:
    times = list(islice(arrival_times(kind, rate, random.Random(3), 8), MANY))
    assert times == list(islice(arrival_times(kind, rate, random.Random(3), 8), MANY))
    assert times == sorted(times) and times[0] >= 0
    assert MANY / times[-1] == pytest.approx(rate, rel=0.1)


def test_constant_arrivals_have_equal_gaps_and_begin_at_once() -> None:
    assert list(islice(arrival_times(Arrival.CONSTANT, 4.0, random.Random(0)), 4)) == [0.0, 0.25, 0.5, 0.75]


def test_poisson_gaps_vary_as_exponential_ones_do() -> None:
    times = list(islice(arrival_times(Arrival.POISSON, 10.0, random.Random(1)), MANY))
    gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((g - mean) ** 2 for g in gaps) / len(gaps)) ** 0.5
    assert deviation / mean == pytest.approx(1.0, abs=0.1)


def test_bursts_come_together() -> None:
    times = list(islice(arrival_times(Arrival.BURSTS, 10.0, random.Random(1), 5), 50))
    assert len(set(times)) == 10
    assert all(len(set(times[i : i + 5])) == 1 for i in range(0, 50, 5))


def test_a_count_and_a_time_end_arrivals_whichever_is_first() -> None:
    def times() -> list[float]:
        return [0.0, 0.25, 0.5, 0.75, 1.0]

    assert first_arrivals(iter(times()), 2, None) == [0.0, 0.25]
    assert first_arrivals(iter(times()), None, 0.75) == [0.0, 0.25, 0.5]
    assert first_arrivals(iter(times()), 2, 0.75) == [0.0, 0.25]
    assert first_arrivals(iter(times()), 4, 0.3) == [0.0, 0.25]


def test_a_trace_is_sorted_and_begins_at_zero(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(
        '{"timestamp": 101.5, "prompt_tokens": 7, "output_tokens": 3, "note": "ignored"}\n\n'
        '{"timestamp": 100, "prompt_tokens": 5, "output_tokens": 2, "prefix_group": 4}\n'
    )
    assert read_trace(file) == [TraceEntry(0.0, 5, 2, 4), TraceEntry(1.5, 7, 3)]


@pytest.mark.parametrize(
    ("text", "said"),
    (
        ('{"timestamp": 1, "prompt_tokens": 7}', "line 1: Object missing required field `output_tokens`"),
        ('\n{"timestamp": 1, "prompt_tokens": "x", "output_tokens": 1}', "line 2: Expected `int`, got `str`"),
        ('{"timestamp": 1, "prompt_tokens": 0, "output_tokens": 1}', "line 1: token counts must be 1 or more"),
        ("nonsense", "line 1: JSON is malformed"),
        ("\n", "has no line"),
    ),
)
def test_a_wrong_trace_is_refused_by_line(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_trace(file)
    assert said in caught.value.message and str(file) in caught.value.message


def test_a_trace_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.jsonl can't be read"):
        read_trace(tmp_path / "absent.jsonl")


def test_lengths_in_all_three_forms() -> None:
    rng = random.Random(5)
    fixed = parse_lengths("128", "--prompt-tokens")
    assert {fixed.sample(rng) for _ in range(50)} == {128} and (fixed.mean, fixed.largest) == (128, 128)
    between = parse_lengths("uniform:4-6", "--prompt-tokens")
    assert {between.sample(rng) for _ in range(200)} == {4, 5, 6} and (between.mean, between.largest) == (5, 6)
    mixed = parse_lengths("mix:10@3,50@1", "--prompt-tokens")
    drawn = [mixed.sample(rng) for _ in range(MANY)]
    assert set(drawn) == {10, 50} and drawn.count(10) / MANY == pytest.approx(0.75, abs=0.03)
    assert (mixed.mean, mixed.largest) == (20, 50)


@given(low=st.integers(1, 10_000), more=st.integers(0, 1000), seed=st.integers())
def test_a_length_lies_in_its_range(low: int, more: int, seed: int) -> None:
    lengths = parse_lengths(f"uniform:{low}-{low + more}", "--output-tokens")
    assert low <= lengths.sample(random.Random(seed)) <= low + more


@pytest.mark.parametrize(
    ("text", "said"),
    (
        ("", "'' is no number of tokens"),
        ("-3", "'-3' is no number of tokens"),
        ("0", "token counts are 1 or more"),
        ("1.5", "'1.5' is no number of tokens"),
        ("uniform:9-3", "the smaller one first"),
        ("uniform:9", "a range has two ends"),
        ("normal:3", "there is no distribution 'normal'"),
        ("mix:3@0", "weights are above 0"),
        ("mix:3@x", "'x' is no weight"),
        ("mix:3@nan", "weights are above 0"),
        ("mix:", "'' is no number of tokens"),
    ),
)
def test_a_wrong_length_says_what_would_be_right(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_lengths(text, "--prompt-tokens")
    assert caught.value.message.startswith(f"--prompt-tokens {text!r}: ")
    assert said in caught.value.message and "mix:128@0.8,1024@0.2" in caught.value.message
