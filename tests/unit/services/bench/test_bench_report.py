"""Results as JSON, text and page: whole, readable again, and needing nothing else."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from engine_core.types.errors import ConfigError
from services.bench.charts import linear_ticks, load_axis, log_ticks, value_axis
from services.bench.live import plain_line, sparkline, view
from services.bench.outcome import Failure, Objectives, Outcome
from services.bench.page import compare_page, result_page
from services.bench.plan import LevelPlan
from services.bench.report import Change, Report, Target, compare, differences, read_report, to_json
from services.bench.summary import summarize
from services.bench.tally import Tally
from services.bench.text import notes, number, show, show_changes, verdict

OBJECTIVES = Objectives(ttft_ms=350, itl_ms=100)


def outcomes(load: int, slower: float, failures: int = 0) -> list[Outcome]:
    found = []
    for i in range(12):
        due, ttft = i * 0.5, 0.1 * load * slower
        end = due + ttft + 0.04 * 7 * slower
        found.append(
            Outcome(
                index=i, request_id=f"bench-{load}-{i}", due=due, sent=due, first=due + ttft, gaps=(0.04 * slower,) * 7,
                end=end, prompt_asked=32, output_asked=8, prompt_tokens=32, output_tokens=8, cached_tokens=16,
            )
        )  # fmt: skip
    for i in range(failures):
        found.append(
            Outcome(
                index=20 + i, request_id=f"f{i}", due=1.0, sent=1.0, end=1.1, failure=Failure.STREAM_ERROR, status=200,
                detail="decode-0 is <gone> & [lost]",
            )
        )  # fmt: skip
    return found


def report(
    label: str = "", slower: float = 1.0, loads: tuple[int, ...] = (1, 2, 4), failures: int = 0, **given: Any
) -> Report:
    levels = tuple(
        summarize(f"{n} in flight", n, outcomes(n, slower, failures), wall=8.0, objectives=OBJECTIVES, rows=True)
        for n in loads
    )
    fields: dict[str, Any] = {
        "label": label,
        "started": "2026-11-30T12:00:00+00:00",
        "version": "0.1.0",
        "command": "pdmesh bench --concurrency 1,2,4",
        "loop": "closed",
        "load_name": "concurrency",
        "load_unit": "requests in flight",
        "target": Target("http://127.0.0.1:8000/v1", "tiny", "completions", ("ignore_eos",)),
        "workload": {"prompt_tokens": "32", "output_tokens": "8", "shared_prefix": 0, "prefix_groups": 1, "seed": 1},
        "objectives": OBJECTIVES,
        "levels": levels,
    }
    return Report(**(fields | given))


class Outside(HTMLParser):
    """What a page would load, and its elements."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [f"{tag} {n}={v}" for n, v in attrs if n in ("src", "href", "xlink:href", "srcset", "data")]


def drawings(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.S)]


def titles(page: str) -> list[str]:
    return [title.text or "" for svg in drawings(page) for title in svg.iter("title")]


def texts(page: str) -> list[str]:
    return [text.text or "" for svg in drawings(page) for text in svg.iter("text")]


# ---- JSON ---------------------------------------------------------------------------------------------


def test_a_result_is_read_again_as_it_was_written(tmp_path: Path) -> None:
    file, written = tmp_path / "a.json", report("a", failures=1)
    file.write_bytes(to_json(written))
    assert read_report(file) == written
    data = msgspec.json.decode(file.read_bytes())
    assert data["format"] == "pdmesh-bench/1" and len(data["levels"][0]["rows"]) == 13
    assert data["levels"][1]["ttft_ms"]["p50"] == 200.0 and data["levels"][1]["itl_ms"]["p99"] == 40.0


