"""Qwen3: Llama with a norm per head on q and k before the rotary embedding."""

from __future__ import annotations

from typing import Any

from models.llama import LlamaForCausalLM
from models.spec import ModelSpec, parse_spec

_DEFAULT_HEAD_DIM = 128


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Dense Qwen3."""

    qk_norm = True

    @classmethod
    def parse(cls, config: dict[str, Any]) -> ModelSpec:
        """As Llama; the family's head dimension is 128 unless the config says otherwise."""
        return parse_spec({"head_dim": _DEFAULT_HEAD_DIM, **config})
