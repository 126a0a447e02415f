"""`pdmesh serve` as a child process of a test, and what can be seen of it from outside.

    async with Serving(model, "--prefill", "2", "--decode", "2") as mesh:
        os.kill(mesh.pids()["prefill-0"], SIGKILL)
        await until(lambda: mesh.said("prefill-0", "died: killed by SIGKILL"), "reported", 10.0)
        await mesh.until_quiet()

Leaving the block stops it by SIGTERM; it must end by itself, with the code 0, and leave neither process nor
file. A test that ends it in another way says so by `ended()`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from engine_core.types.errors import UnavailableError
from services.cli import explain as explain_command
from services.cli import status as status_command
from services.config import child_environment
from services.runtime.tasks import TaskOwner

PDMESH = (sys.executable, "-m", "services.cli.main")
START_TIMEOUT = 90.0
STOP_TIMEOUT = 90.0
LIMIT = 60.0
"""Seconds for what comes much sooner on a machine with time."""


class Serving:
    """One `pdmesh serve`."""

    def __init__(self, model: str | Path, *arguments: str, temporary: str = "") -> None:
        self.ready: dict[str, Any] = {}
        self.line = ""
        """The line on stdout that says where it is."""
        self.lines: deque[str] = deque(maxlen=4000)
        """stderr."""
        self.workers: set[str] = set()
        """Names in the rank table."""
        self._arguments = ("--model", str(model), "--threads", "1", "--drain-timeout", "10", *arguments)
        self._process: asyncio.subprocess.Process | None = None
        self._tasks = TaskOwner("serving")
        self.temporary, self._owns_temporary = temporary, not temporary
        """Its folder for temporary files."""
        self._ended = False
        self._seen: set[int] = set()

    # ---- life ---------------------------------------------------------------------------------------

    async def __aenter__(self) -> Serving:
        self.temporary = self.temporary or tempfile.mkdtemp(prefix="pdm-")
        read_fd, write_fd = os.pipe()
        command = (*PDMESH, "serve", "--port", "0", "--bootstrap-port", "0", "--ready-fd", str(write_fd))
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command, *self._arguments, pass_fds=(write_fd,), start_new_session=True,
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
                env=child_environment() | {"TMPDIR": self.temporary},
            )  # fmt: skip
        finally:
            os.close(write_fd)
        self._tasks.spawn(self._read(self._process.stderr), "stderr")
        try:
            assert self._process.stdout is not None
            async with asyncio.timeout(START_TIMEOUT):
                self.line = (await self._process.stdout.readline()).decode().rstrip()
            with os.fdopen(read_fd) as events:
                self.ready = json.loads(events.readline())
            self.workers = {rank["instance"] for rank in (await self.status())["ranks"]}
        except BaseException:
            print(*self.lines, sep="\n")
            await self._end_at_once()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if exc is not None:
            with contextlib.suppress(UnavailableError):
                print("status:", json.dumps(await self.status()))
            print(*list(self.lines)[-120:], sep="\n")
            await self._end_at_once()
            return
        try:
            if not self._ended:
                self.signal(signal.SIGTERM)
                assert await self.ended() == 0, "\n".join(list(self.lines)[-40:])
                assert self.sockets() == [] and self.folders() == []
            await until_gone(self._seen)
        finally:
            await self._end_at_once()

    async def ended(self, within: float = STOP_TIMEOUT) -> int:
        """Waits for the end of `pdmesh serve`; its exit code. Nothing is asked of it after that."""
        assert self._process is not None
        self._ended = True
        async with asyncio.timeout(within):
            return await self._process.wait()

    async def _end_at_once(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        with contextlib.suppress(AssertionError):
            await until_gone(self._seen)
        await self._tasks.close()
        if self._owns_temporary:
            shutil.rmtree(self.temporary, ignore_errors=True)

    async def _read(self, stream: asyncio.StreamReader | None) -> None:
        assert stream is not None
        while line := await stream.readline():
            self.lines.append(line.decode(errors="replace").rstrip())

    # ---- what it is ---------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """The router's address, without /v1."""
        return str(self.ready["base_url"]).removesuffix("/v1")

    @property
    def pid(self) -> int:
        """Of `pdmesh serve` itself."""
        assert self._process is not None
        return self._process.pid

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to `pdmesh serve` itself."""
        os.kill(self.pid, number)

    async def status(self) -> dict[str, Any]:
        """As `pdmesh status --json`. Raises UnavailableError."""
        status = await status_command.collect(self.ready["bootstrap"], 5.0)
        self._seen |= {s["pid"] for s in status["services"]} | {r["engine_pid"] for r in status["ranks"]}
        self._seen.discard(0)
        return status

    async def ranks(self) -> dict[str, dict[str, Any]]:
        """The workers of the status by name."""
        return {rank["instance"]: rank for rank in (await self.status())["ranks"]}

    async def pids(self) -> dict[str, int]:
        """All processes of the mesh: service processes by name, engines as NAME/engine."""
        status = await self.status()
        found = {s["instance"] or s["name"]: s["pid"] for s in status["services"] if s["answers"]}
        return found | {f"{r['instance']}/engine": r["engine_pid"] for r in status["ranks"] if r["answers"]}

    async def timelines(self, request_ids: Iterable[str]) -> str:
        """`pdmesh explain` of requests, as far as the processes remember them; then what serve has warned of."""
        text = []
        for request_id in request_ids:
            found = await explain_command.collect(self.ready["bootstrap"], request_id, 5.0)
            text += [request_id, *(f"    {move}" for move in found["moves"])]
        return "\n".join([*text, *(line for line in self.lines if " I " not in line)])

    def said(self, name: str, text: str, after: int = 0) -> bool:
        """True when a line of stderr is about `name` and has `text`."""
        return any(line.startswith(f"{name} ") and text in line for line in list(self.lines)[after:])

    def sockets(self) -> list[str]:
        """Link sockets in the file system, those under construction included."""
        return sorted(p.name for p in Path(self.temporary).rglob("*.sock"))

    def folders(self) -> list[str]:
        """Its folders of sockets, and those that others left."""
        return sorted(p.name for p in Path(self.temporary).glob("pdmesh-*"))

    async def generate(self, prompt: Iterable[int], max_tokens: int = 4) -> httpx.Response:
        """One request to /generate, whose answer names the workers."""
        body = {"input_ids": list(prompt), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        async with httpx.AsyncClient(timeout=60.0, trust_env=False) as client:
            return await client.post(f"{self.url}/generate", json=body)

    # ---- waiting ------------------------------------------------------------------------------------

    async def until_quiet(self, within: float = LIMIT) -> None:
        """Waits until each worker answers, is READY, has free + cached = total, and no session, stream, task."""
        left: list[str] = ["no status"]

        async def quiet() -> bool:
            try:
                ranks = (await self.status())["ranks"]
                left[:] = unquiet(ranks) + sorted(self.workers - {rank["instance"] for rank in ranks})
            except UnavailableError as exc:
                left[:] = [str(exc)]
            return not left

        with _telling(lambda: left):
            await until(quiet, "quiet", within)

    async def until_connected(self) -> None:
        """Waits until each prefill worker has a link with each decode worker, and the router a channel to each
        worker: what a restart has cut is there again, and opens no more files."""
        left: list[str] = []

        async def connected() -> bool:
            ranks = (await self.status())["ranks"]
            peers = {role: {r["incarnation"] for r in ranks if r["role"] == role} for role in ("PREFILL", "DECODE")}
            left.clear()
            for rank in ranks:
                wanted = peers["DECODE" if rank["role"] == "PREFILL" else "PREFILL"]
                if {pair["peer_incarnation"] for pair in rank["pairs"] if pair["up"]} != wanted:
                    left.append(f"{rank['instance']}: {rank['pairs']}")
            async with httpx.AsyncClient(timeout=LIMIT, trust_env=False) as client:
                metrics = (await client.get(f"{self.url}/metrics")).text.splitlines()
            up = [line for line in metrics if line.startswith("pdmesh_worker_up{")]
            left.extend(line for line in up if not line.endswith(" 1.0"))
            return not left and len(up) == len(ranks)

        with _telling(lambda: left):
            await until(connected, "connected", LIMIT)

    async def until_back(self, name: str, before: int, within: float = START_TIMEOUT) -> dict[str, Any]:
        """Waits until a worker is READY under an incarnation above `before`; its entry in the status."""
        found: dict[str, Any] = {}

        async def back() -> bool:
            try:
                rank = (await self.ranks()).get(name)
            except UnavailableError:
                return False
            if rank is None or not rank["answers"] or rank["state"] != "READY" or rank["incarnation"] <= before:
                return False
            found.update(rank)
            return True

        await until(back, f"{name} is back", within)
        return found


async def until(reached: Callable[[], bool] | Callable[[], Awaitable[bool]], what: str, within: float) -> None:
    """Looks every 50 ms until `reached()`; raises AssertionError after `within` seconds."""
    deadline = time.monotonic() + within
    while True:
        answer = reached()
        if answer if isinstance(answer, bool) else await answer:
            return
        assert time.monotonic() < deadline, f"not reached within {within:g} s: {what}"
        await asyncio.sleep(0.05)


def unquiet(ranks: Iterable[dict[str, Any]]) -> list[str]:
    """What keeps the workers from being at rest, one line each; conservation is checked on all."""
    left = []
    for rank in ranks:
        kv = rank["kv"]
        if not rank["answers"] or rank["state"] != "READY":
            left.append(f"{rank['instance']} is {rank['state']}, answers: {rank['answers']}")
            continue
        total = sum(kv[part] for part in ("free", "used", "cached", "pinned", "quarantined"))
        assert total == kv["total"] > 0, f"{rank['instance']} lost blocks: {kv}"
        busy = {n: rank[n] for n in ("sessions", "streams", "tasks", "figures_age_seconds") if rank[n]}
        if busy or kv["free"] + kv["cached"] != kv["total"]:
            left.append(f"{rank['instance']}: {busy} {kv}")
    return left


def running(pid: int) -> bool:
    """True for a process that exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def until_gone(pids: Iterable[int], within: float = LIMIT) -> None:
    """Waits until none of the processes runs."""
    watched = list(pids)
    with _telling(lambda: [pid for pid in watched if running(pid)]):
        await until(lambda: not any(running(pid) for pid in watched), "processes are gone", within)


def descriptors(pid: int) -> int:
    """How many file descriptors a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


@contextlib.contextmanager
def _telling(what: Callable[[], object]) -> Any:
    try:
        yield
    except AssertionError as exc:
        raise AssertionError(f"{exc}: {what()}") from None
