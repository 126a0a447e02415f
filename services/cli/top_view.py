"""What `pdmesh top` shows: one frame as a rich renderable that fits a terminal. Pure.

Names come from the wire: they are shown as plain text without control characters, cut to a width.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

KV = (("used", "█", "blue"), ("cached", "▓", "green"), ("pinned", "▒", "yellow"), ("quarantined", "╳", "red"))
"""States of blocks, each with a sign and a colour; what is left of the bar is free."""
_FREE = "·"
_STATES = {"READY": "green", "DRAINING": "yellow", "JOINING": "cyan"}
_STAGES = {"QUEUED": "waiting", "SENT": "prefill", "FIRST_TOKEN": "decode", "RESUMED": "decode"}
_SPARKS = "▁▂▃▄▅▆▇█"
SORTS = ("name", "load", "kv", "speed")


class RouterLook(msgspec.Struct, frozen=True):
    """A router as last seen: its answer to /console/api/mesh, or why there is none, and its history by column."""

    endpoint: str
    mesh: Mapping[str, Any] | None
    error: str
    history: Mapping[str, Sequence[Any]]


class Frame(msgspec.Struct, frozen=True):
    """All that one frame shows. `note` says what is wrong with the data, if anything; `time` is since the epoch."""

    time: float
    bootstrap: str
    note: str
    ranks: Sequence[Mapping[str, Any]]
    links: Sequence[Mapping[str, Any]]
    routers: Sequence[RouterLook]


def clean(value: object, width: int) -> str:
    """Text from the wire, printable and at most `width` characters long."""
    text = "".join(c if c.isprintable() else "?" for c in str(value))
    return text if len(text) <= width else text[: width - 1] + "…"


def seconds(value: float | None) -> str:
    """Seconds in the unit that fits."""
    if value is None:
        return "–"
    if value < 1:
        return f"{value * 1e3:.0f} ms" if value >= 0.01 else f"{value * 1e3:.1f} ms"
    return f"{value:.1f} s" if value < 100 else f"{value / 60:.0f} min"


def speed(value: float) -> str:
    """Bytes per second in MB/s, or GB/s."""
    return f"{value / 1e9:.2f} GB/s" if value >= 1e9 else f"{value / 1e6:.2f} MB/s"


def spark(values: Sequence[float | None], width: int) -> str:
    """The last `width` values as bars; those that are None as blanks."""
    shown = list(values)[-width:]
    top = max((v for v in shown if v is not None), default=0.0)
    return "".join(
        " " if v is None else _SPARKS[0] if top <= 0 else _SPARKS[min(7, int(v / top * 7.999))] for v in shown
    ).rjust(width)


def kv_bar(kv: Mapping[str, int], width: int) -> Text:
    """A bar of `width` signs; a state with any block has at least one."""
    total = max(kv["total"], 1)
    bar = Text()
    left = width
    for name, sign, colour in KV:
        blocks = kv[name]
        signs = min(left, max(1, round(blocks / total * width))) if blocks else 0
        bar.append(sign * signs, colour)
        left -= signs
    return bar.append(_FREE * left, "dim")


def render(frame: Frame, width: int, height: int, sort: str = "name", *, keys: bool = True) -> RenderableType:
    """The frame for a terminal of that size; lists are cut so that all parts have a place."""
    requests = sum(len(look.mesh["requests"]) for look in frame.routers if look.mesh is not None)
    head = _head(frame, width)
    # Three tables have a line of titles and one that says how many are left out; keys take one.
    room = max(height - len(head) - 7, 3)
    most_links = min(len(frame.links), max(2, room // 4))
    most_workers = min(len(frame.ranks), max(3, room - most_links - min(requests, max(2, room // 3))))
    most_requests = max(1, room - most_links - most_workers)
    parts: list[RenderableType] = [*head]
    parts.append(_workers(frame.ranks, width, sort, most_workers))
    if frame.links:
        parts.append(_links(frame.links, width, most_links))
    parts.append(_requests(frame, width, most_requests))
    if keys:
        parts.append(Text(f"q quit   s sort (by {sort})", "dim"))
    return Group(*parts)


def _head(frame: Frame, width: int) -> list[Text]:
    ready = sum(rank["answers"] and rank["state"] == "READY" for rank in frame.ranks)
    alive = [look for look in frame.routers if look.mesh is not None]
    head = Text.assemble(("pdmesh top", "bold"), time.strftime("  %H:%M:%S", time.localtime(frame.time)))
    head.append(f"  bootstrap {clean(frame.bootstrap or '–', 28)}  routers {len(alive)}/{len(frame.routers)}")
    head.append(
        f"  workers {ready}/{len(frame.ranks)} ready", "green" if ready == len(frame.ranks) and ready else "yellow"
    )
    lines = [head]
    if frame.note:
        lines.append(Text(clean(frame.note, width), "yellow"))
    for look in frame.routers:
        if look.mesh is None:
            lines.append(Text(clean(f"router {look.endpoint}: {look.error}", width), "red"))
            continue
        several = clean(look.endpoint, 22) + "  " if len(frame.routers) > 1 else ""
        lines += _figures(look, several, width)
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines


def _figures(look: RouterLook, name: str, width: int) -> list[Text]:
    history = look.history
    assert look.mesh is not None

    def last(column: str) -> float | None:
        values = history.get(column) or [None]
        value: float | None = values[-1]
        return value

    def total(column: str, count: int) -> float:
        return float(sum((history.get(column) or [])[-count:]))

    router = look.mesh["router"]
    graph = max(4, min(30, (width - len(name) - 64) // 2))
    first = Text(f"{name}TTFT p50 {seconds(last('ttft_p50')):>7} p95 {seconds(last('ttft_p95')):>7} ")
    first.append(spark(history.get("ttft_p50") or [], graph), "magenta")
    first.append(f"  ITL p50 {seconds(last('itl_p50')):>7} p95 {seconds(last('itl_p95')):>7} ")
    first.append(spark(history.get("itl_p50") or [], graph), "cyan")
    errors = total("errors", 60)
    second = Text(f"{name}{total('tokens', 5) / 5:7.1f} tok/s ")
    second.append(spark(history.get("tokens") or [], graph), "green")
    second.append(
        f"  {total('requests', 10) / 10:.1f} req/s  {router['in_flight']} in flight, {router['queued']} waiting  "
    )
    second.append(f"{errors:.0f} errors in 1 min", "red bold" if errors else "dim")
    return [first, second]


def _table(*columns: tuple[str, str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold reverse", expand=True)
    for name, justify in columns:
        table.add_column(name, justify=justify, no_wrap=True, overflow="ellipsis")  # type: ignore[arg-type]
    return table


def _more(table: Table, left: int) -> None:
    if left > 0:
        table.add_row(Text(f"+{left} more", "dim"))


def _workers(ranks: Sequence[Mapping[str, Any]], width: int, sort: str, most: int) -> Table:
    wide = width >= 100
    table = _table(
        ("WORKER", "left"), ("ROLE", "left"), ("STATE", "left"), ("RUN", "right"), ("QUEUE", "right"),
        ("TOK/S", "right"), ("KV", "left"), ("FREE/ALL", "right"),
    )  # fmt: skip
    bar = max(8, min(48, width - (76 if wide else 67)))
    shown = sorted(ranks, key=_order(sort))
    for rank in shown[:most]:
        load, kv = rank["load"], rank["kv"]
        name = rank["instance"] if not rank["dp"] else f"{rank['instance']} dp{rank['dp']}"
        state = rank["state"] if rank["answers"] else f"{rank['state']}?"
        table.add_row(
            Text(clean(name, 24 if wide else 15)),
            Text(rank["role"], {"PREFILL": "magenta", "DECODE": "cyan"}.get(rank["role"], "")),
            Text(clean(state, 9), _STATES.get(rank["state"], "red") if rank["answers"] else "red"),
            str(load["running"]),
            str(load["queued"]),
            f"{_rate(rank):.0f}",
            kv_bar(kv, bar),
            f"{kv['free']}/{kv['total']}",
        )
    _more(table, len(ranks) - most)
    if not ranks:
        table.add_row(Text("no worker", "dim"))
    return table


def _rate(rank: Mapping[str, Any]) -> float:
    rates = rank["rates"]
    return float(rates.get("prompt_tokens_computed" if rank["role"] == "PREFILL" else "output_tokens", 0.0))


def _order(sort: str) -> Any:
    role = {"PREFILL": 0}

    def key(rank: Mapping[str, Any]) -> tuple[float, int, str]:
        kv, load = rank["kv"], rank["load"]
        by = {
            "load": -float(load["running"] + load["queued"]),
            "kv": -(kv["used"] + kv["pinned"] + kv["quarantined"]) / max(kv["total"], 1),
            "speed": -_rate(rank),
        }.get(sort, 0.0)
        return by, role.get(rank["role"], 1), rank["instance"]

    return key


def _links(links: Sequence[Mapping[str, Any]], width: int, most: int) -> Table:
    table = _table(
        ("LINK", "left"),
        ("BY", "left"),
        ("NOW", "right"),
        ("WHILE MOVING", "right"),
        ("MB", "right"),
        ("FAILED", "right"),
    )
    for link in sorted(links, key=lambda link: (-link["rate"], link["from"], link["to"]))[:most]:
        name = f"{clean(link['from'], width // 5)} → {clean(link['to'], width // 5)}"
        now = Text(speed(link["rate"]), "green") if link["rate"] else Text("idle" if link["up"] else "down", "dim")
        table.add_row(
            Text(name),
            Text(clean(link["transport"], 8)),
            now,
            speed(link["speed"]) if link["speed"] else "–",
            f"{link['bytes'] / 1e6:.1f}",
            Text(str(link["failures"]), "red" if link["failures"] else ""),
        )
    _more(table, len(links) - most)
    return table


def _requests(frame: Frame, width: int, most: int) -> Table:
    rows = [row for look in frame.routers if look.mesh is not None for row in look.mesh["requests"]]
    total = sum(look.mesh["requests_total"] for look in frame.routers if look.mesh is not None)
    table = _table(
        (f"REQUEST ({total})", "left"), ("STAGE", "left"), ("AGE", "right"), ("TTFT", "right"), ("OUT", "right"),
        ("IN", "right"), ("WORKERS", "left"),
    )  # fmt: skip
    for row in sorted(rows, key=lambda row: -row["age"])[:most]:
        stage = _STAGES.get(row["state"], row["state"].lower())
        workers = " → ".join(clean(name, 14) for name in (row["prefill"], row["decode"]) if name)
        table.add_row(
            Text(clean(row["id"], max(12, width - 70))),
            Text(clean(f"{stage}, slow" if row["slow"] else stage, 14), "red" if row["slow"] else ""),
            seconds(row["age"]),
            seconds(row["ttft"]),
            str(row["tokens"]),
            str(row["prompt_tokens"]),
            Text(workers or "–"),
        )
    _more(table, total - most)
    return table
