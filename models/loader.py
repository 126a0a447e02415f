"""From a model's name to a loaded model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from engine_core.platforms.base import DeviceOps
from engine_core.types.errors import ConfigError
from models.checkpoint import checkpoint_digest, iterate_weights
from models.layers.linear import LinearBackend
from models.registry import resolve
from models.spec import read_hf_config, read_json, token_ids

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def model_directory(name: str) -> Path:
    """Returns the directory of a model: the name itself, or a snapshot of that hub id.

    Raises ConfigError when there is neither.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if not _HUB_ID.fullmatch(name) or path.exists():
        raise ConfigError(f"model {name!r} is not a directory")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as exc:
        first = str(exc).strip().splitlines()
        raise ConfigError(f"model {name!r} is not a directory, nor to be had from the hub: {first[0]}") from exc


class DefaultModelLoader:
    """Loads a Hugging Face directory, weights as views of the mapped files."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise ConfigError(f"model directory {self.directory} is missing")
        self.hf_config: dict[str, Any] = read_hf_config(self.directory)

    def load(self, dtype: str, ops: DeviceOps, linears: LinearBackend) -> Any:
        """Returns the loaded model. `dtype` auto takes the checkpoint's. Raises ConfigError in one line."""
        model_class = resolve(self.hf_config)
        spec = model_class.parse(self.hf_config)
        name = spec.dtype if dtype == "auto" else dtype
        if name not in _DTYPES:
            raise ConfigError(f"data type {name!r} is not supported; there are {', '.join(_DTYPES)}")
        model = model_class(spec, _DTYPES[name], ops, linears)
        model.load_weights(self._weights(model))
        return model

    def digest(self) -> str:
        """Cheap digest of the weights."""
        return checkpoint_digest(self.directory)

    def eos_token_ids(self) -> tuple[int, ...]:
        """What ends an output: the union of config.json, generation_config.json and the tokenizer's eos_token."""
        found = set(token_ids(self.hf_config.get("eos_token_id")))
        generation = self.directory / "generation_config.json"
        if generation.is_file():
            found.update(token_ids(read_json(generation).get("eos_token_id")))
        found.update(self._tokenizer_eos())
        return tuple(sorted(found))

    def _tokenizer_eos(self) -> tuple[int, ...]:
        files = self.directory / "tokenizer_config.json", self.directory / "tokenizer.json"
        if not all(file.is_file() for file in files):
            return ()
        config, tokenizer = (read_json(file) for file in files)
        eos = config.get("eos_token")
        content = eos.get("content") if isinstance(eos, dict) else eos
        added = tokenizer.get("added_tokens") or ()
        return tuple(int(entry["id"]) for entry in added if content and entry.get("content") == content)

    def _weights(self, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return iterate_weights(self.directory)


class DummyModelLoader(DefaultModelLoader):
    """Random weights for a directory that has only a config.json (with_ckpt: false): for measurements."""

    def digest(self) -> str:
        return "dummy"

    def _weights(self, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(1234)
        for name, shape in model.parameter_shapes().items():
            yield name, torch.empty(shape, dtype=model.dtype).uniform_(-1e-3, 1e-3, generator=generator)
