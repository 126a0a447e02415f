"""Whole meshes of real processes for tests, started through the command line.

    async with Mesh(model_dir, prefill=1, decode=2, options={"kv_tokens": 1024}) as mesh:
        answer = await client.post(f"{mesh.url}/v1/completions", json=...)
        mesh.kill("prefill-0")                          # the service process; engine=True: its engine
        await mesh.gone("prefill-0"); await mesh.start("prefill-0")

Processes are "bootstrap", "router", "prefill-0", "decode-0", …; with several of them "bootstrap-1" and
"router-1" come after the first. Options go to every process that knows them, `overrides` to one kind or one
process. Readiness comes by the handshake. A killed process stays down until start(); its port is kept. Leaving
the block asserts conservation on every live worker (see quiet()), ends all processes, and asserts that each one
ended by itself; after a failed test it prints the status and each process's last lines instead.

For a mesh that a module's tests share, fixture and tests need one loop:
    pytestmark = pytest.mark.asyncio(loop_scope="module")
    @pytest_asyncio.fixture(scope="module", loop_scope="module")
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import tempfile
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from engine_core.types.errors import UnavailableError
from services.cli import explain as explain_command
from services.cli import status as status_command
from services.cli.serve import arguments
from services.cli.supervisor import Child, ChildSpec, Exit
from services.config import ServeConfig, ServiceKind, child_environment
from services.runtime.security import Security
from services.runtime.tasks import TaskOwner

START_TIMEOUT = 90.0
STOP_TIMEOUT = 60.0
LIMIT = 30.0
"""Seconds for what comes at once on a machine with time: only a test that has failed waits so long."""
KEPT_LINES = 400
TEST_DEFAULTS: Mapping[str, Any] = {"threads": 1, "kv_memory_mb": 64, "drain_timeout": 5.0}
"""Small enough for many meshes on two cores; `options` overrides it."""


class Mesh:
    """One mesh; use it as an async context manager."""

    def __init__(
        self,
        model: str | Path,
        *,
        prefill: int = 1,
        decode: int = 1,
        mixed: int = 0,
        router: bool = True,
        routers: int = 1,
        bootstraps: int = 1,
        options: Mapping[str, Any] | None = None,
        overrides: Mapping[str, Mapping[str, Any]] | None = None,
        check_conservation: bool = True,
        kept_lines: int = KEPT_LINES,
    ) -> None:
        self.model = str(model)
        self._kept_lines = kept_lines
        self.check_conservation = check_conservation
        """May be set to False by a test that leaves a process stopped on purpose."""
        passed = {**TEST_DEFAULTS, **(options or {})}
        own = {n: passed.pop(n) for n in list(passed) if n in ServeConfig.model_fields}
        self._config = ServeConfig(model=self.model, options=passed, **own)
        self._overrides = dict(overrides or {})
        self._kinds: dict[str, ServiceKind] = {f"prefill-{i}": "prefill" for i in range(prefill)}
        self._kinds |= {f"decode-{i}": "decode" for i in range(decode)}
        self._kinds |= {f"mixed-{i}": "decode" for i in range(mixed)}
        self._routers = _numbered("router", routers if router else 0)
        self._bootstraps = _numbered("bootstrap", bootstraps)
        self._children: dict[str, Child] = {}
        self._exits: dict[str, Exit] = {}
        self._lives: dict[str, asyncio.Task[None]] = {}
        self._ports: dict[str, int] = {}
        self._lines: dict[str, deque[str]] = {}
        self._killed: set[str] = set()
        self._tasks = TaskOwner("mesh")
        self._sockets = ""

    # ---- life ---------------------------------------------------------------------------------------

    async def __aenter__(self) -> Mesh:
        self._sockets = tempfile.mkdtemp(prefix="pdmesh-test-")
        try:
            await asyncio.gather(*(self.start(name) for name in self._bootstraps))
            await asyncio.gather(*(self.start(name) for name in (*self._kinds, *self._routers)))
            for name in self._routers:
                await self.until_ready(router=name)
        except BaseException:
            self._print_lines()
            await self._end(quick=True)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if exc is None and self.check_conservation:
                await self.quiet()
        except BaseException:
            await self._print_state()
            await self._end(quick=True)
            raise
        if exc is not None:
            await self._print_state()
        await self._end(quick=exc is not None)
        if exc is None:
            bad = {n: e.reason for n, e in self._exits.items() if e.code != 0 and n not in self._killed}
            if bad:
                self._print_lines()
            assert not bad, f"processes did not end cleanly: {bad}"

    async def start(self, name: str) -> None:
        """Starts one process, or starts it again on its port, and waits until it is ready.

        A worker that the mesh did not begin with joins by its name: prefill-N, decode-N or mixed-N.
        """
        if name == "router" and name not in self._routers:
            self._routers.append(name)  # began without one
        if name not in (*self._bootstraps, *self._routers):
            self._kinds.setdefault(name, "prefill" if name.startswith("prefill") else "decode")
        assert name not in self._children or self._children[name].gone.is_set(), f"{name} runs"
        self._killed.discard(name)
        self._exits.pop(name, None)
        lines = self._lines.setdefault(name, deque(maxlen=self._kept_lines))
        child = Child(self._spec(name), lambda _n, line: lines.append(line), silence=1e6, start_timeout=START_TIMEOUT)
        self._children[name] = child

        async def live() -> None:
            self._exits[name] = await child.run_once()

        running = self._lives[name] = self._tasks.spawn(live(), name)
        ready = self._tasks.spawn(child.ready.wait(), f"{name} ready")
        await asyncio.wait({running, ready}, timeout=START_TIMEOUT, return_when=asyncio.FIRST_COMPLETED)
        if not child.ready.is_set():
            ready.cancel()
            end = self._exits[name].reason if name in self._exits else "not ready in time"
            raise AssertionError(f"{name} did not start: {end}\n" + "\n".join(lines))
        self._ports[name] = int(str(child.info["endpoint"]).rpartition(":")[2])

    def configure(self, name: str, **options: Any) -> None:
        """Options of one process from its next start on."""
        self._overrides[name] = {**self._overrides.get(name, {}), **options}

    async def until_ready(self, timeout: float = START_TIMEOUT, router: str = "router") -> None:
        """Waits until a router answers 200 on /readiness."""
        last = ""
        async with httpx.AsyncClient(timeout=5.0, trust_env=False) as client, asyncio.timeout(timeout):
            while True:
                try:
                    answer = await client.get(f"{self.url_of(router)}/readiness")
                    if answer.status_code == 200:
                        return
                    last = answer.text
                except httpx.HTTPError as exc:
                    last = str(exc)
                assert router not in self._exits, f"{router} ended: {last}"
                await asyncio.sleep(0.05)

    # ---- places -------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """The router's address, without /v1."""
        return self.url_of("router")

    def url_of(self, router: str) -> str:
        """The address of one of several routers, without /v1."""
        return f"http://127.0.0.1:{self._ports[router]}"

    @property
    def base_url(self) -> str:
        """What an OpenAI client takes."""
        return f"{self.url}/v1"

    @property
    def security(self) -> Security:
        """What whoever speaks to the mesh must show, by its options."""
        return Security.of(self._config)

    @property
    def bootstrap(self) -> str:
        """host:port of Bootstrap; of the first that runs when there are several."""
        up = [name for name in self._bootstraps if name in self._children and self.pid(name)]
        return self.endpoint(up[0] if up else "bootstrap")

    def endpoint(self, name: str) -> str:
        """host:port of one process."""
        return f"127.0.0.1:{self._ports[name]}"

    def pid(self, name: str) -> int:
        """The service process's id; 0 when it is down."""
        return self._children[name].pid

    def engine_pid(self, name: str) -> int:
        """The engine process's id, as the worker told it when it became ready."""
        return int(str(self._children[name].info["engine_pid"]))

    def ready(self, name: str) -> bool:
        """True when the process has said so in its present life."""
        return self._children[name].ready.is_set() and not self._children[name].gone.is_set()

    def end_of(self, name: str) -> str:
        """Why a process ended last."""
        return self._exits[name].reason

    def mark_killed(self, name: str) -> None:
        """Whatever way it ends, the test has done it."""
        self._killed.add(name)

    @property
    def pids(self) -> dict[str, int]:
        """Ids of the service processes that run, by name."""
        return {name: child.pid for name, child in self._children.items() if child.pid}

    def lines(self, name: str) -> list[str]:
        """The last lines that a process has written, of all its lives."""
        return list(self._lines[name])

    # ---- questions ----------------------------------------------------------------------------------

    async def status(self) -> dict[str, Any]:
        """What `pdmesh status --json` prints."""
        return await status_command.collect(self.bootstrap, 5.0, self.security)

    async def rank(self, name: str, *, fresh: bool = True) -> dict[str, Any]:
        """One worker's entry in the status; `fresh` waits until its engine tells its figures anew."""
        deadline = asyncio.get_running_loop().time() + LIMIT
        while True:
            rank = next(rank for rank in (await self.status())["ranks"] if rank["instance"] == name)
            if not fresh or (rank["answers"] and not rank["figures_age_seconds"]):
                return dict(rank)
            assert asyncio.get_running_loop().time() < deadline, f"{name} does not tell its figures: {rank}"
            await asyncio.sleep(0.05)

    async def explain(self, request_id: str) -> dict[str, Any]:
        """What `pdmesh explain --json` prints."""
        return await explain_command.collect(self.bootstrap, request_id, 5.0, self.security)

    async def quiet(self, within: float = LIMIT) -> list[dict[str, Any]]:
        """Waits until every live worker has free + cached = total and no session, stream or task, by figures of
        now; the workers' entries in that status.

        Raises AssertionError with what was left after `within` seconds.
        """
        deadline = asyncio.get_running_loop().time() + within
        while True:
            left, ranks = await self._unquiet()
            if not left:
                return ranks
            assert asyncio.get_running_loop().time() < deadline, f"not quiet after {within:g} s: {json.dumps(left)}"
            await asyncio.sleep(0.05)

    async def _unquiet(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """What is left of anything, and the entries of all workers."""
        workers = {name for name in self._kinds if self.pid(name)}
        if not workers:
            return [], []
        if not any(self.pid(name) for name in self._bootstraps):
            return [{"bootstrap": "is down: start it before the mesh ends"}], []
        try:
            ranks = {rank["instance"]: rank for rank in (await self.status())["ranks"]}
        except UnavailableError as exc:
            return [{"bootstrap": str(exc)}], []
        left: list[dict[str, Any]] = []
        for name in sorted(workers):
            rank = ranks.get(name)
            if rank is None or not rank["answers"] or rank["pid"] != self.pid(name):
                left.append({"instance": name, "answers": False})
                continue
            kv = rank["kv"]
            busy = {n: rank[n] for n in ("sessions", "streams", "tasks", "figures_age_seconds") if rank[n]}
            if busy or kv["free"] + kv["cached"] != kv["total"] or not kv["total"]:
                left.append({"instance": name, "kv": kv, **busy})
        return left, list(ranks.values())

    # ---- faults -------------------------------------------------------------------------------------

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Sends a signal to a service process."""
        if number not in (signal.SIGSTOP, signal.SIGCONT):
            self._killed.add(name)
        os.kill(self._children[name].pid, number)

    async def kill_engine(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Sends a signal to a worker's engine process."""
        if number not in (signal.SIGSTOP, signal.SIGCONT):
            self._killed.add(name)
        os.kill((await self.rank(name, fresh=False))["engine_pid"], number)

    async def gone(self, name: str, within: float = 30.0) -> Exit:
        """Waits until a process has ended; says how."""
        async with asyncio.timeout(within):
            await asyncio.shield(self._lives[name])
        return self._exits[name]

    # ---- inside -------------------------------------------------------------------------------------

    def _spec(self, name: str) -> ChildSpec:
        kind: ServiceKind = self._kinds.get(name) or ("router" if name in self._routers else "bootstrap")
        chosen: dict[str, Any] = {"port": self._ports.get(name, 0)}
        if kind != "bootstrap":
            chosen["bootstrap"] = tuple(self.endpoint(bootstrap) for bootstrap in self._bootstraps)
        if kind in ("prefill", "decode"):
            chosen |= {"instance": name, "socket_dir": self._sockets}
        values = self._config.child_values(kind, **chosen)
        values |= dict(self._overrides.get(kind, {})) | dict(self._overrides.get(name, {}))
        return ChildSpec(name, arguments(kind, values, mixed=name.startswith("mixed")), 0, child_environment())

    async def _end(self, *, quick: bool) -> None:
        order = [self._routers, list(self._kinds), self._bootstraps]
        for names in order:
            children = [self._children[n] for n in names if n in self._children]
            for child in children:
                child.signal(signal.SIGCONT)
                child.signal(signal.SIGKILL if quick else signal.SIGTERM)
            waits = [asyncio.wait_for(child.gone.wait(), STOP_TIMEOUT) for child in children]
            late = [
                c
                for c, r in zip(children, await asyncio.gather(*waits, return_exceptions=True), strict=True)
                if r is not True
            ]
            for child in late:
                child.signal(signal.SIGKILL)
        await self._tasks.join(10.0)
        await self._tasks.close()
        shutil.rmtree(self._sockets, ignore_errors=True)

    async def _print_state(self) -> None:
        try:
            print("status:", json.dumps(await self.status()))
        except (UnavailableError, KeyError) as exc:
            print("status:", exc)
        self._print_lines()

    def _print_lines(self) -> None:
        for name, lines in self._lines.items():
            end = f" ({self._exits[name].reason})" if name in self._exits else ""
            print(f"--- {name}{end}", *list(lines)[-40:], sep="\n")


def _numbered(name: str, count: int) -> list[str]:
    return [name, *(f"{name}-{i}" for i in range(1, count))][:count]
