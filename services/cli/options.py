"""Flags made of a configuration class: `kv_tokens` becomes --kv-tokens, a bool --x and --no-x.

Values stay text here; services.config.load checks them together with those of the file and the
environment, so that a wrong value reads the same wherever it came from.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from services.config import CommonConfig, QueryConfig


def add_command(
    app: typer.Typer,
    name: str,
    fields: Mapping[str, type[CommonConfig]],
    run: Callable[[Path | None, dict[str, Any], dict[str, Any]], int],
    *,
    doc: str,
    extras: Mapping[str, Any] | None = None,
) -> None:
    """Adds the command `name` with a flag for each of `fields` (each with a class that has it) and --config.

    `run(file, flags, extra_values)` gets the flags that were given and returns the exit code. `extras` are
    further parameters: name -> (annotation, default).
    """
    extras = extras or {}
    keyword = inspect.Parameter.KEYWORD_ONLY
    config_file = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="YAML file with these options")]
    parameters = [inspect.Parameter("config", keyword, default=None, annotation=config_file)]
    for field, kind in fields.items():
        annotation = _annotation(field, kind.model_fields[field])
        parameters.append(inspect.Parameter(field, keyword, default=None, annotation=annotation))
    for extra, (annotation, default) in extras.items():
        parameters.append(inspect.Parameter(extra, keyword, default=default, annotation=annotation))

    def command(**given: Any) -> int:
        file = given.pop("config")
        extra_values = {n: given.pop(n) for n in extras}
        flags = {n: tuple(v) if isinstance(v, list) else v for n, v in given.items() if v not in (None, [])}
        return run(file, flags, extra_values)

    command.__signature__ = inspect.Signature(parameters, return_annotation=int)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    app.command(name, help=doc)(command)


def query_fields() -> dict[str, type[CommonConfig]]:
    """Fields of a command that asks a running mesh: whom to ask, and how to show that it may."""
    return {n: QueryConfig for n in QueryConfig.model_fields if not n.startswith("log_") and n != "insecure"}


def _annotation(name: str, field: FieldInfo) -> Any:
    flag = "--" + name.replace("_", "-")
    text = field.description or ""
    if not field.is_required() and field.default not in ("", (), None) and field.default_factory is None:
        text = f"{text} [default: {_shown(field.default)}]"
    if field.annotation in (bool, bool | None):
        return Annotated[bool | None, typer.Option(f"{flag}/--no-{flag[2:]}", help=text, show_default=False)]
    option = typer.Option(flag, help=text, metavar=_metavar(field), show_default=False)
    return (
        Annotated[list[str] | None, option] if get_origin(field.annotation) is tuple else Annotated[str | None, option]
    )


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _metavar(field: FieldInfo) -> str:
    annotation = field.annotation
    if get_origin(annotation) is Literal:
        return "|".join(map(str, get_args(annotation)))
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return "|".join(str(member.value) for member in annotation)
    if annotation is float:
        return "SECONDS" if (field.description or "").startswith("Seconds") else "X"
    return "N" if annotation is int else "TEXT"
