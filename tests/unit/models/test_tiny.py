"""The tiny models' files, and the demo model's door."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import transformers
from safetensors.torch import load_file

from engine_core.types.digest import tokenizer_digest
from engine_core.types.errors import ConfigError
from models.demo import demo_directory, fetch_demo, is_complete
from models.tiny import make_tiny
from tests.support import hf_reference
from tests.support.models import tiny_model


def test_the_same_seed_gives_the_same_model(tmp_path: Path) -> None:
    first, again = make_tiny(tmp_path / "a", "qwen2", 4), make_tiny(tmp_path / "b", "qwen2", 4)
    other = make_tiny(tmp_path / "c", "qwen2", 5)
    assert (first / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()
    assert (first / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()
    assert tokenizer_digest(first) == tokenizer_digest(other)


def test_shards_hold_what_one_file_holds(tmp_path: Path) -> None:
    whole = load_file(make_tiny(tmp_path / "a", "llama") / "model.safetensors")
    shards = sorted(make_tiny(tmp_path / "b", "llama", shards=4).glob("model-*.safetensors"))
    parts = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    assert len(shards) == 4
    assert parts.keys() == whole.keys()
    assert all(parts[name].equal(whole[name]) for name in whole)


def test_the_tokenizer_round_trips_any_text_and_knows_chats() -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(tiny_model("llama")), local_files_only=True)
    alphabet = "ab the and\n\t é日本語🙂\x00{}<|im_"
    for seed in range(20):
        text = "".join(random.Random(seed).choices(alphabet, k=40))
        assert tokenizer.decode(tokenizer.encode(text)) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, len(tokenizer)) == (1, 2, 325)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_greedy_outputs_vary_and_hang_on_the_context(arch: str) -> None:
    model = tiny_model(arch, tied=True)  # type: ignore[arg-type]
    outputs = [hf_reference.greedy(model, [*head, 50, 60, 70], 32) for head in ([10], [200], [10, 11, 12, 13])]
    assert max(len(set(output)) for output in outputs) > 8  # a short one may fall into a cycle
    assert len({tuple(output) for output in outputs}) == 3


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="architecture 'gpt' is not known; there are llama, qwen2, qwen3"):
        make_tiny(tmp_path / "x", "gpt")  # type: ignore[arg-type]


def test_a_complete_demo_model_is_left_alone_and_another_directory_refused(tmp_path: Path) -> None:
    directory = demo_directory(tmp_path)
    assert directory == tmp_path / "models" / "SmolLM2-135M-Instruct"
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="is not the demo model"):
        fetch_demo(directory)
    for name in ("generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_text("")
    (directory / "chat_template.jinja").write_text("")
    assert is_complete(directory)
    assert fetch_demo(directory) == directory
