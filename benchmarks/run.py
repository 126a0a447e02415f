"""`make bench`: every benchmark script, and serving side by side; JSON and a table in benchmarks/results/.

A script NAME.py is run with `--json FILE` and leaves one JSON object there: {"ratios": {name: number}, …}.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.cli.model_path import resolve

HERE = Path(__file__).parent
RESULTS = HERE / "results"
SCRIPTS = ("decode_step", "sampling", "grammars", "transfer", "router", "stall", "overload", "scale")
READY_SECONDS = 300.0
LOAD_SECONDS = 1200.0


@dataclass(frozen=True)
class Load:
    """One cell of the serving comparison."""

    concurrency: int
    prompt: int
    output: int
    requests: int

    @property
    def name(self) -> str:
        """Key in the results."""
        return f"c{self.concurrency} {self.prompt}/{self.output}"


LOADS = (Load(1, 128, 64, 6), Load(8, 128, 64, 24), Load(32, 128, 64, 64), Load(4, 1024, 16, 12))
QUICK = (Load(1, 128, 16, 2), Load(8, 128, 16, 8))


def run_script(name: str) -> dict[str, Any]:
    """Runs one benchmark script; returns its results, or why there are none."""
    out = RESULTS / f"{name}.json"
    out.unlink(missing_ok=True)
    done = subprocess.run([sys.executable, str(HERE / f"{name}.py"), "--json", str(out)], check=False, timeout=1800)
    if done.returncode != 0 or not out.exists():
        return {"error": f"exit code {done.returncode}"}
    result: dict[str, Any] = json.loads(out.read_text())
    return result


@contextlib.contextmanager
def pdmesh(*arguments: str) -> Iterator[tuple[str, float]]:
    """A mesh on the demo model; yields its base URL and the seconds it took to be ready."""
    read_fd, write_fd = os.pipe()
    command = [sys.executable, "-m", "services.cli.main", "serve", "--model", "demo", "--dtype", "float32"]
    command += [
        "--port",
        "0",
        "--bootstrap-port",
        "0",
        "--log-level",
        "warning",
        "--ready-fd",
        str(write_fd),
        *arguments,
    ]
    started = time.monotonic()
    process = subprocess.Popen(command, pass_fds=(write_fd,))
    os.close(write_fd)
    try:
        with os.fdopen(read_fd) as events:
            ready = next((e for e in map(json.loads, events) if e["event"] == "ready"), None)
        if ready is None:
            raise RuntimeError("pdmesh serve did not become ready")
        yield ready["base_url"], time.monotonic() - started
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=20)


@contextlib.contextmanager
def transformers_serve() -> Iterator[tuple[str, float]]:
    """transformers' own server on the same model; yields base URL and seconds to ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = Path(sys.executable).with_name("transformers")
    command = [str(program), "serve", "--continuous-batching", "--device", "cpu", "--dtype", "float32"]
    started = time.monotonic()
    process = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", str(port), str(resolve("demo"))],
        env={**os.environ, "HF_HUB_OFFLINE": "1"}, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_for(f"http://127.0.0.1:{port}/health", process)
        yield f"http://127.0.0.1:{port}/v1", time.monotonic() - started
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=20)


def wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    """Waits until `url` answers at all."""
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"server ended with exit code {process.returncode}")
        try:
            urllib.request.urlopen(url, timeout=2).close()
            return
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"{url} did not answer within {READY_SECONDS:g} s")


