"""Tiny models with random weights, to try the mesh on and to test it with.

`make_tiny` writes a whole Hugging Face directory: config, safetensors, generation config, a byte-level
BPE tokenizer that round-trips any text, and a ChatML template. The weights are drawn so that greedy
outputs depend on the whole context and the best logit leads clearly; the text means nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from engine_core.types.errors import ConfigError

TinyArch = Literal["llama", "qwen2", "qwen3"]
_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_MERGES = (
    "t h;th e;i n;e r;a n;o n;r e;Ġ t;Ġ a;Ġ th;Ġth e;Ġ s;Ġ w;Ġ o;Ġ c;Ġ b;Ġ f;Ġ p;Ġ m;Ġ d;Ġ h;Ġ i;Ġ in;Ġ an;Ġan d;"
    "in g;e n;e d;o r;e s;a t;i s;i t;a r;o u;a l;l l;l e;s t;Ġo f;Ġt o;Ġi s;u s;er s;Ġ l;Ġ n;Ġ r;Ġ re;i on;l y;Ġ g;"
    "h e;l o;he l;hel lo;s y;sy st;us er;a s;i st;s ist;as sist;assist an;assistan t;e m;syst em"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' "
    "+ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def make_tiny(
    directory: str | Path,
    arch: TinyArch = "llama",
    seed: int = 0,
    *,
    tied: bool = False,
    shards: int = 1,
    dtype: Literal["float32", "bfloat16"] = "float32",
    rope_scaling: dict[str, Any] | None = None,
    num_layers: int = 3,
    hidden_size: int = 64,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    intermediate_size: int = 128,
    context: int = 4096,
) -> Path:
    """Writes a tiny model into `directory` and returns it. The same arguments give the same bytes of weights.

    `rope_scaling` goes into config.json as it is; `shards` > 1 splits the weights over that many files
    with an index. Raises ConfigError for an unknown architecture.
    """
    if arch not in _CLASSES:
        raise ConfigError(f"architecture {arch!r} is not known; there are {', '.join(sorted(_CLASSES))}")
    out = Path(directory)
    out.mkdir(parents=True, exist_ok=True)
    vocab = _vocabulary()
    config: dict[str, Any] = {
        "architectures": [_CLASSES[arch]],
        "model_type": arch,
        "vocab_size": len(vocab) + len(_SPECIALS),
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": rope_scaling,
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "dtype": dtype,
    }
    if arch == "llama":
        config["mlp_bias"] = False
    if arch == "qwen2":
        config["use_sliding_window"] = False
    _write_json(out / "config.json", config)
    _write_json(out / "generation_config.json", {"bos_token_id": 1, "eos_token_id": [2], "pad_token_id": 0})
    _save(out, _weights(config, seed), shards)
    _write_tokenizer(out, vocab, context)
    return out


def _weights(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Gaussian weights. The embedding is small beside what the layers add to the residual stream, so that
    the next token hangs on the context and (tied) not on the last token alone."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, config["dtype"])
    h, inter, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]

    def gauss(*shape: int, std: float) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * std).to(dtype)

    def near_one(n: int) -> torch.Tensor:
        return (1.0 + 0.1 * torch.randn(n, generator=generator)).to(dtype)

    tensors = {"model.embed_tokens.weight": gauss(v, h, std=1.0)}
    for i in range(config["num_hidden_layers"]):
        at, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
        tensors[at + "q_proj.weight"] = gauss(q, h, std=2.0 * h**-0.5)
        tensors[at + "k_proj.weight"] = gauss(kv, h, std=2.0 * h**-0.5)
        tensors[at + "v_proj.weight"] = gauss(kv, h, std=2.0 * h**-0.5)
        tensors[at + "o_proj.weight"] = gauss(h, q, std=4.0 * q**-0.5)
        tensors[mlp + "gate_proj.weight"] = gauss(inter, h, std=2.0 * h**-0.5)
        tensors[mlp + "up_proj.weight"] = gauss(inter, h, std=2.0 * h**-0.5)
        tensors[mlp + "down_proj.weight"] = gauss(h, inter, std=2.0 * inter**-0.5)
        tensors[f"model.layers.{i}.input_layernorm.weight"] = near_one(h)
        tensors[f"model.layers.{i}.post_attention_layernorm.weight"] = near_one(h)
        if config["model_type"] == "qwen2":
            for name, n in (("q", q), ("k", kv), ("v", kv)):
                tensors[f"{at}{name}_proj.bias"] = gauss(n, std=0.5)
        if config["model_type"] == "qwen3":
            tensors[at + "q_norm.weight"] = near_one(config["head_dim"]) * 1.5
            tensors[at + "k_norm.weight"] = near_one(config["head_dim"]) * 1.5
    tensors["model.norm.weight"] = near_one(h)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = gauss(v, h, std=1.0)
    return tensors


def _save(out: Path, tensors: dict[str, torch.Tensor], shards: int) -> None:
    if shards == 1:
        save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[i::shards]}
        save_file(part, out / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    _write_json(out / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def _byte_symbols() -> list[str]:
    """The printable stand-ins of the 256 bytes, as GPT-2's byte-level BPE has them."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    extra = [b for b in range(256) if b not in printable]
    table = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(extra)}
    return [table[b] for b in range(256)]


def _vocabulary() -> dict[str, int]:
    tokens = _byte_symbols() + ["".join(pair.split()) for pair in _MERGES.split(";")]
    return {token: len(_SPECIALS) + i for i, token in enumerate(tokens)}


def _write_tokenizer(out: Path, vocab: dict[str, int], context: int) -> None:
    specials = [
        {"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for i, token in enumerate(_SPECIALS)
    ]  # fmt: skip
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": specials,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(_SPECIALS)} | vocab,
            "merges": [pair.split(" ") for pair in _MERGES.split(";")],
        },
    }  # fmt: skip
    _write_json(out / "tokenizer.json", tokenizer)
    _write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "model_max_length": context,
            "clean_up_tokenization_spaces": False,
            "added_tokens_decoder": {str(s["id"]): {k: v for k, v in s.items() if k != "id"} for s in specials},
        },
    )
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