@pytest.mark.parametrize(
    ("spoil", "said"),
    (
        (lambda data: data.pop("levels"), "missing required field `levels`"),
        (lambda data: data["levels"][0].update(errors="x"), r"Expected `int`, got `str` - at `\$.levels\[0\].errors`"),
        (lambda data: data.update(format="pdmesh-bench/9"), "this version reads 'pdmesh-bench/1'"),
    ),
)
def test_a_file_that_is_no_result_is_refused_by_field(tmp_path: Path, spoil: Any, said: str) -> None:
    data = msgspec.json.decode(to_json(report()))
    spoil(data)
    file = tmp_path / "a.json"
    file.write_bytes(msgspec.json.encode(data))
    with pytest.raises(ConfigError, match=said):
        read_report(file)
    with pytest.raises(ConfigError, match="can't be read"):
        read_report(tmp_path / "absent.json")


def test_the_best_and_the_highest_load_that_kept_the_objectives() -> None:
    found = report()
    assert found.best is not None and found.best.output_tokens_per_s == 12.0
    assert found.carried is not None and found.carried.name == "2 in flight"
    assert report(slower=10).carried is None
    assert report(failures=3).failed == 9


# ---- two runs -----------------------------------------------------------------------------------------


def test_two_runs_are_compared_at_the_loads_that_both_have() -> None:
    a, b = report("a"), report("b", slower=0.5, loads=(2, 4, 8))
    changes = {(c.load, c.measure): c for c in compare(a, b)}
    assert {load for load, _ in changes} == {2, 4} and len(changes) == 16
    ttft, rate = changes[(2, "TTFT p50")], changes[(2, "requests/s")]
    assert (ttft.before, ttft.after, ttft.ratio, ttft.better) == (200.0, 100.0, 0.5, True)
    assert (rate.ratio, rate.better) == (1.0, None)
    assert Change("x", 1, 1.0, 1.1, False).better is False
    assert Change("x", 1, 0.0, 1.1, True).ratio is None
    assert differences(a, b) == ["concurrency that only one run has: 1, 8"]


def test_what_else_differs_between_two_runs_is_said() -> None:
    other = report(workload={"prompt_tokens": "64", "output_tokens": "8", "arrival": "poisson"})
    assert differences(report(), other) == [
        "arrival: none against poisson",
        "prefix groups: 1 against none",
        "prompt tokens: 32 against 64",
        "seed: 1 against none",
        "shared prefix: 0 against none",
    ]
    with pytest.raises(ConfigError, match="a run over concurrency can't be compared with one over request rate"):
        compare(report(), report(load_name="request rate"))


# ---- pages --------------------------------------------------------------------------------------------


def test_a_page_needs_nothing_else_and_is_small() -> None:
    for page in (
        result_page(report("a", failures=1)),
        compare_page(report("a"), report("b"), compare(report("a"), report("b"))),
    ):
        outside = Outside()
        outside.feed(page)
        assert outside.loads == [] and "script" not in outside.tags and "link" not in outside.tags
        assert "url(" not in page and "@import" not in page
        assert len(page) < 300_000 and "prefers-color-scheme: dark" in page


def test_a_page_shows_every_figure_and_where_it_lies() -> None:
    page = result_page(report("before"))
    assert page.count("<svg") == 6 + 3 + 3 * 2
    hovers = titles(page)
    for title in (
        "p50 TTFT at 4 in flight: 400.0 ms",
        "4 in flight: 12.0 output tokens/s",
        "2 in flight: 100.0 %",
    ):
        assert title in hovers
    labels = texts(page)
    assert {"TTFT (ms)", "ITL (ms)", "output tokens/s", "concurrency (requests in flight)"} <= set(labels)
    assert page.count("</i>objective 350 ms</li>") == 1 and "objective 350 ms" in hovers
    assert all(label in page for label in ("before", "bench-4-11", "50% of the prompt tokens came from", "How it was"))


def test_the_points_of_a_chart_lie_where_their_values_are() -> None:
    chart = next(svg for svg in drawings(result_page(report())) if svg.get("aria-label") == "Output throughput")
    dots = [(float(c.get("cx", 0)), float(c.get("cy", 0))) for c in chart.iter("circle") if c.get("class") == "dot"]
    assert len(dots) == 3 and dots[0][0] < dots[1][0] < dots[2][0]
    assert len({y for _, y in dots}) == 1, "the three loads have the same throughput"
    ticks = [t for t in chart.iter("text") if t.get("text-anchor") == "end"]
    at = {float(t.text or 0): float(t.get("y", 0)) - 4 for t in ticks}
    low, high = max(v for v in at if v <= 12.0), min(v for v in at if v > 12.0)
    expected = at[low] + (at[high] - at[low]) * (12.0 - low) / (high - low)
    assert dots[0][1] == pytest.approx(expected, abs=0.2)