def measure(base_url: str, load: Load, model: str | None) -> dict[str, Any]:
    """Sends one load; returns what the client reports, or why it failed."""
    command = [sys.executable, str(HERE / "bench_openai.py"), "--base-url", base_url, "-n", str(load.requests)]
    command += ["-c", str(load.concurrency), "-p", str(load.prompt), "-m", str(load.output)]
    command += ["--model", model] if model else []
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LOAD_SECONDS)
    if not done.stdout.strip():
        return {"error": done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]}
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def serving(loads: tuple[Load, ...], peers: bool) -> dict[str, Any]:
    """All servers, one after the other, under all loads."""
    servers: dict[str, Any] = {"pd": lambda: pdmesh(), "aggregated": lambda: pdmesh("--aggregated")}
    if peers and has_transformers_serve():
        servers["transformers"] = transformers_serve
    results: dict[str, Any] = {}
    for name, start in servers.items():
        try:
            with start() as (base_url, seconds):
                model = str(resolve("demo")) if name == "transformers" else None
                cells = {load.name: measure(base_url, load, model) for load in loads}
            results[name] = {"seconds_to_ready": round(seconds, 2), "loads": cells}
        except (RuntimeError, OSError, subprocess.SubprocessError) as exc:
            results[name] = {"error": str(exc)}
        print(f"serving/{name}: done", file=sys.stderr, flush=True)
    return results


def has_transformers_serve() -> bool:
    """True when `transformers serve` can start here."""
    program = Path(sys.executable).with_name("transformers")
    if not program.exists():
        return False
    done = subprocess.run([str(program), "serve", "--help"], capture_output=True, check=False, timeout=120)
    return done.returncode == 0


def table(results: dict[str, Any]) -> str:
    """The results as markdown: speed of each server per load, and beside it the ratio to the last one."""
    lines = ["# Benchmarks", ""]
    for name, result in results.items():
        if name == "serving":
            continue
        lines += [f"## {name}", ""]
        if "error" in result:
            lines += [str(result["error"]), ""]
            continue
        lines += ["| what | ratio |", "|---|---|"]
        lines += [f"| {what} | {value:.3f} |" for what, value in result.get("ratios", {}).items()] + [""]
    servers: dict[str, Any] = results.get("serving", {})
    if servers:
        lines += [
            "## serving",
            "",
            "Output tokens/s (TTFT p50 / ITL p50 / ITL p99 in ms); × is against the last column.",
            "",
        ]
        lines += ["| load | " + " | ".join(servers) + " |", "|---" * (len(servers) + 1) + "|"]
        ready = [
            f"{s['seconds_to_ready']:.1f} s" if "seconds_to_ready" in s else str(s["error"]) for s in servers.values()
        ]
        lines += ["| ready after | " + " | ".join(ready) + " |"]
        loads: dict[str, Any] = next((s["loads"] for s in servers.values() if "loads" in s), {})
        lines += [f"| {load} | " + " | ".join(cells(servers, load)) + " |" for load in loads]
    return "\n".join(lines) + "\n"


def cells(servers: dict[str, Any], load: str) -> list[str]:
    """One row of the serving table."""
    shown = []
    last = list(servers.values())[-1].get("loads", {}).get(load, {}).get("output_tokens_per_s")
    for server in servers.values():
        cell = server.get("loads", {}).get(load, {})
        if "output_tokens_per_s" not in cell:
            shown.append(str(cell.get("error", "-")))
            continue
        speed, ttft, itl = cell["output_tokens_per_s"], cell["ttft_ms"]["p50"], cell["itl_ms"]
        ratio = f" ×{speed / last:.2f}" if last else ""
        failed = f", {cell['errors']} failed" if cell["errors"] else ""
        shown.append(f"{speed:.1f}{ratio} ({ttft:.0f} / {itl['p50']:.0f} / {itl['p99']:.0f}){failed}")
    return shown


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=(*SCRIPTS, "serving"), help="run only this; may be repeated")
    parser.add_argument("--quick", action="store_true", help="few and short requests: does it work at all?")
    parser.add_argument("--no-peers", action="store_true", help="leave transformers serve out")
    args = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    chosen = args.only or [*SCRIPTS, "serving"]
    results: dict[str, Any] = {}
    for name in SCRIPTS:
        if name in chosen and (HERE / f"{name}.py").exists():
            print(f"{name} …", file=sys.stderr, flush=True)
            results[name] = run_script(name)
    if "serving" in chosen:
        results["serving"] = serving(QUICK if args.quick else LOADS, not args.no_peers)
    (RESULTS / "latest.json").write_text(json.dumps(results, indent=1))
    text = table(results)
    (RESULTS / "latest.md").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
