"""The command: this machine, then the mesh, then what it comes to."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from services.cli.doctor import machine, mesh
from services.cli.doctor.findings import Finding, Level, worst
from services.cli.options import add_command, query_fields
from services.config import QueryConfig, load
from services.runtime.tasks import run

_MARKS = {Level.OK: ("ok   ", "green"), Level.WARNING: ("warn ", "yellow"), Level.ERROR: ("ERROR", "bold red")}


def add_command_to(app: typer.Typer) -> None:
    """Adds `doctor`."""
    extras = {
        "model": (Annotated[str, typer.Option(metavar="MODEL", help="A model to look at too")], ""),
        "socket_dir": (Annotated[str, typer.Option(metavar="DIR", help="Where link sockets are made")], ""),
        "local": (Annotated[bool, typer.Option("--local", help="Examine this machine only")], False),
        "json": (Annotated[bool, typer.Option("--json", help="One JSON object")], False),
    }
    doc = "Examine this machine and the mesh, and say what to do. Exit code 1 when something does not work."
    add_command(app, "doctor", query_fields(), _command, doc=doc, extras=extras)


def _command(file: Path | None, flags: dict[str, Any], extra: dict[str, Any]) -> int:
    config = load(QueryConfig, file=file, flags=flags)
    findings = machine.examine(config, extra["model"], extra["socket_dir"])
    if not extra["local"] and not any(f.area == "security" and f.level is Level.ERROR for f in findings):
        seen = run(lambda _stop: mesh.gather(config))
        findings += mesh.judge(seen, importlib.metadata.version("pdmesh"))
    level = worst(findings)
    if extra["json"]:
        print(json.dumps({"level": level.value, "findings": [finding.as_data() for finding in findings]}))
    else:
        show(findings, Console(highlight=False))
    return 1 if level is Level.ERROR else 0


def show(findings: Sequence[Finding], console: Console) -> None:
    """A line for each finding, and below it what to do."""
    grid = Table.grid(padding=(0, 2))
    for finding in findings:
        mark, style = _MARKS[finding.level]
        grid.add_row(Text(mark, style), finding.area, Text(finding.what, overflow="fold"))
        if finding.advice:
            grid.add_row("", "", Text(f"→ {finding.advice}", "dim", overflow="fold"))
    console.print(grid)
    warnings, errors = (_count(findings, level) for level in (Level.WARNING, Level.ERROR))
    said = {Level.OK: "all is well", Level.WARNING: f"{warnings}: it works", Level.ERROR: f"{errors}, {warnings}"}
    console.print(Text(said[worst(findings)], _MARKS[worst(findings)][1]))


def _count(findings: Sequence[Finding], level: Level) -> str:
    number = sum(finding.level is level for finding in findings)
    return f"{number} {level.value}{'' if number == 1 else 's'}"
