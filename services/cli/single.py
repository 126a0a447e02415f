"""bootstrap, router, prefill, decode: one service in this process.

    configuration → logging → run(config, stop, on_ready) of the service on an event loop → exit code

A service that can't start says so in one line and registers nothing.
"""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer

from engine_core.types.errors import ConfigError, PdmeshError
from engine_core.types.request import Role
from services.cli.handshake import Reporter, die_with
from services.cli.model_path import resolve, served_names
from services.cli.options import add_command
from services.config import BootstrapConfig, CommonConfig, RouterConfig, WorkerConfig, load
from services.runtime.tasks import Stop, TaskOwner, run
from services.runtime.telemetry import setup_logging

log = logging.getLogger(__name__)

ServiceMain = Callable[[Any, Stop, Callable[[dict[str, Any]], None]], Coroutine[Any, Any, None]]

_HANDSHAKE = {
    "ready_fd": (
        Annotated[int | None, typer.Option("--ready-fd", metavar="FD", help="Report readiness there", hidden=True)],
        None,
    ),
    "parent": (
        Annotated[int | None, typer.Option("--parent", metavar="PID", help="End when it ends", hidden=True)],
        None,
    ),
}


def add_commands(app: typer.Typer) -> None:
    """Adds the four services to the application."""
    for name, kind, doc in (
        ("bootstrap", BootstrapConfig, "Run Bootstrap: the rank table of the mesh."),
        ("router", RouterConfig, "Run a router: the OpenAI-compatible HTTP front."),
        ("prefill", WorkerConfig, "Run a prefill worker."),
        ("decode", WorkerConfig, "Run a decode worker; with --aggregated one that serves alone."),
    ):
        extras: dict[str, Any] = dict(_HANDSHAKE)
        if name == "decode":
            flag = typer.Option("--aggregated", help="Compute prompts too: a MIXED instance")
            extras["aggregated"] = (Annotated[bool, flag], False)
        fields = {n: kind for n in kind.model_fields if n != "role"}
        add_command(app, name, fields, _command(name, kind), doc=doc, extras=extras)


def _command(name: str, kind: type[CommonConfig]) -> Callable[[Path | None, dict[str, Any], dict[str, Any]], int]:
    def command(file: Path | None, flags: dict[str, Any], extra: dict[str, Any]) -> int:
        reporter = Reporter(extra["ready_fd"])
        if extra["parent"] is not None and not die_with(extra["parent"]):
            return 1
        if name == "prefill":
            flags["role"] = Role.PREFILL
        elif name == "decode":
            flags["role"] = Role.MIXED if extra["aggregated"] else Role.DECODE
        try:
            run_service(name, _with_model(load(kind, file=file, flags=flags)), reporter)
        except PdmeshError as exc:
            code = 2 if isinstance(exc, ConfigError) else 1
            if not reporter.failed(exc.message, code):
                raise  # nobody else tells the user
            return code
        except Exception as exc:
            reporter.failed(f"{type(exc).__name__}: {exc}", 1)
            raise
        return 0

    return command


def run_service(name: str, config: CommonConfig, reporter: Reporter) -> None:
    """Runs one service until it is told to stop. Raises what the service raises."""
    setup_logging(config.log_level, config.log_format, name)
    module = "services.cli.workers" if isinstance(config, WorkerConfig) else f"services.{name}.main"
    service: ServiceMain = importlib.import_module(module).run

    def on_ready(info: dict[str, Any]) -> None:
        log.info("ready: %s", json.dumps(info))
        reporter.ready(info)

    async def main(stop: Stop) -> None:
        owner = TaskOwner("handshake")
        owner.spawn(reporter.beat(), "beat")
        try:
            await service(config, stop, on_ready)
        finally:
            await owner.close()

    run(main)


def _with_model(config: CommonConfig) -> CommonConfig:
    """The configuration with --model turned into a directory, under a name that clients may use."""
    if not isinstance(config, WorkerConfig | RouterConfig):
        return config
    directory = resolve(config.model)
    names = config.served_model_name or served_names(config.model, directory)
    return config.model_copy(update={"model": str(directory), "served_model_name": names})
