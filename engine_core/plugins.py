"""Visible tables of what can be plugged in: name -> "module:attribute", imported when chosen.

The core names packages above it only here, as text: models and vendor code are loaded lazily.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from engine_core.types.errors import ConfigError

PLATFORMS: Mapping[str, str] = MappingProxyType({"cpu": "engine_core.platforms.cpu:CpuPlatform"})

MODEL_REGISTRY = "models.registry:resolve"
"""(hf_config: dict) -> model class; see models/registry.py."""

MODEL_DIRECTORY = "models.loader:model_directory"
"""(name or path: str) -> pathlib.Path of the model's directory."""

MODEL_LOADERS: Mapping[str, str] = MappingProxyType(
    {"default": "models.loader:DefaultModelLoader", "dummy": "models.loader:DummyModelLoader"}
)

LINEAR_BACKENDS: Mapping[str, str] = MappingProxyType(
    {"torch": "models.layers.linear:TorchLinear", "native": "models.layers.native_linear:NativeLinear"}
)

ATTENTION_BACKENDS: Mapping[str, str] = MappingProxyType(
    {
        "sdpa": "engine_core.execution.attention.sdpa:SdpaAttention",
        "paged_cpu": "engine_core.execution.attention.paged_cpu:PagedCpuAttention",
    }
)

TRANSPORTS: Mapping[str, str] = MappingProxyType(
    {
        "shm": "engine_core.transfer.transports.shm:ShmTransport",
        "tcp": "engine_core.transfer.transports.tcp:TcpTransport",
        "scripted": "engine_core.transfer.transports.scripted:ScriptedTransport",
    }
)


def load(table: Mapping[str, str], kind: str, name: str) -> Any:
    """Imports the entry `name`. Raises ConfigError that lists what there is."""
    if name not in table:
        raise ConfigError(f"{kind} {name!r} is not known; there are {', '.join(sorted(table))}")
    return load_path(table[name])


def load_path(path: str) -> Any:
    """Imports "module:attribute"."""
    module, attribute = path.split(":")
    return getattr(importlib.import_module(module), attribute)
