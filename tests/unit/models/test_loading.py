"""Loading: weights stay the file's pages, and what is wrong is said in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_core.config import InferenceConfig, ModelConfig, SchedulerConfig
from engine_core.execution.model_worker import ModelInfo, ModelWorker
from engine_core.types.digest import tokenizer_digest
from engine_core.types.errors import ConfigError
from engine_core.types.kv import fingerprint_of
from models.checkpoint import iterate_weights
from models.registry import ARCHITECTURES, resolve
from tests.support.models import tiny_model


def load(directory: Path, **model: Any) -> ModelInfo:
    return ModelWorker(InferenceConfig(model=ModelConfig(model_path=str(directory), **model))).load()


def copy_of(directory: Path, to: Path) -> Path:
    shutil.copytree(directory, to)
    return to


def edit_json(path: Path, **changes: Any) -> None:
    data = json.loads(path.read_text())
    data.update(changes)
    path.write_text(json.dumps({k: v for k, v in data.items() if v != "REMOVE"}))


def test_weights_are_views_of_the_mapped_file(tmp_path: Path) -> None:
    directory = copy_of(tiny_model("llama"), tmp_path / "m")
    weights = dict(iterate_weights(directory))
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(directory) in line]
    ranges = [tuple(int(x, 16) for x in m[0].split("-")) for m in maps]
    assert ranges
    for name, tensor in weights.items():
        start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        assert any(low <= start and end <= high for low, high in ranges), name


def test_a_loaded_model_computes_on_the_mapped_file(tmp_path: Path) -> None:
    directory = copy_of(tiny_model("qwen3", tied=True), tmp_path / "m")
    worker = ModelWorker(InferenceConfig(model=ModelConfig(model_path=str(directory))))
    worker.load()
    smaps = Path("/proc/self/smaps").read_text().split(str(directory / "model.safetensors"))[1]
    dirty = next(line for line in smaps.splitlines() if line.startswith("Private_Dirty"))
    assert dirty.split()[1] == "0"
    embedding = worker._model._embedding.data_ptr()
    maps = [line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if str(directory) in line]
    assert any(int(m.split("-")[0], 16) <= embedding < int(m.split("-")[1], 16) for m in maps)


def test_what_loading_finds_out() -> None:
    info = load(tiny_model("qwen2"), max_model_len=1000)
    (group,) = info.kv_groups
    assert (group.num_layers, group.num_heads, group.head_size, group.dtype) == (3, 2, 16, "float32")
    assert (info.max_model_len, info.vocab_size, info.eos_token_ids) == (1000, 325, (2,))
    assert info.fingerprint_parts["tokenizer"] == tokenizer_digest(tiny_model("qwen2"))
    assert info.fingerprint_parts["draft"] == "none"


def test_eos_is_the_union_of_config_generation_config_and_tokenizer(tmp_path: Path) -> None:
    directory = copy_of(tiny_model("llama"), tmp_path / "m")
    edit_json(directory / "config.json", eos_token_id=7)
    edit_json(directory / "generation_config.json", eos_token_id=[8, 9])
    edit_json(directory / "tokenizer_config.json", eos_token={"content": "<|endoftext|>"})
    assert load(directory).eos_token_ids == (0, 7, 8, 9)


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("model", lambda d: edit_json(d / "config.json", rms_norm_eps=1e-4)),
        ("rope", lambda d: edit_json(d / "config.json", rope_theta=5e5)),
        ("tokenizer", lambda d: (d / "chat_template.jinja").write_text("{{ messages }}")),
        ("checkpoint", lambda d: make_other_weights(d)),
    ],
)
def test_the_fingerprint_names_what_differs(tmp_path: Path, part: str, change: Callable[[Path], Any]) -> None:
    directory = copy_of(tiny_model("llama"), tmp_path / "m")
    before = load(directory).fingerprint_parts
    change(directory)
    after = load(directory).fingerprint_parts
    assert before[part] != after[part]
    assert fingerprint_of(before) != fingerprint_of(after)
    assert before["dtype"] == after["dtype"]


def make_other_weights(directory: Path) -> None:
    shutil.copy(tiny_model("llama", seed=1) / "model.safetensors", directory / "model.safetensors")


def drop_tensor(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors = {k: v.clone() for k, v in tensors.items() if k != "model.layers.1.mlp.up_proj.weight"}
    save_file(tensors, directory / "model.safetensors")


def reshape_tensor(directory: Path) -> None:
    tensors = {k: v.clone() for k, v in load_file(directory / "model.safetensors").items()}
    tensors["model.norm.weight"] = torch.ones(63)
    save_file(tensors, directory / "model.safetensors")


def cut(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda d: (d / "config.json").unlink(), r"config\.json is missing"),
    "config no JSON": (lambda d: (d / "config.json").write_text("{"), r"config\.json can't be read"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "holds no safetensors file"),
    "cut short": (cut, r"model\.safetensors is damaged or cut short: tensor \S+ lies beyond"),
    "empty file": (lambda d: (d / "model.safetensors").write_bytes(b""), r"model\.safetensors is damaged"),
    "garbage": (lambda d: (d / "model.safetensors").write_bytes(b"x" * 5000), r"model\.safetensors is damaged"),
    "missing tensor": (drop_tensor, r"lacks tensor model\.layers\.1\.mlp\.up_proj\.weight"),
    "wrong shape": (reshape_tensor, r"tensor model\.norm\.weight has shape \[63\]; it must be \[64\]"),
    "unknown architecture": (
        lambda d: edit_json(d / "config.json", architectures=["MambaForCausalLM"]),
        "architecture MambaForCausalLM is not known; there are LlamaForCausalLM",
    ),
    "no size": (lambda d: edit_json(d / "config.json", hidden_size="REMOVE"), "hidden_size is missing"),
    "bad size": (lambda d: edit_json(d / "config.json", vocab_size=-1), "vocab_size is -1"),
    "unknown rope": (
        lambda d: edit_json(d / "config.json", rope_scaling={"rope_type": "longrope"}),
        "rope type 'longrope' is not known",
    ),
    "sliding window": (lambda d: edit_json(d / "config.json", use_sliding_window=True), "sliding-window"),
    "quantised": (lambda d: edit_json(d / "config.json", quantization_config={"bits": 4}), "quantised"),
    "unknown dtype": (lambda d: edit_json(d / "config.json", dtype="float8"), "data type 'float8' is not supported"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_directory_is_one_line(tmp_path: Path, damage: str) -> None:
    directory = copy_of(tiny_model("llama"), tmp_path / "m")
    change, message = DAMAGE[damage]
    change(directory)
    with pytest.raises(ConfigError, match=message) as caught:
        load(directory)
    assert "\n" not in str(caught.value)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    directory = copy_of(tiny_model("llama", shards=3), tmp_path / "m")
    (directory / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model-00002-of-00003\.safetensors is missing"):
        load(directory)


@pytest.mark.parametrize("name", ["/nowhere/at/all", "no such model", "./nothing"])
def test_a_missing_directory_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match="is not a directory"):
        ModelWorker(InferenceConfig(model=ModelConfig(model_path=name))).load()


def test_wrong_choices_name_what_there_is() -> None:
    with pytest.raises(ConfigError, match="linear backend 'x' is not known; there are native, torch"):
        load(tiny_model("llama"), linear_backend="x")
    with pytest.raises(ConfigError, match="max_model_len is 5000; the model allows 4096"):
        load(tiny_model("llama"), max_model_len=5000)
    worker = ModelWorker(
        InferenceConfig(
            model=ModelConfig(model_path=str(tiny_model("llama"))), scheduler=SchedulerConfig(kv_memory_bytes=100)
        )
    )
    worker.load()
    with pytest.raises(ConfigError, match="one block takes 12288 bytes"):
        worker.layout()


def test_a_checkpoint_of_another_type_is_converted() -> None:
    info = load(tiny_model("llama"), dtype="bfloat16")
    assert info.kv_groups[0].dtype == info.fingerprint_parts["dtype"] == "bfloat16"


def test_dummy_weights_need_no_checkpoint(tmp_path: Path) -> None:
    directory = copy_of(tiny_model("llama"), tmp_path / "m")
    (directory / "model.safetensors").unlink()
    assert load(directory, with_ckpt=False).vocab_size == 325


def test_every_registered_architecture_resolves() -> None:
    for name in ARCHITECTURES:
        assert resolve({"architectures": ["Unknown", name]}).__name__ == name
