"""`pdmesh bench` as its user runs it, against a mesh: every request is answered, counted, and can be explained."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from pathlib import Path

import pytest

from services.bench.report import Report, read_report
from services.config import child_environment
from tests.mesh.conftest import Served
from tests.support.serving import PDMESH

pytestmark = pytest.mark.asyncio(loop_scope="session")
LIMIT = 90.0


async def start(served: Served, *arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *PDMESH, "bench", "--url", served.mesh.url, *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=child_environment(),
    )  # fmt: skip


async def bench(served: Served, *arguments: str) -> tuple[int | None, str, str]:
    process = await start(served, *arguments)
    async with asyncio.timeout(LIMIT):
        out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


def all_exact(report: Report) -> bool:
    """Every request whole, with as many output tokens as it asked for."""
    return all(
        (level.errors, level.rejections.answers, level.completed) == (0, 0, level.requests)
        and level.tokens.with_usage == level.tokens.output_exact == level.completed
        and level.tokens.more_chunks_than_tokens == 0
        for level in report.levels
    )


async def test_a_closed_loop_with_shared_prefixes_and_its_page(llama: Served, tmp_path: Path) -> None:
    result, page = tmp_path / "a.json", tmp_path / "a.html"
    code, out, err = await bench(
        llama, "--concurrency", "1,3", "--requests", "6", "--prompt-tokens", "mix:64,96", "--output-tokens", "8",
        "--shared-prefix", "48", "--prefix-groups", "2", "--slo-ttft", "1e6", "--seed", "1", "--label", "closed",
        "--json", str(result), "--html", str(page),
    )  # fmt: skip
    assert code == 0, err
    report = read_report(result)
    one, three = report.levels
    assert all_exact(report) and (one.completed, three.completed) == (6, 6)
    assert (one.in_flight_max, three.in_flight_max) == (1, 3)
    assert one.cached_share is not None and 0.05 < one.cached_share < 1, "later ones of a group find its prefix"
    assert one.ttft_ms.count == 6 and one.itl_ms.count <= 6 * 7 and one.ttft_ms.p50 is not None
    assert one.goodput is not None and one.goodput.share == 1.0 and report.carried == three
    assert one.output_tokens_per_s == pytest.approx(6 * 8 / one.wall_s, rel=0.01)
    assert "held up to 3 in flight" in out and "closed" in page.read_text(encoding="utf-8")
    moves = (await llama.mesh.explain(one.slowest[0].request_id))["moves"]
    assert any(move["to"] == "FINISHED" for move in moves)


async def test_an_open_loop_over_chat_goes_by_its_trace(llama: Served, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lengths = ((0.0, 40, 4), (0.2, 90, 6), (0.2, 40, 1), (0.5, 60, 5))
    trace.write_text(
        "\n".join(json.dumps({"timestamp": 50 + t, "prompt_tokens": p, "output_tokens": o}) for t, p, o in lengths)
    )
    code, out, err = await bench(
        llama, "--endpoint", "chat", "--trace", str(trace), "--trace-speed", "2", "--rows", "--json", "-"
    )
    assert code == 0, err
    report = json.loads(out)
    (level,) = report["levels"]
    assert (report["loop"], level["completed"], level["tokens"]["output_exact"]) == ("trace", 4, 4)
    assert [row["due_s"] for row in level["rows"]] == [0.0, 0.1, 0.1, 0.25]
    assert [row["output_tokens"] for row in level["rows"]] in ([4, 6, 1, 5], [4, 1, 6, 5])
    asked = dict(zip((4, 6, 1, 5), (40, 90, 40, 60), strict=True))
    off = [row["prompt_tokens"] / asked[row["output_tokens"]] for row in level["rows"]]
    assert 0.6 < min(off) <= max(off) < 1.6, "words of this vocabulary have several tokens"
    assert max(level["rows"], key=lambda row: row["prompt_tokens"])["output_tokens"] == 6
    assert "trace x2" in err


async def test_ctrl_c_reports_what_there_is(llama: Served, tmp_path: Path) -> None:
    result = tmp_path / "a.json"
    process = await start(
        llama, "--rate", "8", "--arrival", "bursts", "--output-tokens", "16", "--duration", "80", "--json", str(result)
    )
    async with asyncio.timeout(LIMIT):
        assert process.stderr is not None
        while not re.search(rb"measuring, .* [1-9]\d* ok", await process.stderr.readline()):
            pass
        process.send_signal(signal.SIGINT)
        out, _ = await process.communicate()
    assert process.returncode == 130
    report = read_report(result)
    (level,) = report.levels
    assert report.interrupted and level.completed >= 1 and level.errors == 0
    assert "The run was interrupted" in out.decode()
    await llama.mesh.quiet()
