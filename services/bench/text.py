"""Results as tables for a terminal, and as the notes that a reader should not miss."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from services.bench.report import Change, Level, Report, differences

_BUSY_CLIENT = 0.85
_LATE_MS = 20.0


def number(value: float | None) -> str:
    """A figure for people with three or four digits that count; a dash for none."""
    if value is None:
        return "-"
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}"


def levels_table(report: Report) -> Table:
    """One row a level."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    objectives = report.objectives.any
    table.add_column(report.load_name)
    for name in ("ok", "errors", "429", "req/s", "out tok/s"):
        table.add_column(name, justify="right")
    for name in ("TTFT p50", "p99", "ITL p50", "p99", "e2e p50", "p99"):
        table.add_column(name, justify="right")
    if objectives:
        table.add_column("good", justify="right")
        table.add_column("good req/s", justify="right")
    for level in report.levels:
        table.add_row(*level_cells(level, objectives=objectives))
    return table


def level_cells(level: Level, *, objectives: bool) -> list[str]:
    """The cells of levels_table."""
    spreads = (level.ttft_ms, level.itl_ms, level.e2e_ms)
    cells = [level.name, str(level.completed), str(level.errors), str(level.rejections.answers)]
    cells += [number(level.requests_per_s), number(level.output_tokens_per_s)]
    cells += [number(value) for spread in spreads for value in (spread.p50, spread.p99)]
    if objectives:
        good = level.goodput
        cells += ["-", "-"] if good is None else [f"{good.share:.0%}", number(good.requests_per_s)]
    return cells


def show(report: Report, console: Console) -> None:
    """Prints a result: figures by level, then what to know about them."""
    target = report.target
    console.print(f"{target.url} ({target.model}, {target.endpoint}), {workload_line(report)}", markup=False)
    console.print(levels_table(report))
    console.print("Times in milliseconds.")
    for line in [*verdict(report), *notes(report)]:
        console.print(line, markup=False)


def workload_line(report: Report) -> str:
    """The requests in a few words."""
    w = report.workload
    parts = [f"{report.loop} loop", f"prompts of {w['prompt_tokens']} tokens", f"outputs of {w['output_tokens']}"]
    if report.loop == "trace":
        parts[1:] = [f"{w['trace']}"]
    if w.get("shared_prefix"):
        parts.append(f"first {w['shared_prefix']} shared in {w['prefix_groups']} groups")
    if report.loop == "open":
        parts.append(f"{w['arrival']} arrivals")
    return ", ".join([*parts, f"seed {w['seed']}"])


def objectives_line(report: Report) -> str:
    """The objectives in a few words; empty without any."""
    names = {
        "ttft": "TTFT",
        "itl": "ITL p99 of each request",
        "tpot": "mean time per output token",
        "e2e": "whole request",
    }
    kept = [f"{names[n]} ≤ {limit:g} ms" for n, limit in report.objectives.limits() if limit is not None]
    return ", ".join(kept)


def verdict(report: Report) -> list[str]:
    """What was reached."""
    lines = []
    best = report.best
    if best is not None and best.completed:
        lines.append(f"Most output tokens per second: {number(best.output_tokens_per_s)} at {best.name}.")
    if report.objectives.any:
        carried, share = report.carried, f"{report.objectives.share:.0%}"
        what = f"{objectives_line(report)} for {share} of the requests"
        held = "held at no level" if carried is None else f"held up to {carried.name}"
        lines.append(f"Objectives ({what}): {held}.")
    return lines


def notes(report: Report) -> list[str]:
    """What a reader of the figures must know, one line each."""
    lines = []
    if report.interrupted:
        lines.append("The run was interrupted: the last level holds only what had ended by then.")
    if report.target.refused:
        fields = " and ".join(report.target.refused)
        lines.append(
            f"The server refuses {fields}: sent without, outputs may be shorter or token counts those of chunks."
        )
    for level in report.levels:
        lines += [f"At {level.name}: {note}" for note in _notes_of(level)]
    return lines


def _notes_of(level: Level) -> Iterable[str]:
    for kind, count in level.error_kinds.items():
        yield f"{count} × {kind}: {level.error_examples[kind]}"
    r, t = level.rejections, level.tokens
    if r.answers:
        ends = list(dict.fromkeys(number(s) for s in (r.retry_after_min_s, r.retry_after_max_s) if s is not None))
        told = [f"Retry-After {' to '.join(ends)} s"] if ends else []
        missing = [f"{r.without_retry_after} without Retry-After"] if r.without_retry_after else []
        yield f"{r.answers} × 429 ({', '.join(told + missing)})."
    if t.output_long or t.more_chunks_than_tokens:
        count = t.output_long + t.more_chunks_than_tokens
        yield f"the usage of {count} answers is wrong: more tokens than asked for, or more chunks of text than tokens."
    if t.output_short:
        yield f"{t.output_short} of {t.with_usage} outputs are shorter than asked for."
    if t.without_usage:
        yield f"{t.without_usage} answers had no usage: their tokens are counted as chunks of text."
    if level.cached_share:
        yield f"{level.cached_share:.0%} of the prompt tokens came from the server's prefix cache."
    if level.client_cpu > _BUSY_CLIENT:
        yield f"the load client used {level.client_cpu:.0%} of a core: it may itself be the limit."
    lag = level.send_lag_ms.p99
    if lag is not None and lag > _LATE_MS:
        yield f"requests left late (p99 {number(lag)} ms), by a limit on those in flight or a busy client; it counts."


def show_changes(before: Report, after: Report, changes: Sequence[Change], console: Console) -> None:
    """Prints two runs against each other."""
    names = [run_name(before, "A"), run_name(after, "B")]
    console.print(f"A: {names[0]} ({before.started})\nB: {names[1]} ({after.started})", markup=False)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(before.load_name, justify="right")
    table.add_column("measure")
    for name in ("A", "B", "B / A"):
        table.add_column(name, justify="right")
    for load, rows in by_load(changes):
        for i, change in enumerate(rows):
            style = {True: "green", False: "red", None: ""}[change.better]
            ratio = Text("-" if change.ratio is None else f"{change.ratio:.2f} ×", style=style)
            values = (number(change.before), number(change.after))
            table.add_row("" if i else f"{load:g}", change.measure, *values, ratio)
    console.print(table)
    console.print("Times in milliseconds. Figures of two runs differ by chance too: repeat what matters.")
    for line in differences(before, after):
        console.print(f"The runs differ in {line}.", markup=False)


def by_load(changes: Sequence[Change]) -> list[tuple[float, list[Change]]]:
    """Changes grouped by load, in their order."""
    loads = dict.fromkeys(change.load for change in changes)
    return [(load, [change for change in changes if change.load == load]) for load in loads]


def run_name(report: Report, fallback: str) -> str:
    """Its label, or else its model and address."""
    return report.label or f"{report.target.model} at {report.target.url}" or fallback
