"""Which class computes which architecture. Loaded lazily; a new family is one line here and one file."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from engine_core.plugins import load_path
from engine_core.types.errors import ConfigError

ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {
        "LlamaForCausalLM": "models.llama:LlamaForCausalLM",
        "Qwen2ForCausalLM": "models.llama:Qwen2ForCausalLM",
        "Qwen3ForCausalLM": "models.qwen3:Qwen3ForCausalLM",
    }
)


def resolve(hf_config: dict[str, Any]) -> Any:
    """Returns the model class for a config.json. Raises ConfigError that names it and what there is."""
    names = hf_config.get("architectures")
    if not isinstance(names, list) or not names:
        raise ConfigError("config.json: architectures is missing")
    for name in names:
        if name in ARCHITECTURES:
            return load_path(ARCHITECTURES[name])
    raise ConfigError(
        f"config.json: architecture {', '.join(map(str, names))} is not known; there are {', '.join(ARCHITECTURES)}"
    )
