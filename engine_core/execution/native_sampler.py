"""The sampler's definition in one native call per step."""

from __future__ import annotations

import numpy as np
import torch

from engine_core.execution.batch import DrawRow
from engine_core.execution.sampler import DrawError, uniform
from engine_core.platforms.cpu.kernels import Kernels


class NativeSampler:
    """Implements Sampler. Weights are float32 here, sums float64: a draw within rounding of a boundary
    between two tokens may differ from the definition's."""

    def __init__(self, kernels: Kernels) -> None:
        self._sample = kernels.sample

    def sample(self, logits: torch.Tensor, draws: tuple[DrawRow, ...]) -> list[int]:
        wide = logits.float().contiguous()
        rows, vocab = wide.shape
        params = [row.params for row in draws]
        temperature = np.array([p.temperature for p in params], np.float32)
        top_p = np.array([p.top_p for p in params], np.float32)
        min_p = np.array([p.min_p for p in params], np.float32)
        top_k = np.array([p.top_k for p in params], np.int64)
        uniforms = np.array(
            [uniform(p.seed, r.position) if p.temperature > 0 else 0.0 for p, r in zip(params, draws, strict=True)]
        )
        banned = np.array([t for row in draws for t in row.banned], np.int64)
        starts = np.zeros(rows + 1, np.int64)
        np.cumsum([len(row.banned) for row in draws], out=starts[1:])
        out = np.empty(rows, np.int64)
        self._sample(
            wide.data_ptr(), rows, vocab, temperature.ctypes.data, top_p.ctypes.data, min_p.ctypes.data,
            top_k.ctypes.data, uniforms.ctypes.data, banned.ctypes.data, starts.ctypes.data, out.ctypes.data,
            torch.get_num_threads(),
        )  # fmt: skip
        tokens: list[int] = out.tolist()
        problems: dict[int, str] = {}
        for i, (token, row) in enumerate(zip(tokens, draws, strict=True)):
            if token == -1:
                problems[i] = f"the logits at position {row.position} hold NaN"
            elif token == -2:
                problems[i] = f"no token may be drawn at position {row.position}"
        if problems:
            raise DrawError([max(token, -1) for token in tokens], problems)
        return tokens
