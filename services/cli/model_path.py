"""What --model may name: `demo`, a directory, or a hub id. Nothing here imports torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from engine_core.types.errors import ConfigError
from models import demo
from services.config import cache_dir

DEMO = "demo"


def demo_directory() -> Path:
    """Where the demo model is kept."""
    return demo.demo_directory(cache_dir())


def resolve(model: str, *, fetch: bool = False) -> Path:
    """The directory of a model. With `fetch`, the demo model is fetched when it is missing.

    Raises ConfigError that says what was looked for.
    """
    if model == DEMO:
        directory = demo_directory()
        if not demo.is_complete(directory):
            if not fetch:
                raise ConfigError(f"the demo model is not in {directory}: run `pdmesh model fetch demo`", field="model")
            _fetch_demo()
        return directory
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.exists():
        raise ConfigError(f"model {model} is not a directory", field="model")
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        raise ConfigError(f"model directory {model} does not exist", field="model")
    return _from_hub(model)


def served_names(model: str, directory: Path) -> tuple[str, ...]:
    """The names under which a model is served when none are given: its hub id, or its directory's name."""
    if model == DEMO or Path(model).expanduser().is_dir():
        return (directory.name,)
    return (model,)


def _fetch_demo() -> None:
    # A process of its own: converting the model needs torch and much memory, which must not stay here.
    done = subprocess.run([sys.executable, "-m", "services.cli.main", "model", "fetch", DEMO], check=False)
    if done.returncode != 0:
        raise ConfigError("the demo model could not be fetched", field="model")


def _from_hub(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
    try:
        return Path(snapshot_download(model, local_files_only=True, allow_patterns=patterns))
    except (LocalEntryNotFoundError, ValueError):
        pass
    try:
        return Path(snapshot_download(model, allow_patterns=patterns))
    except Exception as exc:  # the hub's client raises what its HTTP client raises
        line = " ".join(str(exc).split())[:200]
        raise ConfigError(
            f"model {model} is neither a directory nor in reach on the hub: {type(exc).__name__}: {line}", field="model"
        ) from exc
