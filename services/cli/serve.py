"""`pdmesh serve`: the whole mesh on this machine.

Bootstrap → workers and router, side by side → all ready, /readiness is 200 → "pdmesh is ready: …"
→ children that die are started again on their ports → Ctrl-C: router, then workers, then Bootstrap drain

Where a service manager listens (systemd, Type=notify) this process alone speaks to it: READY once a pair can be placed.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.text import Text

from engine_core.types.errors import ConfigError, UnavailableError
from engine_core.types.request import Role
from services.cli.handshake import Reporter
from services.cli.model_path import resolve, served_names
from services.cli.options import add_command
from services.cli.progress import Progress
from services.cli.status import collect
from services.cli.supervisor import ChildSpec, Exit, StartFailedError, Supervisor
from services.config import (
    ServeConfig,
    ServiceKind,
    child_environment,
    load,
    serve_options,
    service_manager,
    without_secrets,
)
from services.runtime.notify import ServiceManager
from services.runtime.security import Security
from services.runtime.tasks import Stop, TaskOwner, run
from services.runtime.tls import pinned_context

_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green", "bright_magenta")
_ROUTER, _WORKERS, _BOOTSTRAP = 0, 1, 2
_FIRST_PORT = {"prefill": 8001, "decode": 8100}
_FIRST_METRICS_PORT = 9100


def add_command_to(app: typer.Typer) -> None:
    """Adds `serve`, with its own flags and those of the services it starts."""
    own = {n: ServeConfig for n in ServeConfig.model_fields if n not in ("options", "overrides")}
    ready = typer.Option("--ready-fd", metavar="FD", help="Report readiness there, as JSON lines", hidden=True)
    add_command(
        app, "serve", own | serve_options(), _command,
        doc="Run the whole mesh on this machine. Options of the services are passed on to them.",
        extras={"ready_fd": (Annotated[int | None, ready], None)},
    )  # fmt: skip


def _command(file: Path | None, flags: dict[str, Any], extra: dict[str, Any]) -> int:
    config = load(ServeConfig, file=file, flags=flags)
    manager = service_manager()
    manager.tell(STATUS=f"looking for the model {config.model}")
    directory = resolve(config.model, fetch=True)
    return run(lambda stop: Serve(config, directory, Reporter(extra["ready_fd"]), manager).run(stop))


class Serve:
    """One run of the mesh."""

    def __init__(self, config: ServeConfig, directory: Path, reporter: Reporter, manager: ServiceManager) -> None:
        self._config, self._directory, self._reporter, self._manager = config, directory, reporter, manager
        self._console = Console(file=sys.stderr, highlight=False, soft_wrap=True)
        self._width = max(len(name) for name in ("bootstrap", *self._worker_names()))
        self._colour: dict[str, str] = {}

    async def run(self, stop: Stop) -> int:
        """Starts everything, serves until told to stop, ends everything. Returns the exit code."""
        sockets = _sockets_directory()
        progress = Progress(lambda line: self._say("serve", line), self._manager, stop)
        supervisor = Supervisor(
            self._say,
            silence=self._config.heartbeat_timeout,
            start_timeout=self._config.start_timeout,
            on_change=lambda: progress.changed(supervisor.down),
        )
        tasks, code = TaskOwner("serve"), 0
        try:
            start = tasks.spawn(self._start(supervisor, sockets, progress), "start")
            waiting = tasks.spawn(progress.name_who_is_awaited(lambda: supervisor.down), "who is awaited")
            draining = tasks.spawn(stop.draining.wait(), "signal")
            await asyncio.wait({start, draining}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            failure = start.result() if start.done() else None
            if failure is None:
                await draining
                limit = f"{self._config.drain_timeout:g} s"
                self._say("serve", f"stopping; once more Ctrl-C ends at once, else open requests get {limit}")
            else:
                code = failure.end.code if failure.end.code > 0 else 1
                print(f"pdmesh: error: {failure}", file=sys.stderr)
                self._reporter.failed(str(failure), code)
                progress.failed(str(failure))
        finally:
            progress.ending()
            await tasks.close()
            await supervisor.stop(stop.now, self._config.drain_timeout + 10.0)
            await progress.close()
            shutil.rmtree(sockets, ignore_errors=True)
        return code

    async def _start(self, supervisor: Supervisor, sockets: str, progress: Progress) -> StartFailedError | None:
        """Starts everything; returns what stood in the way, if anything."""
        try:
            await self._start_all(supervisor, sockets, progress)
        except StartFailedError as exc:
            return exc
        return None

    async def _start_all(self, supervisor: Supervisor, sockets: str, progress: Progress) -> None:
        config = self._config
        progress.step("starts Bootstrap")
        bootstrap_port = config.bootstrap_port or _free_port(0)
        taken = {bootstrap_port, config.port}
        metrics = self._metrics("bootstrap", taken)
        spec = self._spec("bootstrap", "bootstrap", _BOOTSTRAP, host="127.0.0.1", port=bootstrap_port, **metrics)
        await supervisor.until_ready([supervisor.add(spec)], config.start_timeout)

        progress.step(f"starts the router and {self._workers}; loading a model takes a while")
        model = {
            "model": str(self._directory),
            "served_model_name": config.options.get("served_model_name") or served_names(config.model, self._directory),
            "bootstrap": f"127.0.0.1:{bootstrap_port}",
        }
        for name in self._worker_names():
            kind: ServiceKind = "prefill" if name.startswith("prefill") else "decode"
            # Who asks for a free HTTP port runs several meshes: their workers must not race for the usual ports.
            port = _free_port(_FIRST_PORT[kind] if config.port else 0, taken)
            taken.add(port)
            chosen = model | {"port": port, "instance": name, "socket_dir": sockets} | self._metrics(kind, taken)
            supervisor.add(self._spec(kind, name, _WORKERS, **chosen))
        port = config.port or _free_port(0, taken)
        supervisor.add(self._spec("router", "router", _ROUTER, host=config.host, port=port, **model))
        await supervisor.until_ready(supervisor.children, config.start_timeout)

        local = "127.0.0.1" if config.host in ("0.0.0.0", "::", "") else config.host
        cert = config.child_values("router").get("http_tls_cert", "")
        url = f"{'https' if cert else 'http'}://{local}:{port}"
        await _until_answering(f"{url}/readiness", supervisor, config.start_timeout, cert)
        progress.serving(f"{url}/v1")
        await self._announce(url, f"127.0.0.1:{bootstrap_port}", model["served_model_name"], supervisor)

    async def _announce(self, url: str, bootstrap: str, names: Any, supervisor: Supervisor) -> None:
        config = self._config
        name = names[0] if isinstance(names, tuple | list) else str(names)
        detail = f"model {name}, {self._workers}"
        if not config.aggregated:
            used = await _transports(bootstrap, config.prefill * config.decode, Security.of(config))
            detail += f", transfer {'/'.join(used) or config.options.get('transfer_backend', 'auto')}"
        print(f"pdmesh is ready: {url}/v1 ({detail})", flush=True)
        pids = {child.spec.name: child.pid for child in supervisor.children}
        self._reporter.ready(
            {"name": "serve", "pid": os.getpid(), "endpoint": url.partition("://")[2], "base_url": f"{url}/v1",
             "bootstrap": bootstrap, "model": name, "pids": pids}
        )  # fmt: skip

    @property
    def _workers(self) -> str:
        config = self._config
        return "1 mixed" if config.aggregated else f"{config.prefill} prefill + {config.decode} decode"

    def _worker_names(self) -> list[str]:
        if self._config.aggregated:
            return ["mixed-0"]
        prefill = [f"prefill-{i}" for i in range(self._config.prefill)]
        return prefill + [f"decode-{i}" for i in range(self._config.decode)]

    def _metrics(self, kind: ServiceKind, taken: set[int]) -> dict[str, int]:
        """A port for /metrics that stays the same when the service starts anew."""
        if "metrics_port" in self._config.overrides.get(kind, {}):
            return {}
        port = _free_port(_FIRST_METRICS_PORT if self._config.port else 0, taken)
        taken.add(port)
        return {"metrics_port": port}

    def _spec(self, kind: ServiceKind, name: str, stop_group: int, **chosen: Any) -> ChildSpec:
        values, hidden = without_secrets(self._config.child_values(kind, **chosen))
        mixed = kind == "decode" and self._config.aggregated
        return ChildSpec(name, arguments(kind, values, mixed=mixed), stop_group, child_environment() | hidden)

    def _say(self, name: str, line: str) -> None:
        colour = self._colour.setdefault(name, _COLOURS[len(self._colour) % len(_COLOURS)])
        self._console.print(Text(f"{name:<{self._width}} | ", style=colour) + Text(line))


def arguments(kind: ServiceKind, values: Mapping[str, Any], *, mixed: bool = False) -> tuple[str, ...]:
    """The command line, after `pdmesh`, of one service with these values by field."""
    parts: list[str] = [kind, *(["--aggregated"] if mixed else [])]
    for field, value in values.items():
        if field != "role":
            parts += _flag(field, value)
    return tuple(parts)


def _flag(field: str, value: Any) -> list[str]:
    flag = "--" + field.replace("_", "-")
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag[2:]}"]
    if isinstance(value, tuple | list):
        return [part for item in value for part in (flag, str(item))]
    return [flag, str(value)]


def _sockets_directory() -> str:
    """A directory of this process's own; those of processes that were killed are removed."""
    for old in Path(tempfile.gettempdir()).glob("pdmesh-serve-*"):
        pid = old.name.split("-")[2]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists() and Path("/proc/self").exists():
            shutil.rmtree(old, ignore_errors=True)
    return tempfile.mkdtemp(prefix=f"pdmesh-serve-{os.getpid()}-")


