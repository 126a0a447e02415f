"""`pdmesh model`: small models to try things on. torch is imported only when one is made."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, cast, get_args

import typer

from engine_core.types.errors import ConfigError
from services.cli.model_path import DEMO, demo_directory
from services.config import nearest

TinyArch = Literal["llama", "qwen2", "qwen3"]
ARCHITECTURES: tuple[str, ...] = get_args(TinyArch)


def add_commands(app: typer.Typer) -> None:
    """Adds `model fetch` and `model tiny`."""
    group = typer.Typer(help="Models to try things on.", no_args_is_help=True)
    group.command("fetch")(fetch)
    group.command("tiny")(tiny)
    app.add_typer(group, name="model")


def fetch(
    name: Annotated[str, typer.Argument(help="demo: SmolLM2-135M-Instruct, 538 MB in float32")],
    directory: Annotated[Path | None, typer.Option("--directory", help="Where to; by default the cache")] = None,
) -> None:
    """Fetch a model unless it is there, and print its directory."""
    if name != DEMO:
        raise ConfigError(f"unknown model {name!r}: only {DEMO} can be fetched")
    from models.demo import fetch_demo

    print(fetch_demo(directory or demo_directory()))


def tiny(
    directory: Annotated[Path, typer.Argument(help="Directory to write")],
    arch: Annotated[str, typer.Option("--arch", metavar="|".join(ARCHITECTURES), help="Architecture")] = "llama",
    seed: Annotated[int, typer.Option("--seed", help="Chooses the weights")] = 0,
) -> None:
    """Write a model of random weights with a byte-level tokenizer, and print its directory."""
    if arch not in ARCHITECTURES:
        raise ConfigError(
            f"unknown architecture {arch!r}{nearest(arch, ARCHITECTURES) or '; there are ' + ', '.join(ARCHITECTURES)}"
        )
    from models.tiny import make_tiny

    make_tiny(directory, arch=cast(TinyArch, arch), seed=seed)
    print(directory)
