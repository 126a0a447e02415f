"""Llama and Qwen2: pre-norm decoders with rotary, grouped-query attention and a gated MLP.

A layer reads   h = h + o(attention(rope(q(n)), rope(k(n)), v(n)))   with n = norm(h)
                h = h + down(silu(gate(m)) * up(m))                  with m = norm(h)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F

from engine_core.execution.attention.base import AttentionBackend
from engine_core.execution.forward_metadata import ForwardMetaData
from engine_core.platforms.base import DeviceOps
from engine_core.types.errors import InternalError
from engine_core.types.kv import KvGroupSpec
from models.layers.linear import Linear, LinearBackend, LinearGroup
from models.layers.rope import RotaryEmbedding
from models.spec import ModelSpec, parse_spec
from models.weights import WeightTable


class DecoderLayer:
    """One layer: parameters and nothing else."""

    __slots__ = ("down", "gated", "input_norm", "k_norm", "o", "post_norm", "q_norm", "qkv")

    def __init__(
        self, *, qkv: LinearGroup, o: Linear, gated: Linear, down: Linear,
        input_norm: torch.Tensor, post_norm: torch.Tensor,
        q_norm: torch.Tensor | None = None, k_norm: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        self.qkv, self.o, self.gated, self.down = qkv, o, gated, down
        self.input_norm, self.post_norm = input_norm, post_norm
        self.q_norm, self.k_norm = q_norm, k_norm


class LlamaForCausalLM:
    """The model contract on shared layers. `qk_norm`: q and k are normalised per head before rope (Qwen3)."""

    qk_norm = False

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, ops: DeviceOps, linears: LinearBackend) -> None:
        self.spec = spec
        self.dtype = dtype
        self._ops = ops
        self._linears = linears
        self._rope = RotaryEmbedding(spec.rope, spec.head_dim)
        self._layers: list[DecoderLayer] = []
        self._attention: AttentionBackend | None = None
        self._embedding: torch.Tensor = torch.empty(0)
        self._final_norm: torch.Tensor = torch.empty(0)
        self._lm_head: Linear | None = None

    @classmethod
    def parse(cls, config: dict[str, Any]) -> ModelSpec:
        """Types a config.json of this family. Raises ConfigError."""
        return parse_spec(config)

    def kv_cache_groups(self, dtype: str) -> tuple[KvGroupSpec, ...]:
        """The cache groups: one, of all layers."""
        s = self.spec
        return (KvGroupSpec(num_layers=s.num_layers, num_heads=s.num_kv_heads, head_size=s.head_dim, dtype=dtype),)

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that load_weights needs, by its name in the checkpoint."""
        s = self.spec
        h, q, kv = s.hidden_size, s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (s.vocab_size, h), "model.norm.weight": (h,)}
        if not s.tied:
            shapes["lm_head.weight"] = (s.vocab_size, h)
        for i in range(s.num_layers):
            p = f"model.layers.{i}."
            shapes[p + "input_layernorm.weight"] = shapes[p + "post_attention_layernorm.weight"] = (h,)
            for name, out, inner, bias in (
                ("self_attn.q_proj", q, h, s.qkv_bias),
                ("self_attn.k_proj", kv, h, s.qkv_bias),
                ("self_attn.v_proj", kv, h, s.qkv_bias),
                ("self_attn.o_proj", h, q, s.o_bias),
                ("mlp.gate_proj", s.intermediate_size, h, s.mlp_bias),
                ("mlp.up_proj", s.intermediate_size, h, s.mlp_bias),
                ("mlp.down_proj", h, s.intermediate_size, s.mlp_bias),
            ):
                shapes[f"{p}{name}.weight"] = (out, inner)
                if bias:
                    shapes[f"{p}{name}.bias"] = (out,)
            if self.qk_norm:
                shapes[p + "self_attn.q_norm.weight"] = shapes[p + "self_attn.k_norm.weight"] = (s.head_dim,)
        return shapes

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Builds the layers on the given tensors. Raises ConfigError naming what is missing or misshapen."""
        table = WeightTable(self.parameter_shapes(), self.dtype, weights)
        self._embedding = table.tensor("model.embed_tokens.weight")
        self._final_norm = table.tensor("model.norm.weight")
        head = self._embedding if self.spec.tied else table.tensor("lm_head.weight")
        self._lm_head = self._linears.single((head, None))
        self._layers = [self._layer(table, f"model.layers.{i}.") for i in range(self.spec.num_layers)]

    def _layer(self, table: WeightTable, prefix: str) -> DecoderLayer:
        at, mlp = prefix + "self_attn.", prefix + "mlp."
        return DecoderLayer(
            qkv=self._linears.group([table.parameter(f"{at}{n}_proj") for n in "qkv"]),
            o=self._linears.single(table.parameter(at + "o_proj")),
            gated=self._linears.gated(table.parameter(mlp + "gate_proj"), table.parameter(mlp + "up_proj"), self._ops),
            down=self._linears.single(table.parameter(mlp + "down_proj")),
            input_norm=table.tensor(prefix + "input_layernorm.weight"),
            post_norm=table.tensor(prefix + "post_attention_layernorm.weight"),
            q_norm=table.tensor(at + "q_norm.weight") if self.qk_norm else None,
            k_norm=table.tensor(at + "k_norm.weight") if self.qk_norm else None,
        )

    def init_attention(self, backends: tuple[AttentionBackend, ...]) -> None:
        """Takes the attention of each cache group, in the order of kv_cache_groups."""
        (self._attention,) = backends

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, forward_metadata: ForwardMetaData
    ) -> torch.Tensor:
        """input_ids, position_ids [T] int64 -> logits [S, vocab] of forward_metadata.sample_rows.

        Writes the KV of all T tokens. Raises InternalError before init_attention or load_weights.
        """
        return self.logits(self.hidden(input_ids, position_ids, forward_metadata))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """What `hidden` returned, or some rows of it [S, hidden_size] -> logits [S, vocab]."""
        if self._lm_head is None:
            raise InternalError("logits before load_weights")
        return self._lm_head(hidden) if hidden.shape[0] else hidden.new_empty(0, self.spec.vocab_size)

    def hidden(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, forward_metadata: ForwardMetaData
    ) -> torch.Tensor:
        """The same without the head: final states [S, hidden_size] of the rows that are wanted."""
        if self._attention is None or not self._layers:
            raise InternalError("forward before load_weights and init_attention")
        ops, spec, attention = self._ops, self.spec, self._attention
        eps, tokens = spec.rms_norm_eps, input_ids.shape[0]
        cos, sin = self._rope.angles(position_ids)
        hidden = F.embedding(input_ids, self._embedding)
        last = spec.num_layers - 1
        rows = forward_metadata.sample_rows
        normed = ops.rms_norm(hidden, self._layers[0].input_norm, eps)
        for i, layer in enumerate(self._layers):
            q, k, v = layer.qkv(normed)
            q = q.view(tokens, spec.num_heads, spec.head_dim)
            k = k.view(tokens, spec.num_kv_heads, spec.head_dim)
            v = v.view(tokens, spec.num_kv_heads, spec.head_dim)
            if layer.q_norm is not None and layer.k_norm is not None:
                q, k = ops.rms_norm(q, layer.q_norm, eps), ops.rms_norm(k, layer.k_norm, eps)
            ops.rope_(q, k, cos, sin)
            mixed = attention.forward(i, q, k, v, forward_metadata)
            if i == last and not forward_metadata.wants_all:  # the rest of the last layer concerns wanted rows alone
                if rows.shape[0] == 0:
                    return hidden.new_empty(0, spec.hidden_size)
                mixed, hidden = mixed.index_select(0, rows), hidden.index_select(0, rows)
            normed = ops.add_rms_norm(hidden, layer.o(mixed), layer.post_norm, eps)
            down = layer.down(layer.gated(normed))
            following = self._final_norm if i == last else self._layers[i + 1].input_norm
            normed = ops.add_rms_norm(hidden, down, following, eps)
        return normed


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Llama with biases on q, k and v."""

    @classmethod
    def parse(cls, config: dict[str, Any]) -> ModelSpec:
        return parse_spec(config, qkv_bias=True)
