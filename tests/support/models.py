"""Models that tests use: tiny ones made once per process, and the demo model where it is."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

from models.demo import demo_directory, fetch_demo
from models.tiny import TinyArch, make_tiny


@functools.cache
def _root() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="pdmesh-tiny-")


@functools.cache
def _tiny(key: str) -> Path:
    kwargs: dict[str, Any] = json.loads(key)
    name = "-".join(f"{value}" for value in kwargs.values() if isinstance(value, str | int))
    directory = tempfile.mkdtemp(prefix=f"{name}-", dir=_root().name)
    return make_tiny(directory, **kwargs)


def tiny_model(arch: TinyArch = "llama", seed: int = 0, **kwargs: Any) -> Path:
    """Returns the directory of a tiny model, made at most once per process; never write into it."""
    return _tiny(json.dumps({"arch": arch, "seed": seed, **kwargs}))


def demo_model() -> Path:
    """Returns the directory of the demo model; fetches it where it is not there yet."""
    return fetch_demo(demo_directory())
