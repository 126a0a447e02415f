"""What a model's config.json says, typed and checked once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from engine_core.types.errors import ConfigError

_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


class RopeSpec(msgspec.Struct, frozen=True):
    """Rotary embedding; the fields that a type does not use keep their defaults."""

    rope_type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True


class ModelSpec(msgspec.Struct, frozen=True):
    """A dense decoder: sizes, switches, special tokens. `dtype` is the checkpoint's."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    rope: RopeSpec
    dtype: str = "float32"
    tied: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()

    @property
    def max_model_len(self) -> int:
        """Longest sequence that the positions allow; yarn stretches the original context."""
        if self.rope.rope_type == "yarn":
            return max(self.max_position, int(self.rope.factor * self.rope.original_max_position))
        return self.max_position


def read_hf_config(directory: str | Path) -> dict[str, Any]:
    """Reads config.json. Raises ConfigError in one line."""
    return read_json(Path(directory) / "config.json")


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object. Raises ConfigError naming the file and what is wrong with it."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as exc:
        raise ConfigError(f"{path} is missing") from exc
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as exc:
        raise ConfigError(f"{path} can't be read: {exc}") from exc
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a JSON object, not {type(data).__name__}")
    return data


def parse_spec(config: dict[str, Any], *, qkv_bias: bool = False) -> ModelSpec:
    """Types a llama-like config. `qkv_bias` is the family's default where the config says nothing.

    Raises ConfigError naming the field that is missing, wrong or asks for what is not built.
    """
    architecture = (config.get("architectures") or ["?"])[0]
    hidden, heads = _positive(config, "hidden_size"), _positive(config, "num_attention_heads")
    kv_heads = _positive(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(
            f"config.json: num_attention_heads {heads} must be a multiple of num_key_value_heads {kv_heads}"
        )
    head_dim = _positive(config, "head_dim", hidden // heads)
    if head_dim % 2:
        raise ConfigError(f"config.json: head_dim {head_dim} must be even")
    if config.get("quantization_config"):
        raise ConfigError("config.json: quantization_config: quantised checkpoints are not supported")
    if config.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"config.json: hidden_act {config['hidden_act']!r} is not supported; there is 'silu'")
    sliding = config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or ())
    if sliding:
        raise ConfigError("config.json: use_sliding_window: sliding-window attention is not supported")
    attention_bias = bool(config.get("attention_bias", False))
    max_position = _positive(config, "max_position_embeddings")
    return ModelSpec(
        architecture=architecture,
        vocab_size=_positive(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_positive(config, "intermediate_size"),
        num_layers=_positive(config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=_parse_rope(config, max_position),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=qkv_bias or attention_bias,
        o_bias=attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        eos_token_ids=token_ids(config.get("eos_token_id")),
    )


def token_ids(value: Any) -> tuple[int, ...]:
    """A token id, a list of them, or nothing, as a tuple."""
    if value is None:
        return ()
    if isinstance(value, int):
        return (value,)
    return tuple(int(v) for v in value)


def _positive(config: dict[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None:
        value = default
    if value is None:
        raise ConfigError(f"config.json: {name} is missing")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"config.json: {name} is {value!r}; it must be a positive integer")
    return value


def _parse_rope(config: dict[str, Any], max_position: int) -> RopeSpec:
    """Reads both spellings: rope_parameters (new), rope_theta with rope_scaling (old)."""
    params: dict[str, Any] = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    rope_type = params.get("rope_type") or params.get("type") or "default"
    if rope_type not in _ROPE_TYPES:
        raise ConfigError(f"config.json: rope type {rope_type!r} is not known; there are {', '.join(_ROPE_TYPES)}")
    if float(params.get("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0)) != 1.0:
        raise ConfigError("config.json: partial_rotary_factor other than 1 is not supported")
    original = int(params.get("original_max_position_embeddings") or max_position)
    factor = params.get("factor")
    if factor is None:
        if rope_type in ("linear", "llama3"):
            raise ConfigError(f"config.json: rope type {rope_type!r} needs a factor")
        factor = max_position / original
    attention_factor = params.get("attention_factor")
    return RopeSpec(
        rope_type=rope_type,
        theta=float(params.get("rope_theta") or config.get("rope_theta") or 10000.0),
        factor=float(factor),
        original_max_position=original,
        low_freq_factor=float(params.get("low_freq_factor") or 1.0),
        high_freq_factor=float(params.get("high_freq_factor") or 4.0),
        beta_fast=float(params.get("beta_fast") or 32.0),
        beta_slow=float(params.get("beta_slow") or 1.0),
        attention_factor=None if attention_factor is None else float(attention_factor),
        mscale=float(params.get("mscale") or 0.0),
        mscale_all_dim=float(params.get("mscale_all_dim") or 0.0),
        truncate=bool(params.get("truncate", True)),
    )
