"""Goodput under more load than the mesh can carry: one mesh, its peak, and what is left of it at three times that.

    1. closed loop    requests per second at saturation: the capacity
    2. open loop      Poisson arrivals at parts and multiples of the capacity; a request is good when it is whole and
                      token 1 came within the objective, counted from the moment it was due

The ratio is goodput at 3 times the capacity over the best goodput of any load in this run. Refused requests (429)
are told at once and cost the mesh nothing; they are listed beside it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.run import pdmesh
from services.bench.report import Level, read_report

MULTIPLES = (0.5, 0.8, 1.0, 1.5, 3.0)
OBJECTIVE_MS = 5_000
"""Time to first token that makes an answer of use."""
QUEUE_SECONDS = 4.0
"""What a request may wait at the router: less than the objective, since the prompt takes time too."""
PROMPT, OUTPUT, CONCURRENCY = 128, 32, 16


def bench(base_url: str, *options: str) -> list[Level]:
    """Levels of one `pdmesh bench`."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "report.json"
        command = [sys.executable, "-m", "services.cli.main", "bench", "--url", base_url, "--json", str(out)]
        command += ["--prompt-tokens", str(PROMPT), "--output-tokens", str(OUTPUT), "--slo-ttft", str(OBJECTIVE_MS)]
        subprocess.run([*command, *options], check=False, stdout=subprocess.DEVNULL, timeout=1200)
        return list(read_report(out).levels)


def figures(level: Level) -> dict[str, Any]:
    """What is told of one load."""
    assert level.goodput is not None
    return {
        "offered_per_s": round(level.offered_per_s, 3),
        "good_per_s": round(level.goodput.requests_per_s, 3),
        "completed_per_s": round(level.requests_per_s, 3),
        "refused": level.rejections.requests,
        "errors": level.errors,
        "ttft_ms_p50": level.ttft_ms.p50,
        "ttft_ms_p99": level.ttft_ms.p99,
    }


def main() -> None:
    """Prints the figures; with --json, also into a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--duration", type=float, default=60.0, help="seconds in which each load is offered")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with pdmesh("--queue-timeout", str(QUEUE_SECONDS)) as (base_url, _):
        closed = bench(base_url, "--concurrency", str(CONCURRENCY), "--requests", str(4 * CONCURRENCY))[0]
        capacity = closed.requests_per_s
        rates = ",".join(f"{capacity * multiple:.4f}" for multiple in MULTIPLES)
        levels = bench(base_url, "--rate", rates, "--duration", str(args.duration))
    loads = {f"{m:g}x": figures(level) for m, level in zip(MULTIPLES, levels, strict=True)}
    peak = max(load["good_per_s"] for load in loads.values())
    result = {
        "capacity_per_s": round(capacity, 3),
        "loads": loads,
        "ratios": {"goodput at 3x the capacity over its peak": loads["3x"]["good_per_s"] / peak},
    }
    text = json.dumps(result, indent=2)
    print(text)
    if args.json:
        args.json.write_text(text)


if __name__ == "__main__":
    main()
