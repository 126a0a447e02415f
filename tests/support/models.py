"""Models that tests use: tiny ones made once per process, and the demo model where it is."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from collections.abc import Sequence
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


def with_special_tokens(model: Path, names: Sequence[str], folder: Path) -> dict[str, int]:
    """Makes `folder` the same tiny model with further special tokens, in the place of its merges; returns the ids of
    all tokens."""
    shutil.copytree(model, folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    vocab, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    merged = {"".join(pair) for pair in merges}
    free = sorted(i for token, i in vocab.items() if token in merged)
    kept = {token: i for token, i in vocab.items() if token not in merged}
    added = dict(zip(names, free, strict=False))
    assert len(added) == len(names)
    tokenizer["model"] |= {"vocab": kept | added, "merges": []}
    like = tokenizer["added_tokens"][0]
    tokenizer["added_tokens"] += [{**like, "id": i, "content": token} for token, i in added.items()]
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    return kept | added | {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
