"""Frames of `pdmesh top`: they fit the terminal, show what is there, and are not moved by names from the wire."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from services.cli.top_view import Frame, RouterLook, clean, kv_bar, render, spark


def rank(name: str, role: str = "DECODE", **more: Any) -> dict[str, Any]:
    return {
        "instance": name, "role": role, "dp": 0, "state": "READY", "answers": True,
        "load": {"running": 2, "queued": 1},
        "kv": {"total": 100, "free": 30, "used": 40, "cached": 20, "pinned": 4, "quarantined": 6},
        "rates": {"output_tokens": 51.0, "prompt_tokens_computed": 320.0},
    } | more  # fmt: skip


def link(source: str, to: str, **more: Any) -> dict[str, Any]:
    return {
        "from": source, "to": to, "transport": "shm", "up": True, "rate": 12.5e6, "speed": 2.25e9, "bytes": 49.4e6,
        "failures": 0,
    } | more  # fmt: skip


def request(name: str, age: float, **more: Any) -> dict[str, Any]:
    return {
        "id": name, "state": "FIRST_TOKEN", "age": age, "ttft": 0.25, "tokens": 17, "prompt_tokens": 99, "slow": False,
        "prefill": "prefill-0", "decode": "decode-0",
    } | more  # fmt: skip


HISTORY = {
    "time": [1.0, 2.0], "ttft_p50": [None, 0.287], "ttft_p95": [None, 1.5], "itl_p50": [0.05, 0.051],
    "itl_p95": [0.1, 0.09], "tokens": [40, 60], "requests": [1, 0], "errors": [0, 2],
}  # fmt: skip


def frame(**more: Any) -> Frame:
    requests = more.pop("requests", [request("r1", 3.0), request("r2", 9.0, slow=True, ttft=None, state="SENT")])
    mesh = {"requests": requests, "requests_total": len(requests), "router": {"in_flight": 2, "queued": 5}}
    values: dict[str, Any] = {
        "time": 0.0, "bootstrap": "127.0.0.1:18800", "note": "", "links": [link("prefill-0", "decode-0")],
        "ranks": [rank("decode-0"), rank("prefill-0", "PREFILL")],
        "routers": [RouterLook("127.0.0.1:8000", mesh, "", HISTORY)],
    }  # fmt: skip
    return Frame(**values | more)


def lines(shown: Frame, width: int = 80, height: int = 24, sort: str = "name") -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, height=height).print(render(shown, width, height, sort))
    return out.getvalue().splitlines()


def find(rows: list[str], start: str) -> str:
    return next(line for line in rows if line.startswith(start))


def test_all_is_there_at_80_columns() -> None:
    rows = lines(frame())
    assert max(map(len, rows)) <= 80 and len(rows) <= 24
    assert "workers 2/2 ready" in rows[0] and "127.0.0.1:18800" in rows[0]
    figures = "\n".join(rows[1:3])
    for text in (
        "p50  287 ms",
        "p95   1.5 s",
        "p50   51 ms",
        "20.0 tok/s",
        "0.1 req/s",
        "2 in flight, 5 waiting",
        "2 errors",
    ):
        assert text in figures, figures
    assert find(rows, "prefill-0 ").split()[1:6] == ["PREFILL", "READY", "2", "1", "320"]
    decode = find(rows, "decode-0 ")
    assert decode.split()[1:6] == ["DECODE", "READY", "2", "1", "51"] and "30/100" in decode
    assert rows.index(find(rows, "prefill-0 ")) < rows.index(decode)
    pair = find(rows, "prefill-0 → decode-0")
    assert "shm" in pair and "12.50 MB/s" in pair and "2.25 GB/s" in pair and "49.4" in pair
    slow, fast = find(rows, "r2"), find(rows, "r1")
    assert "prefill, slow" in slow and "9.0 s" in slow and "decode" in fast and "250 ms" in fast and "17" in fast
    assert rows.index(slow) < rows.index(fast)  # the oldest first


@pytest.mark.parametrize("size", [(80, 24), (60, 16), (200, 50)])
def test_a_crowd_is_cut_to_the_terminal(size: tuple[int, int]) -> None:
    ranks = [rank(f"decode-{i}") for i in range(40)] + [rank(f"prefill-{i}", "PREFILL") for i in range(40)]
    links = [link(f"prefill-{i}", f"decode-{j}") for i in range(9) for j in range(9)]
    rows = lines(frame(ranks=ranks, links=links, requests=[request(f"r{i}", float(i)) for i in range(50)]), *size)
    assert max(map(len, rows)) <= size[0] and len(rows) <= size[1]
    assert sum("more" in line for line in rows) == 3
    assert any(line.startswith("r49") for line in rows)


def test_the_order_can_be_chosen() -> None:
    idle = rank("a", load={"running": 0, "queued": 0}, rates={"output_tokens": 500.0})
    full = rank("b", load={"running": 9, "queued": 9}, rates={})
    full["kv"] = idle["kv"] | {"used": 94, "free": 0, "cached": 0, "pinned": 0}
    shown = frame(ranks=[full, idle], links=[], requests=[])
    order = {
        sort: [line[0] for line in lines(shown, sort=sort) if line[:2] in ("a ", "b ")]
        for sort in ("name", "load", "kv", "speed")
    }
    assert order == {"name": ["a", "b"], "load": ["b", "a"], "kv": ["b", "a"], "speed": ["a", "b"]}


def test_what_does_not_answer_is_said() -> None:
    gone = rank("decode-0", answers=False, state="LOST")
    dead = RouterLook("127.0.0.1:8000", None, "does not answer: ConnectError", {})
    rows = lines(frame(ranks=[gone], routers=[dead], links=[], note="Bootstrap at x does not answer", bootstrap=""))
    assert "workers 0/1 ready" in rows[0] and "routers 0/1" in rows[0]
    assert "Bootstrap at x does not answer" in rows[1] and "127.0.0.1:8000: does not answer: ConnectError" in rows[2]
    assert "LOST?" in find(rows, "decode-0")
    nobody = lines(frame(ranks=[], routers=[], links=[]))
    assert any(line.startswith("no worker") for line in nobody)


def test_a_bar_tells_its_states_apart_without_colour() -> None:
    bar = kv_bar({"total": 100, "free": 30, "used": 40, "cached": 20, "pinned": 4, "quarantined": 6}, 10)
    assert bar.plain == "████▓▓▒╳··"
    assert (
        kv_bar({"total": 1000, "free": 999, "used": 0, "cached": 0, "pinned": 0, "quarantined": 1}, 5).plain == "╳····"
    )
    assert kv_bar({"total": 0, "free": 0, "used": 0, "cached": 0, "pinned": 0, "quarantined": 0}, 4).plain == "····"


def test_names_are_text() -> None:
    evil = "[red]x[/]\x1b]0;owned\x07\n\u202eend"
    rows = lines(frame(ranks=[rank(evil)], links=[link(evil, "d")], requests=[request(evil, 1.0)]), 120, 30)
    shown = "\n".join(rows)
    assert "[red]x[/]" in shown and not {"\x1b", "\x07", "\u202e"} & set(shown)
    assert clean("a\x00b", 9) == "a?b" and clean("abcdef", 4) == "abc…"


def test_sparks() -> None:
    assert spark([0, 4, 8, None, 2], 5) == "▁▄█ ▂"
    assert spark([1.0], 3) == "  █" and spark([], 2) == "  " and spark([0, 0], 2) == "▁▁"
    assert len(spark(list(range(100)), 7)) == 7
