"""Safetensors files as views of a file mapping.

The pages stay those of the page cache: every process that maps the file shares them, and nothing is
read before it is used. A file is checked whole when it is opened (header, sizes, offsets), so that a
truncated one is named at start-up and not found by a bus error later.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from engine_core.types.errors import ConfigError
from models.spec import read_json

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_MAX_HEADER = 100 * 1024 * 1024
_SAMPLE_BYTES = 4096
_SAMPLES = 16


def checkpoint_files(directory: str | Path) -> list[Path]:
    """Returns the safetensors files of a model, in order. Raises ConfigError when one is missing."""
    root = Path(directory)
    index = root / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ConfigError(f"{index} has no weight_map")
        files = [root / name for name in sorted(set(weight_map.values()))]
    elif (root / "model.safetensors").is_file():
        files = [root / "model.safetensors"]
    else:
        files = sorted(root.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{root} holds no safetensors file")
    for file in files:
        if not file.is_file():
            raise ConfigError(f"{file} is missing ({index.name} names it)")
    return files


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Returns (tensor entries by name, offset of the data). Raises ConfigError when the file is damaged."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(_MAX_HEADER, size - 8):
            raise ConfigError(f"{path} is damaged: its header does not fit into the file")
        try:
            header = json.loads(file.read(length))
        except (UnicodeDecodeError, json.JSONDecodeError) as exc:
            raise ConfigError(f"{path} is damaged: its header is not JSON") from exc
    if not isinstance(header, dict):
        raise ConfigError(f"{path} is damaged: its header is not a JSON object")
    header.pop("__metadata__", None)
    start = 8 + length
    for name, entry in header.items():
        try:
            begin, end = entry["data_offsets"]
            good = 0 <= begin <= end <= size - start
        except (TypeError, KeyError, ValueError) as exc:
            raise ConfigError(f"{path} is damaged: tensor {name} has no data offsets") from exc
        if not good:
            raise ConfigError(f"{path} is damaged or cut short: tensor {name} lies beyond the end of the file")
    return header, start


def iterate_weights(directory: str | Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, tensor) of every file. The tensors are views of private mappings: never write to them."""
    for path in checkpoint_files(directory):
        header, start = read_header(path)
        if not header:
            continue
        with path.open("rb") as file:
            # Copy-on-write keeps torch content with the buffer; nobody writes, so no page is ever copied.
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        mapping.madvise(mmap.MADV_WILLNEED)
        for name, entry in header.items():
            yield name, _view(path, mapping, start, name, entry)


def _view(path: Path, mapping: mmap.mmap, start: int, name: str, entry: dict[str, Any]) -> torch.Tensor:
    dtype = _DTYPES.get(entry.get("dtype", ""))
    if dtype is None:
        raise ConfigError(f"{path}: tensor {name} has data type {entry.get('dtype')!r}; there are {', '.join(_DTYPES)}")
    shape = tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    count = 1
    for n in shape:
        count *= n
    if (end - begin) != count * dtype.itemsize:
        raise ConfigError(f"{path} is damaged: tensor {name} has {end - begin} bytes for shape {list(shape)}")
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    offset = start + begin
    if offset % dtype.itemsize:
        data = bytearray(mapping[offset : offset + (end - begin)])
        return torch.frombuffer(data, dtype=dtype).view(shape)
    return torch.frombuffer(mapping, dtype=dtype, count=count, offset=offset).view(shape)


def checkpoint_digest(directory: str | Path) -> str:
    """Cheap digest of a checkpoint: per file its size, its header and some sampled bytes."""
    digest = hashlib.sha256()
    for path in checkpoint_files(directory):
        header, start = read_header(path)
        size = path.stat().st_size
        digest.update(json.dumps([size, start, header], sort_keys=True).encode())
        step = max((size - start) // _SAMPLES, 1)
        with path.open("rb") as file:
            for offset in range(start, size, step):
                file.seek(offset)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]