async def _transports(bootstrap: str, pairs: int, security: Security) -> list[str]:
    """The transports of the links between workers, once `pairs` of them are up, or after some seconds anyhow."""
    deadline = asyncio.get_running_loop().time() + 5.0
    while True:
        try:
            ranks = (await collect(bootstrap, 2.0, security))["ranks"]
        except UnavailableError:
            ranks = []
        up = [pair["transport"] for r in ranks if r["role"] == Role.DECODE for pair in r["pairs"] if pair["up"]]
        if len(up) >= pairs or asyncio.get_running_loop().time() >= deadline:
            return sorted(set(up))
        await asyncio.sleep(0.1)


def _free_port(preferred: int, taken: Collection[int] = ()) -> int:
    """The first of `preferred` and the 99 ports after it that nobody listens on; with 0 any free port.

    Raises ConfigError.
    """
    for port in range(preferred, preferred + 100):
        if port in taken:
            continue
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port if preferred else 0))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise ConfigError(f"no free port in {preferred}..{preferred + 99}", field="port")


async def _until_answering(url: str, supervisor: Supervisor, timeout: float, cert: str) -> None:
    """Waits for a 200 of `url`, with TLS from whoever has the certificate in the file. Raises StartFailedError."""
    deadline = asyncio.get_running_loop().time() + timeout
    last = "no answer"
    verify = pinned_context(cert) if cert else True
    async with httpx.AsyncClient(timeout=2.0, trust_env=False, verify=verify) as client:
        while asyncio.get_running_loop().time() < deadline:
            if supervisor.failed.done():
                supervisor.failed.result()
            try:
                answer = await client.get(url)
                if answer.status_code == 200:
                    return
                last = f"{answer.status_code} {answer.text[:200]}"
            except httpx.HTTPError as exc:
                last = f"{type(exc).__name__}: {exc}"
            await asyncio.sleep(0.1)
    raise StartFailedError("router", Exit(1, f"{url} did not become ready: {last}"))
