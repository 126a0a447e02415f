"""Which requests there are: prompts that share what they should and nothing else, levels as asked for."""

from __future__ import annotations

from itertools import islice

import pytest

from engine_core.types.errors import ConfigError
from services.bench.arrivals import Arrival, TraceEntry
from services.bench.lengths import parse_lengths
from services.bench.plan import RunOptions, levels
from services.bench.workload import Ask, Calibration, Shape, calibrate, closed_asks, open_asks, prompt_text, trace_asks


def shape(prompt: str = "40", output: str = "8", shared: int = 0, groups: int = 1, seed: int = 1) -> Shape:
    return Shape(parse_lengths(prompt, "p"), parse_lengths(output, "o"), shared, groups, seed)


def ask(index: int, tokens: int = 40, group: int = 0) -> Ask:
    return Ask(index, None, tokens, 8, group)


def test_prompts_differ_from_their_first_words_on_and_repeat_with_the_seed() -> None:
    one = prompt_text(ask(0), shape(), "level", Calibration())
    others = [
        prompt_text(ask(1), shape(), "level", Calibration()),
        prompt_text(ask(0), shape(), "another level", Calibration()),
        prompt_text(ask(0), shape(seed=2), "level", Calibration()),
    ]
    assert len(one.split()) == 40
    assert prompt_text(ask(0), shape(), "level", Calibration()) == one
    assert all(one.split()[:3] != other.split()[:3] for other in others)


def test_a_group_shares_its_prefix_and_nothing_more() -> None:
    like = shape(shared=16, groups=2)
    a, b = (prompt_text(ask(i), like, "level", Calibration()).split() for i in range(2))
    other = prompt_text(ask(2, group=1), like, "level", Calibration()).split()
    elsewhere = prompt_text(ask(0), like, "another level", Calibration()).split()
    assert a[:16] == b[:16] and a[16:] != b[16:]
    assert other[:16] != a[:16] != elsewhere[:16]
    assert prompt_text(ask(3, tokens=10), like, "level", Calibration()).split() == a[:10]


def test_words_follow_from_what_the_server_counts() -> None:
    found = calibrate((8, 22), (64, 106))
    assert (found.fixed, found.per_word, found.measured) == (10.0, 1.5, True)
    assert [found.words(tokens) for tokens in (106, 22, 3)] == [64, 8, 1]
    assert calibrate((8, 20), (64, 20)) == Calibration()


def test_a_closed_loop_draws_lengths_and_groups_by_the_seed() -> None:
    like = shape("uniform:4-6", "mix:1,9", groups=3)
    asks = list(islice(closed_asks(like, "level"), 100))
    assert asks == list(islice(closed_asks(like, "level"), 100)) != list(islice(closed_asks(like, "other"), 100))
    assert [a.index for a in asks] == list(range(100)) and {a.due for a in asks} == {None}
    assert {a.prompt_tokens for a in asks} == {4, 5, 6} and {a.output_tokens for a in asks} == {1, 9}
    assert {a.group for a in asks} == {0, 1, 2}


def test_an_open_loop_ends_by_time_and_count() -> None:
    def asks(requests: int | None, duration: float | None) -> list[Ask]:
        return open_asks(
            shape(), "level", arrival=Arrival.CONSTANT, rate=2.0, burst_size=1, requests=requests, duration=duration
        )

    assert [a.due for a in asks(None, 2.0)] == [0.0, 0.5, 1.0, 1.5]
    assert [a.due for a in asks(3, None)] == [0.0, 0.5, 1.0]


def test_a_trace_gives_lengths_times_and_groups() -> None:
    trace = [TraceEntry(0.0, 5, 2, 7), TraceEntry(3.0, 6, 3), TraceEntry(8.0, 7, 4)]
    asks = trace_asks(shape(), "level", trace, speed=2.0, requests=None, duration=3.0)
    assert asks == [Ask(0, 0.0, 5, 2, 7), Ask(1, 1.5, 6, 3, 0)]
    assert len(trace_asks(shape(), "level", trace, speed=1.0, requests=1, duration=None)) == 1


def test_levels_of_each_loop() -> None:
    closed = levels(RunOptions(shape=shape(), concurrency=(1, 16)))
    assert [(x.name, x.load, x.requests, x.duration) for x in closed] == [
        ("1 in flight", 1, 32, None),
        ("16 in flight", 16, 128, None),
    ]
    timed = levels(RunOptions(shape=shape(), concurrency=(2,), duration=5.0))[0]
    assert (timed.requests, timed.duration) == (None, 5.0)
    assert len(list(islice(timed.closed(shape()), 500))) == 500
    opened = levels(RunOptions(shape=shape(), rates=(2.0,), arrival=Arrival.CONSTANT))
    assert [len(x.asks) for x in opened] == [60]
    traced = RunOptions(shape=shape(), trace=(TraceEntry(0.0, 5, 2), TraceEntry(4.0, 5, 2)), trace_speeds=(1.0, 4.0))
    assert [[a.due for a in x.asks] for x in levels(traced)] == [[0.0, 4.0], [0.0, 1.0]]
    assert traced.loop == "trace" and traced.load_name == "trace speed"


def test_a_level_without_a_request_is_refused() -> None:
    options = RunOptions(shape=shape(), rates=(0.001,), duration=1.0)
    with pytest.raises(ConfigError, match=r"at 0\.001 requests/s no request arrives in 1 s"):
        levels(options)
