"""`pdmesh serve` as a user runs it: ready line, supervision, two-stage stop, nothing left after kill -9."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from models.tiny import make_tiny
from services.cli import status as status_command
from services.config import child_environment
from tests.deploy.fleet import Notified

DEADLINE = 90.0
SERVE = (sys.executable, "-m", "services.cli.main", "serve", "--port", "0", "--bootstrap-port", "0")


class Serving:
    """A `pdmesh serve` process that is ready."""

    def __init__(self, process: asyncio.subprocess.Process, ready: dict[str, Any], line: str) -> None:
        self.process, self.ready, self.line = process, ready, line

    async def complete(self, max_tokens: int = 4) -> httpx.Response:
        """One short completion."""
        async with httpx.AsyncClient(timeout=DEADLINE, trust_env=False) as client:
            body = {"model": "default", "prompt": "hello", "max_tokens": max_tokens, "ignore_eos": True}
            return await client.post(f"{self.ready['base_url']}/completions", json=body)

    async def status(self) -> dict[str, Any]:
        """As `pdmesh status --json`."""
        return await status_command.collect(self.ready["bootstrap"], 5.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("serve") / "tiny-llama")


@contextlib.asynccontextmanager
async def serve(model: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> AsyncIterator[Serving]:
    read_fd, write_fd = os.pipe()
    process = await asyncio.create_subprocess_exec(
        *SERVE, "--model", str(model),
        "--threads", "1", "--kv-memory-mb", "32", "--drain-timeout", "5", "--ready-fd", str(write_fd), *arguments,
        pass_fds=(write_fd,), stdout=asyncio.subprocess.PIPE, env=child_environment() | dict(environment or {}),
        start_new_session=True,
    )  # fmt: skip
    os.close(write_fd)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(DEADLINE):
            line = (await process.stdout.readline()).decode().rstrip()
        with os.fdopen(read_fd) as events:
            ready = json.loads(events.readline())
        yield Serving(process, ready, line)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(DEADLINE):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()


def running(pid: int) -> bool:
    """True for a process that exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + DEADLINE
    while any(running(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still there: {[pid for pid in pids if running(pid)]}"
        await asyncio.sleep(0.05)


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Notified]:
    made = Notified(tmp_path / "notify")
    yield made
    made.close()


async def test_a_mesh_says_where_it_is_restarts_what_dies_and_drains(model: Path, manager: Notified) -> None:
    watched = {"NOTIFY_SOCKET": str(manager.path), "WATCHDOG_USEC": "60000000"}
    async with serve(model, environment=watched) as mesh:
        url = mesh.ready["base_url"]
        assert manager.seen()[:6] == [
            f"STATUS=looking for the model {model}",
            "STATUS=starts Bootstrap",
            "STATUS=starts the router and 1 prefill + 1 decode; loading a model takes a while",
            "READY=1",
            f"STATUS=serving {url}",
            "WATCHDOG=1",
        ]
        assert mesh.line == f"pdmesh is ready: {url} (model tiny-llama, 1 prefill + 1 decode, transfer shm)"
        assert (await mesh.complete()).json()["usage"]["completion_tokens"] == 4

        status = await mesh.status()
        assert sorted(s["name"] for s in status["services"]) == ["bootstrap", "decode", "prefill", "router"]
        assert {r["instance"]: r["role"] for r in status["ranks"]} == {"prefill-0": "PREFILL", "decode-0": "DECODE"}
        before = next(r for r in status["ranks"] if r["instance"] == "decode-0")

        os.kill(before["pid"], signal.SIGKILL)
        deadline = time.monotonic() + DEADLINE
        while True:
            assert time.monotonic() < deadline, "decode-0 did not come back"
            after = next((r for r in (await mesh.status())["ranks"] if r["instance"] == "decode-0"), before)
            if after["answers"] and after["incarnation"] > before["incarnation"] and after["state"] == "READY":
                break
            await asyncio.sleep(0.1)
        assert after["endpoint"] == before["endpoint"]
        assert not running(before["engine_pid"])
        while (answer := await mesh.complete()).status_code == 503:
            assert time.monotonic() < deadline, answer.text
            await asyncio.sleep(0.1)
        assert answer.json()["usage"]["completion_tokens"] == 4
        assert f"STATUS=serving {url} without decode-0" in manager.seen()
        while [said for said in manager.seen() if said.startswith("STATUS=")][-1] != f"STATUS=serving {url}":
            assert time.monotonic() < deadline, manager.seen()
            await asyncio.sleep(0.1)

        pids = [s["pid"] for s in (await mesh.status())["services"]]
        pids += [r["engine_pid"] for r in (await mesh.status())["ranks"]]
        mesh.process.send_signal(signal.SIGINT)
        async with asyncio.timeout(DEADLINE):
            assert await mesh.process.wait() == 0
        await until_gone(pids)
    assert manager.seen().count("READY=1") == manager.seen().count("STOPPING=1") == 1, "its children say nothing"


async def test_nothing_is_left_when_serve_is_killed(model: Path) -> None:
    async with serve(model, "--aggregated") as mesh:
        assert mesh.line.endswith("(model tiny-llama, 1 mixed)")
        assert (await mesh.complete()).json()["usage"]["completion_tokens"] == 4
        status = await mesh.status()
        assert [r["role"] for r in status["ranks"]] == ["MIXED"]
        pids = [s["pid"] for s in status["services"]] + [r["engine_pid"] for r in status["ranks"]]
        mesh.process.kill()
        await mesh.process.wait()
        await until_gone(pids)


async def test_a_damaged_model_ends_the_start_with_one_line(tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "damaged")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    process = await asyncio.create_subprocess_exec(
        *SERVE, "--model", str(model), "--log-level", "warning",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=child_environment(),
    )  # fmt: skip
    async with asyncio.timeout(DEADLINE):
        out, err = await process.communicate()
    last = err.decode().strip().splitlines()[-1]
    assert process.returncode == 2 and out == b""
    assert last.startswith("pdmesh: error: ") and str(weights) in last
