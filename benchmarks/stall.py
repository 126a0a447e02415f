"""Does a long prompt stall running streams? Inter-token latency of 8 streams, alone and while prompts of about
1,000 tokens arrive, one after another.

    python benchmarks/stall.py --base-url http://127.0.0.1:8000/v1      against a server that runs
    python benchmarks/stall.py --json FILE                              starts the mesh, PD and aggregated

The ratio that counts is p99 over p50 of the gaps between chunks, both while prompts arrive.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parent))
from bench_openai import make_prompt, percentile  # type: ignore[import-not-found]  # a script beside this one

STREAMS, PROMPTS, LONG_WORDS = 8, 6, 1000
PORT, BOOTSTRAP_PORT = 18170, 18171


class Gaps(list[tuple[float, float]]):
    """(when, gap) of chunks; `enough` is set once there are `wanted`."""

    def __init__(self, wanted: int) -> None:
        super().__init__()
        self._wanted, self.enough = wanted, asyncio.Event()

    def add(self, at: float, gap: float) -> None:
        """Takes one gap."""
        self.append((at, gap))
        if len(self) >= self._wanted:
            self.enough.set()


async def stream(client: httpx.AsyncClient, prompt: str, tokens: int, gaps: Gaps) -> None:
    """One stream; adds the gap before each chunk after the second, so that the transfer's tail does not count."""
    body = {
        "model": "default",
        "prompt": prompt,
        "max_tokens": tokens,
        "stream": True,
        "ignore_eos": True,
        "temperature": 0,
    }
    last, seen = 0.0, 0
    async with client.stream("POST", "/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            now = time.perf_counter()
            seen += 1
            if seen > 2:
                gaps.add(now, now - last)
            last = now


async def measure(base_url: str, seed: int) -> dict[str, float]:
    """Gaps of the streams while prompts arrive, and before."""
    async with httpx.AsyncClient(base_url=base_url, timeout=600) as client:
        gaps = Gaps(STREAMS * 20)
        streams = [
            asyncio.create_task(stream(client, make_prompt(32, f"stall {seed} {i}"), 400, gaps)) for i in range(STREAMS)
        ]
        await gaps.enough.wait()
        began = time.perf_counter()
        ttft = []
        for i in range(PROMPTS):
            sent = time.perf_counter()
            await stream(client, make_prompt(LONG_WORDS, f"long {seed} {i}"), 1, Gaps(1))
            ttft.append(time.perf_counter() - sent)
            if all(s.done() for s in streams):
                break
        ended = time.perf_counter()
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    calm = [gap for at, gap in gaps if at < began]
    busy = [gap for at, gap in gaps if began <= at <= ended]
    return {
        "itl_p50_calm_ms": (percentile(calm, 50) or 0) * 1e3,
        "itl_p50_ms": (percentile(busy, 50) or 0) * 1e3,
        "itl_p99_ms": (percentile(busy, 99) or 0) * 1e3,
        "itl_p99_over_p50": (percentile(busy, 99) or 0) / (percentile(busy, 50) or 1),
        "long_prompt_ttft_ms": (percentile(ttft, 50) or 0) * 1e3,
    }


@contextlib.contextmanager
def mesh(options: Sequence[str]) -> Iterator[str]:
    """A mesh on the demo model; yields its base URL."""
    command = [sys.executable, "-m", "services.cli.main", "serve", "--model", "demo", "--port", str(PORT)]
    process = subprocess.Popen([*command, "--bootstrap-port", str(BOOTSTRAP_PORT), *options], stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"http://127.0.0.1:{PORT}/readiness").status_code == 200:
                    break
            if time.monotonic() > deadline or process.poll() is not None:
                raise SystemExit("the mesh did not become ready")
            time.sleep(0.2)
        yield f"http://127.0.0.1:{PORT}/v1"
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def main() -> None:
    """Prints and writes what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", help="a server that runs; without it both kinds of mesh are started")
    parser.add_argument("--json", type=Path, help="where results go")
    parser.add_argument("--option", action="append", default=[], help="passed to pdmesh serve")
    args = parser.parse_args()
    seed = int(time.time())
    results: dict[str, dict[str, float]] = {}
    if args.base_url:
        results["server"] = asyncio.run(measure(args.base_url, seed))
    else:
        for name, options in (("pd", []), ("aggregated", ["--aggregated"])):
            with mesh([*options, *args.option]) as url:
                results[name] = asyncio.run(measure(url, seed))
    ratios = {f"{name}_itl_p99_over_p50": figures["itl_p99_over_p50"] for name, figures in results.items()}
    print(json.dumps({"ratios": ratios, "figures": results}, indent=2))
    if args.json:
        args.json.write_text(json.dumps({"ratios": ratios, "figures": results}))


if __name__ == "__main__":
    main()