def test_an_open_loop_is_drawn_beside_what_was_asked_for() -> None:
    workload = {**report().workload, "arrival": "poisson"}
    page = result_page(report(loop="open", load_name="request rate", load_unit="requests/s", workload=workload))
    chart = next(svg for svg in drawings(page) if svg.get("aria-label") == "Requests")
    lines = [line for line in chart.iter("path") if line.get("class") == "line"]
    assert [line.get("stroke-dasharray") for line in lines] == [None, "5 4"]
    assert "Over request rate" in page and "</i>asked for</li>" in page and "poisson arrivals" in page


def test_a_page_of_one_level_shows_distributions_and_its_course() -> None:
    page = result_page(report(loads=(4,)))
    assert "Over concurrency" not in page and page.count("<svg") == 3 + 2


def test_a_page_of_nothing_but_failures_is_whole() -> None:
    lost = [
        Outcome(index=0, request_id="x", due=0.0, sent=0.0, end=0.1, failure=Failure.CONNECTION, detail="refused")
    ] * 2
    levels = tuple(summarize(f"{n} in flight", n, lost, wall=1.0, objectives=OBJECTIVES) for n in (1, 2))
    page = result_page(report(levels=levels))
    assert "2 × connection: refused" in page and drawings(page)
    assert result_page(report(levels=()))


def test_text_of_a_server_is_shown_as_text() -> None:
    page = result_page(report("<script>alert(1)</script>", failures=1))
    assert "<script" not in page and "&lt;script&gt;alert(1)" in page
    assert "decode-0 is &lt;gone&gt; &amp; [lost]" in page


def test_a_comparison_shows_both_runs() -> None:
    a, b = report("slow"), report("fast", slower=0.5, failures=1)
    page = compare_page(a, b, compare(a, b))
    hovers = titles(page)
    assert "A p50 TTFT at 2 in flight: 200.0 ms" in hovers and "B p50 TTFT at 2 in flight: 100.0 ms" in hovers
    assert "slow against fast" in page and "0.50 ×" in page and 'class="good"' in page
    assert "B: At 1 in flight: 1 × stream_error" in page
    apart = compare_page(a, report("b", loads=(64,)), [])
    assert "The runs have no load in common." in apart and "concurrency that only one run has: 1, 2, 4, 64" in apart


# ---- axes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("top", "ticks"),
    (
        (1.0, (0, 0.2, 0.4, 0.6, 0.8, 1.0)),
        (11.8, (0, 2.5, 5, 7.5, 10, 12.5)),
        (253.0, (0, 100, 200, 300)),
        (0.03, (0, 0.01, 0.02, 0.03)),
    ),
)
def test_ticks_are_round_and_reach_the_top(top: float, ticks: tuple[float, ...]) -> None:
    assert linear_ticks(top) == pytest.approx(ticks)


def test_values_far_apart_get_a_logarithmic_axis() -> None:
    axis = value_axis("x", [3.0, 900.0])
    assert axis.log and (axis.low, axis.high) == (2.0, 1000.0) and axis.label == "x, logarithmic"
    assert axis.at(2.0) == 0.0 and axis.at(1000.0) == 1.0 and 0.45 < axis.at(44.7) < 0.55
    assert not value_axis("x", [3.0, 90.0]).log and value_axis("x", []).high == 1.0
    assert log_ticks(10, 200) == (10, 20, 50, 100, 200)


def test_loads_are_the_ticks_but_for_those_too_close() -> None:
    assert load_axis("x", [1, 4, 16]).ticks == (1, 4, 16) and load_axis("x", [1, 4, 16]).log
    assert load_axis("x", [2, 3]).ticks == (2, 3) and not load_axis("x", [2, 3]).log
    assert load_axis("x", [1, 50, 51, 100]).ticks == (1, 50, 100)
    assert load_axis("x", [7]).at(7) == 0.5


