"""transformers as the oracle."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

torch.set_num_threads(1)  # the models of tests are small, and other processes want the cores too
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


@functools.cache
def reference_model(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The model as transformers loads it from a directory."""
    return transformers.AutoModelForCausalLM.from_pretrained(str(directory), dtype=dtype, local_files_only=True).eval()


def greedy(directory: Path, prompt: Sequence[int], count: int) -> list[int]:
    """The next `count` tokens by argmax, end tokens included like any other; float32."""
    model, feed = reference_model(directory), list(prompt)
    cache, out = transformers.DynamicCache(config=model.config), []
    with torch.inference_mode():
        for _ in range(count):
            feed = [int(model(torch.tensor([feed]), cache=cache, use_cache=True).logits[0, -1].argmax())]
            out += feed
    return out


def logits(directory: Path, tokens: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Logits [T, V] in float32 of all positions."""
    with torch.inference_mode():
        return reference_model(directory, dtype)(torch.tensor([list(tokens)])).logits[0].float()
