"""Greedy tokens equal transformers', whatever the architecture, the chunks and the batch."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import hf_reference
from tests.support.models import demo_model, tiny_model
from tests.support.stepper import Stepper

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"arch": "llama"},
    "llama-tied-sharded": {"arch": "llama", "tied": True, "shards": 3},
    "llama-linear": {"arch": "llama", "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "llama-llama3": {"arch": "llama", "rope_scaling": LLAMA3},
    "llama-mha": {"arch": "llama", "num_kv_heads": 4, "head_dim": 32, "seed": 3},
    "qwen2": {"arch": "qwen2"},
    "qwen2-tied-yarn": {"arch": "qwen2", "tied": True, "rope_scaling": YARN},
    "qwen3": {"arch": "qwen3"},
    "qwen3-tied-yarn": {"arch": "qwen3", "tied": True, "rope_scaling": YARN, "head_dim": 32},
}
COUNT = 24


def prompt_of(length: int, vocab: int = 325) -> list[int]:
    return random.Random(length).choices(range(3, vocab), k=length)


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_equals_transformers_at_block_boundaries(variant: str) -> None:
    model = tiny_model(**VARIANTS[variant])
    stepper = Stepper(model, block_size=16)
    for length, chunk in ((1, 1), (15, 16), (16, 16), (17, 16), (31, 7), (33, 32), (100, 48)):
        prompt = prompt_of(length)
        assert stepper.generate(prompt, COUNT, chunk=chunk) == hf_reference.greedy(model, prompt, COUNT), length


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_every_block_size_gives_the_same_tokens(block_size: int) -> None:
    model = tiny_model("qwen3")
    stepper = Stepper(model, block_size=block_size)
    for length in (block_size - 1, block_size, block_size + 1):
        prompt = prompt_of(length)
        assert stepper.generate(prompt, COUNT, chunk=block_size) == hf_reference.greedy(model, prompt, COUNT)


@pytest.mark.parametrize(
    ("attention", "linear"), [("sdpa", "torch"), ("sdpa", "native"), ("paged_cpu", "torch"), ("paged_cpu", "native")]
)
def test_every_backend_gives_the_same_tokens(attention: str, linear: str) -> None:
    model = tiny_model("llama", seed=5)
    stepper = Stepper(model, attention_backend=attention, linear_backend=linear)
    prompt = prompt_of(700)
    assert stepper.generate(prompt, COUNT, chunk=256) == hf_reference.greedy(model, prompt, COUNT)


def test_a_batch_of_decodes_and_chunks_equals_each_alone() -> None:
    model = tiny_model("qwen2", seed=2)
    stepper = Stepper(model)
    prompts = [prompt_of(n) for n in (1, 16, 40, 75, 130)]
    streams = [stepper.stream(prompt, COUNT) for prompt in prompts]
    pending: list[Any] = []
    while any(len(s.output) < COUNT for s in streams):
        if len(pending) < len(streams):
            pending.append(streams[len(pending)])  # one more joins each step, while the others decode
        live = [s for s in pending if len(s.output) < COUNT]
        live.sort(key=lambda s: len(s.known) - s.computed > 1)
        stepper.step([(s, 24) for s in live])
    for prompt, stream in zip(prompts, streams, strict=True):
        assert stream.output == hf_reference.greedy(model, prompt, COUNT)


@pytest.mark.parametrize("linear", ["torch", "native"])
def test_bfloat16_follows_transformers_logits(linear: str) -> None:
    model = tiny_model("qwen3", dtype="bfloat16", hidden_size=128)
    stepper = Stepper(model, linear_backend=linear)
    assert stepper.info.kv_groups[0].dtype == "bfloat16"
    prompt = prompt_of(50)
    output = stepper.generate(prompt, 16, chunk=32)
    exact = hf_reference.logits(model, prompt + output[:-1])[len(prompt) - 1 :]
    theirs = hf_reference.logits(model, prompt + output[:-1], torch.bfloat16)[len(prompt) - 1 :]
    noise = float((theirs - exact).abs().max())
    for row, token in zip(exact, output, strict=True):
        # Teacher-forced: what was drawn lies no further from the best than bfloat16's own error reaches.
        assert float(row.max() - row[token]) <= 2 * noise + 1e-3


def test_float32_logits_are_close_to_transformers(tmp_path: Path) -> None:
    model = tiny_model("llama", seed=9)
    stepper = Stepper(model, attention_backend="paged_cpu")
    prompt = prompt_of(70)
    stream = stepper.stream(prompt, 1)
    worker = stepper.worker
    assert worker._builder is not None
    from engine_core.scheduler.step import StepPlan

    batch = worker._builder.build(StepPlan(1, (stream.part(70),)))
    with torch.inference_mode():
        got = worker._model.forward(batch.input_ids, batch.position_ids, batch.metadata)[0]
    torch.testing.assert_close(got, hf_reference.logits(model, prompt)[-1], atol=2e-3, rtol=1e-4)


def test_demo_model_answers_as_transformers_does() -> None:
    model = demo_model()
    tokenizer = hf_reference.transformers.AutoTokenizer.from_pretrained(str(model), local_files_only=True)
    stepper = Stepper(model, kv_tokens=1024, max_model_len=1024)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, tokenize=False
    )
    for text, chunk in ((chat, 16), ("Once upon a time", 512), ("def fibonacci(n):\n", 512)):
        prompt = tokenizer.encode(text, add_special_tokens=False)
        output = stepper.generate(prompt, 12, chunk=chunk)
        assert output == hf_reference.greedy(model, prompt, 12)
        if text is chat:
            assert "Paris" in tokenizer.decode(output)
