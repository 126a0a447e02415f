"""Results as one HTML page that needs nothing else: no script, no font, no address."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Any

import msgspec
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from services.bench.charts import Axis, Series, legend, line_chart, load_axis, value_axis
from services.bench.report import CURVE_AT, Change, Level, Report, Spread, differences
from services.bench.text import by_load, level_cells, notes, number, objectives_line, run_name, workload_line

_SECONDS_FROM = 10_000.0
"""Milliseconds from which an axis counts in seconds."""

_CURVES_LOG_FROM = 8.0
_DENSE_WIDTH = 420.0
_SLOWEST = 8

_METHOD = (
    "TTFT runs from the moment a request was due to the first chunk with text; opening the connection is part of it. "
    "In a closed loop a request is due when it is sent. In an open loop it is due at its arrival time, whether or not "
    "the client could send it then, so that waiting is never left out (no coordinated omission).",
    "ITL is the gap between two chunks with text, over all requests. A server that puts several tokens into one chunk "
    "shows fewer, longer gaps.",
    "Throughput is over the wall time of the level, ramp-up and tail included; tokens are those of the server's usage. "
    "Warm-up requests are in no figure. Errors and 429 are counted apart, and their times are in no percentile.",
)


class Figure(msgspec.Struct, frozen=True):
    """A card with one or more drawings."""

    title: str
    drawings: tuple[Markup, ...]
    legend: Markup = Markup()
    text: str = ""


class Section(msgspec.Struct, frozen=True):
    """Cards under a heading."""

    title: str
    charts: tuple[Figure, ...]
    text: str = ""
    dense: bool = False
    """Three in a row where there is room."""


class Run(msgspec.Struct, frozen=True):
    """A result in a comparison: its letter and colour. The only one of a page has neither."""

    report: Report
    letter: str = ""
    color: str = ""


def result_page(report: Report) -> str:
    """The page of one result."""
    runs = [Run(report)]
    sections = [*over_load(runs), distributions(report), *course(report)]
    heads = [report.load_name, "ok", "errors", "429", "requests/s", "output tokens/s"]
    heads += ["TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "e2e p50", "e2e p99"]
    if report.objectives.any:
        heads += ["good", "good requests/s"]
    rows = [{"cells": level_cells(level, objectives=report.objectives.any)} for level in report.levels]
    figures = {"title": "All figures", "text": "Times in milliseconds.", "heads": heads, "rows": rows, "names": 1}
    tables = [figures, *_slowest(report)]
    label = f": {report.label}" if report.label else ""
    return _render(
        title=f"pdmesh bench{label}",
        heading=report.label or f"Load test of {report.target.model}",
        lead=[f"{report.target.model} at {report.target.url} ({report.target.endpoint})", _sentence(report)],
        tiles=_tiles(report),
        sections=[section for section in sections if section.charts],
        tables=tables,
        notes=notes(report),
        settings=[{"title": "", "rows": _settings(report)}],
        commands=[report.command],
        version=report.version,
    )


def compare_page(a: Report, b: Report, changes: Sequence[Change]) -> str:
    """The page of two results against each other."""
    runs = [Run(a, "A", "var(--a)"), Run(b, "B", "var(--b)")]
    rows: list[dict[str, Any]] = []
    for load, group in by_load(changes):
        for i, change in enumerate(group):
            ratio = "-" if change.ratio is None else f"{change.ratio:.2f} ×"
            cells = ["" if i else f"{load:g}", change.measure, number(change.before), number(change.after), ratio]
            style = {True: "good", False: "bad", None: ""}[change.better]
            rows.append({"cells": cells, "style": style, "first": i == 0 and bool(rows)})
    text = "Times in milliseconds. Coloured where the runs differ by more than 2 %: green, B is better; red, worse."
    table = {
        "title": "At equal load",
        "text": text if rows else "The runs have no load in common.",
        "heads": [f"{a.load_name}", "measure", "A", "B", "B / A"],
        "rows": rows,
        "names": 2,
    }
    names = [f"{run.letter}: {run_name(run.report, run.letter)}, {run.report.started}" for run in runs]
    remarks = [f"The runs differ in {line}." for line in differences(a, b)]
    remarks += [f"{run.letter}: {note}" for run in runs for note in notes(run.report)]
    return _render(
        title="pdmesh bench compare",
        heading=f"{run_name(a, 'A')} against {run_name(b, 'B')}",
        lead=[*names, _sentence(a)],
        tiles=_change_tiles(a, changes),
        sections=over_load(runs),
        tables=[table],
        notes=remarks,
        settings=[{"title": run.letter, "rows": _settings(run.report)} for run in runs],
        commands=[run.report.command for run in runs],
        version=b.version,
    )


# ---- charts -------------------------------------------------------------------------------------------


def over_load(runs: Sequence[Run]) -> list[Section]:
    """TTFT, ITL, throughput and goodput over the load; nothing where no run has two levels."""
    report = runs[0].report
    alone = len(runs) == 1
    if alone and len(report.levels) < 2:
        return []
    loads = sorted({level.load for run in runs for level in run.report.levels})
    if not loads:
        return []
    x = load_axis(f"{report.load_name} ({report.load_unit})", loads)
    figures = [
        _times("Time to first token", "TTFT", lambda level: level.ttft_ms, runs, x, report.objectives.ttft_ms),
        _times("Time between tokens", "ITL", lambda level: level.itl_ms, runs, x, report.objectives.itl_ms),
        _rates("Output throughput", "output tokens/s", lambda level: level.output_tokens_per_s, runs, x),
        _rates("Requests", "completed/s", lambda level: level.requests_per_s, runs, x, asked=report.loop == "open"),
    ]
    if any(run.report.objectives.any for run in runs):
        shares = _rates("Requests that met the objectives", "share (%)", _share_of, runs, x, most=100.0, hover="%")
        figures.append(msgspec.structs.replace(shares, text=objectives_line(report)))
        figures.append(_rates("Goodput", "good requests/s", _good_of, runs, x))
    else:
        figures.append(_times("Whole request", "e2e", lambda level: level.e2e_ms, runs, x, None))
        figures.append(_rates("Errors and 429", "requests", _failed_of, runs, x))
    return [Section(f"Over {report.load_name}", tuple(figures))]


def _share_of(level: Level) -> float:
    return 0.0 if level.goodput is None else level.goodput.share * 100


def _good_of(level: Level) -> float:
    return 0.0 if level.goodput is None else level.goodput.requests_per_s


def _failed_of(level: Level) -> float:
    return float(level.errors + level.rejections.requests)


def _times(
    title: str, name: str, of: Callable[[Level], Spread], runs: Sequence[Run], x: Axis, limit_ms: float | None
) -> Figure:
    """Percentiles over the load."""
    parts = ("p50", "p90", "p99") if len(runs) == 1 else ("p50", "p99")
    found: list[tuple[str, str, bool, list[tuple[Level, float]]]] = []
    for run in runs:
        for part in parts:
            values = [(level, getattr(of(level), part)) for level in _sorted(run.report)]
            known = [(level, value) for level, value in values if value is not None]
            label = f"{run.letter} {part}".strip()
            found.append((label, run.color or f"var(--{part})", bool(run.letter) and part == "p99", known))
    unit, factor = _unit([value for *_, known in found for _, value in known])
    series = [
        Series(
            name=label,
            points=tuple((level.load, value * factor) for level, value in known),
            titles=tuple(f"{label} {name} at {level.name}: {number(value)} ms" for level, value in known),
            color=color,
            dashed=dashed,
        )
        for label, color, dashed, known in found
    ]
    y = value_axis(f"{name} ({unit})", [value for one in series for _, value in one.points])
    limit = None if limit_ms is None else (limit_ms * factor, f"objective {limit_ms:g} ms")
    named = legend(series, "" if limit is None else limit[1])
    return Figure(title, (line_chart(series, x, y, title=title, limit=limit),), named)


def _rates(
    title: str,
    unit: str,
    of: Callable[[Level], float],
    runs: Sequence[Run],
    x: Axis,
    *,
    most: float = 0.0,
    hover: str = "",
    asked: bool = False,
) -> Figure:
    """One value over the load; `hover` is its unit on hover, `asked` draws the load itself too."""
    series = [
        Series(
            name=f"{run.letter}: {run_name(run.report, run.letter)}" if run.letter else hover or unit,
            points=tuple((level.load, of(level)) for level in _sorted(run.report)),
            titles=tuple(
                f"{run.letter + ', ' if run.letter else ''}{level.name}: {number(of(level))} {hover or unit}"
                for level in _sorted(run.report)
            ),
            color=run.color or "var(--a)",
        )
        for run in runs
    ]
    if asked:
        loads = tuple((load, load) for load in sorted({level.load for run in runs for level in run.report.levels}))
        series.append(Series(name="asked for", points=loads, color="var(--soft)", dashed=True, dots=False))
    y = value_axis(unit, [most, *(value for one in series for _, value in one.points)], log_from=math.inf)
    return Figure(title, (line_chart(series, x, y, title=title),), legend(series))


def distributions(report: Report) -> Section:
    """How TTFT, ITL and e2e are spread at each level."""
    figures = [
        _curves("Time to first token", "TTFT", lambda level: level.ttft_ms, report),
        _curves("Time between tokens", "ITL", lambda level: level.itl_ms, report),
        _curves("Whole request", "e2e", lambda level: level.e2e_ms, report),
    ]
    text = "The share of requests (for ITL, of gaps) that took at most so long."
    return Section("Distributions", tuple(figure for figure in figures if figure is not None), text, dense=True)


def _curves(title: str, name: str, of: Callable[[Level], Spread], report: Report) -> Figure | None:
    curves = [(level, of(level).curve) for level in _sorted(report) if of(level).curve]
    if not curves:
        return None
    unit, factor = _unit([value for _, curve in curves for value in curve])
    times = [value * factor for _, curve in curves for value in curve[1:100]]  # not the extremes
    x = value_axis(f"{name} ({unit})", times, log_from=_CURVES_LOG_FROM)
    y = Axis(label="share at or below (%)", low=0.0, high=100.0, ticks=(0.0, 25.0, 50.0, 75.0, 90.0, 100.0))
    lines, hovers = [], []
    for i, (level, curve) in enumerate(curves):
        points = tuple(
            (min(max(value * factor, x.low), x.high), float(q)) for q, value in zip(CURVE_AT, curve, strict=True)
        )
        color = ramp(i, len(curves))
        lines.append(Series(name=level.name, points=points, color=color, dots=False))
        chosen = [q for q in CURVE_AT if q % 10 == 0 or q in (95, 99)]
        hovers.append(
            Series(
                name="",
                points=tuple(points[q] for q in chosen),
                titles=tuple(f"{level.name}: {q} % within {number(curve[q])} ms" for q in chosen),
                color=color,
                dots=False,
                line=False,
            )
        )
    drawing = line_chart([*lines, *hovers], x, y, title=f"{title}: distribution", width=_DENSE_WIDTH)
    return Figure(title, (drawing,), legend(lines))


def course(report: Report) -> list[Section]:
    """Throughput and requests in flight over the time of each level."""
    figures = []
    for level in report.levels:
        moments = level.timeline
        if len(moments) < 2:
            continue
        end = moments[-1].at_s
        x = value_axis("time since the level's start (s)", [max(end, 0.1)], log_from=math.inf)
        x = msgspec.structs.replace(x, high=end)
        x = msgspec.structs.replace(x, ticks=tuple(t for t in x.ticks if t <= end))
        marks = [(m.at_s, f"{m.failed} failed or turned away from {m.at_s:g} s on") for m in moments if m.failed]
        drawings = []
        for unit, values, color, top in (
            ("output tokens/s", [m.output_tokens_per_s for m in moments], "var(--a)", True),
            ("in flight", [m.in_flight for m in moments], "var(--b)", False),
        ):
            one = Series(
                name=unit,
                points=tuple((m.at_s, value) for m, value in zip(moments, values, strict=True)),
                titles=tuple(
                    f"from {m.at_s:g} s: {number(value)} {unit}" for m, value in zip(moments, values, strict=True)
                ),
                color=color,
                dots=False,
                area=top,
            )
            y = value_axis(unit, values, log_from=math.inf, whole=not top)
            title = f"{level.name}: {unit} over time"
            under = msgspec.structs.replace(x, label="") if top else x
            drawings.append(line_chart([one], under, y, title=title, height=160 if top else 150, marks=marks))
        figures.append(Figure(level.name, tuple(drawings)))
    return [Section("Course", tuple(figures), "Red marks: errors and 429.")] if figures else []


def ramp(i: int, count: int) -> str:
    """The colour of one of so many loads, from light to heavy."""
    percent = 100 if count < 2 else round(100 * i / (count - 1))
    return f"color-mix(in oklab, var(--ramp-1) {percent}%, var(--ramp-0))"


def _unit(values_ms: Sequence[float]) -> tuple[str, float]:
    return ("s", 1e-3) if max(values_ms, default=0.0) >= _SECONDS_FROM else ("ms", 1.0)


def _sorted(report: Report) -> list[Level]:
    return sorted(report.levels, key=lambda level: level.load)


# ---- words --------------------------------------------------------------------------------------------


def _sentence(report: Report) -> str:
    line = workload_line(report)
    return f"{line[0].upper()}{line[1:]}; {report.started}"


def _tiles(report: Report) -> list[dict[str, str]]:
    best = report.best
    if best is None:
        return []

    def tile(name: str, value: str, unit: str, note: str) -> dict[str, str]:
        return {"name": name, "value": value, "unit": unit, "note": note}

    at = f"at {best.name}"
    tiles = [tile("Most output throughput", number(best.output_tokens_per_s), "tokens/s", at)]
    for name, spread in (("TTFT p50", best.ttft_ms), ("ITL p50", best.itl_ms)):
        tiles.append(tile(name, number(spread.p50), "ms", f"p99 {number(spread.p99)} ms, {at}"))
    if report.objectives.any:
        carried = report.carried
        value = "none" if carried is None else f"{carried.load:g}"
        unit = "" if carried is None else report.load_unit
        tiles.append(tile("Objectives met up to", value, unit, objectives_line(report)))
    total = sum(level.requests for level in report.levels)
    turned = sum(level.rejections.answers for level in report.levels)
    tiles.append(tile("Errors", str(report.failed), "", f"of {total} requests; {turned} × 429"))
    return tiles


def _change_tiles(report: Report, changes: Sequence[Change]) -> list[dict[str, str]]:
    """The four main measures at the highest load that both have."""
    groups = by_load(changes)
    if not groups:
        return []
    load, group = max(groups)
    wanted = ("output tokens/s", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99")
    return [
        {
            "name": change.measure,
            "value": "-" if change.ratio is None else f"{change.ratio:.2f} ×",
            "unit": "B / A",
            "note": f"{number(change.before)} → {number(change.after)} at {report.load_name} {load:g}",
        }
        for change in group
        if change.measure in wanted
    ]


def _settings(report: Report) -> list[tuple[str, str]]:
    rows = [("server", report.target.url), ("model", report.target.model), ("endpoint", report.target.endpoint)]
    rows += [(name.replace("_", " "), str(value)) for name, value in report.workload.items() if value not in (None, {})]
    checks = [level.tokens for level in report.levels]
    counted = sum(c.with_usage for c in checks)
    if counted:
        prompts, outputs = sum(c.prompt_exact for c in checks), sum(c.output_exact for c in checks)
        rows.append(("prompt lengths as asked", f"{prompts} of {counted}"))
        rows.append(("output lengths as asked", f"{outputs} of {counted}"))
    busiest = max((level.client_cpu for level in report.levels), default=0.0)
    rows.append(("load client at most", f"{busiest:.0%} of a core"))
    return rows


def _slowest(report: Report) -> list[dict[str, Any]]:
    found = [(slow, level) for level in report.levels for slow in level.slowest]
    found.sort(key=lambda pair: -pair[0].latency_ms)
    rows = [
        {
            "cells": [
                slow.request_id, level.name, str(slow.prompt_tokens), str(slow.output_tokens),
                number(slow.ttft_ms), number(slow.latency_ms),
            ]
        }
        for slow, level in found[:_SLOWEST]
    ]  # fmt: skip
    heads = ["request", report.load_name, "prompt tokens", "output tokens", "TTFT (ms)", "e2e (ms)"]
    text = "The id was sent as x-request-id; where the server is pdmesh, “pdmesh explain ID” shows where the time went."
    return [{"title": "Slowest requests", "text": text, "heads": heads, "rows": rows, "names": 2}] if rows else []


def _render(**values: Any) -> str:
    here = files("services.bench")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((here / "page.html.j2").read_text(encoding="utf-8"))
    css = Markup((here / "look.css").read_text(encoding="utf-8"))
    tables = [
        {**table, "rows": [{"style": "", "first": False, **row} for row in table["rows"]]}
        for table in values.pop("tables")
    ]
    return template.render(css=css, method=_METHOD, tables=tables, **values)