# ---- text ---------------------------------------------------------------------------------------------


def said(what: Any, *arguments: Any) -> str:
    console = Console(file=io.StringIO(), width=180)
    what(*arguments, console)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_a_terminal_gets_the_figures_the_verdict_and_the_notes() -> None:
    text = said(show, report(failures=1, interrupted=True))
    assert re.search(r"4 in flight +12 +1 +0 +1\.50 +12\.0 +400\.0 +400\.0 +40\.0 +40\.0 +680\.0 +680\.0 +0%", text)
    assert "At 4 in flight: 1 × stream_error: decode-0 is <gone> & [lost]" in text
    assert "The run was interrupted" in text
    assert verdict(report()) == [
        "Most output tokens per second: 12.0 at 1 in flight.",
        "Objectives (TTFT ≤ 350 ms, ITL p99 of each request ≤ 100 ms for 90% of the requests): held up to 2 in flight.",
    ]


def test_a_busy_or_late_client_is_told() -> None:
    level = msgspec.structs.replace(report().levels[0], client_cpu=0.97)
    late = msgspec.structs.replace(level, send_lag_ms=msgspec.structs.replace(level.send_lag_ms, p99=80.0))
    text = "\n".join(notes(report(levels=(late,))))
    assert "the load client used 97% of a core" in text and "requests left late (p99 80.0 ms)" in text
    refused = report(target=Target("http://h/v1", "m", "chat", (), ("ignore_eos",)))
    assert "The server refuses ignore_eos" in "\n".join(notes(refused))


def test_a_terminal_gets_two_runs_side_by_side() -> None:
    a, b = report("slow"), report("fast", slower=0.5)
    text = said(show_changes, a, b, compare(a, b))
    assert re.search(r"2 +output tokens/s +12\.0 +12\.0 +1\.00 ×", text)
    assert re.search(r"TTFT p50 +200\.0 +100\.0 +0\.50 ×", text)


@pytest.mark.parametrize(
    ("value", "text"),
    ((None, "-"), (0.0, "0.00"), (1.234, "1.23"), (12.34, "12.3"), (1234.5, "1,234"), (99999.0, "99,999")),
)
def test_numbers_for_people(value: float | None, text: str) -> None:
    assert number(value) == text


def test_the_live_view_shows_what_is_done_running_and_waiting() -> None:
    plans = [LevelPlan(name=f"{n} in flight", load=n, concurrency=n, requests=10) for n in (1, 2, 4)]
    tally = Tally(plans=plans, finished=list(report(loads=(1,)).levels))
    tally.begin(plans[1], "measuring", 100.0)
    tally.rates.extend((0.0, 5.0, 10.0))
    tally.completed, tally.over, tally.in_flight, tally.chunks, tally.last_error = 4, 5, 2, 40, "nobody"
    tally.ttfts.extend((0.2, 0.4))
    text = said(lambda console: console.print(view(tally, "the title", 104.0)))
    assert re.search(r"1 in flight +done +12 ", text)
    assert re.search(r"2 in flight .* 4 +0 +0 +2 +10\.0 +300\.0 / 398\.0 ms", text)
    assert re.search(r"4 in flight +waits", text)
    assert "the title" in text and "last error: nobody" in text and " ▄█" in text
    assert plain_line(tally, 104.0) == "2 in flight: measuring, 50%, 4 ok, 0 errors, 0 × 429, 2 in flight"
    assert sparkline([]) == sparkline([0.0]) == ""
    assert tally.share_done(104.0) == 0.5


def test_a_level_by_time_is_over_when_its_time_is() -> None:
    tally = Tally()
    assert tally.share_done(5.0) == 0.0 and plain_line(tally, 0.0) == "asking the server"
    tally.begin(LevelPlan(name="x", load=1, concurrency=1, duration=10.0), "measuring", 100.0)
    assert tally.share_done(102.5) == 0.25 and tally.share_done(200.0) == 1.0
