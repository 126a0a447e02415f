"""The sampler's definition in one native call per step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine_core.execution.batch import DrawRow
from engine_core.execution.logprobs import nan_error
from engine_core.execution.sampler import NO_MASKS, Drawn, Mask, penalised, seed_key
from engine_core.execution.token_counts import CountBook, TokenCounts
from engine_core.platforms.cpu.kernels import Kernels
from engine_core.types.errors import InternalError
from engine_core.types.sampling import SamplingParams, TokenLogprobs

_PARAMETERS = [
    *((name, np.float64) for name in ("temperature", "top_p", "min_p", "frequency", "presence", "repetition")),
    ("top_k", np.int64), ("logprobs", np.int64), ("key", np.uint64),
]  # fmt: skip
_BIAS = [("bias_ids", np.uintp), ("biases", np.uintp), ("num_biases", np.int64)]
_SEEN = [("seen", np.uintp), ("counts", np.uintp), ("num_seen", np.int64)]
_NOW = [("mask", np.uintp), ("banned", np.uintp), ("num_banned", np.int64)]
_ROW = np.dtype([*_PARAMETERS, ("position", np.int64), *_SEEN, *_BIAS, *_NOW])
"""struct Row of sampler.cpp."""

_WHY = {
    -1: nan_error(0).message.replace("position 0", "position {}"),
    -2: "no token may be drawn at position {}",
    -3: "the logits at position {} hold infinity",
}


class _Prepared:
    """What of a row stays the same as long as its request draws."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params  # keeps its id taken
        self.penalised = penalised(params)
        self._ids = np.array([t for t, _ in params.logit_bias], np.int64)
        self._biases = np.array([bias for _, bias in params.logit_bias], np.float64)
        self.record = np.zeros(1, _ROW)
        r = self.record[0]
        r["temperature"], r["top_p"], r["min_p"], r["top_k"] = (
            params.temperature,
            params.top_p,
            params.min_p,
            params.top_k,
        )
        r["frequency"], r["presence"] = params.frequency_penalty, params.presence_penalty
        r["repetition"], r["key"] = params.repetition_penalty, seed_key(params.seed)
        r["logprobs"] = -1 if params.logprobs is None else params.logprobs
        r["bias_ids"], r["biases"], r["num_biases"] = self._ids.ctypes.data, self._biases.ctypes.data, self._ids.size


class NativeSampler:
    """Implements Sampler. Weights are float32 here, sums float64: a draw within rounding of a boundary
    between two tokens may differ from the definition's. Not thread-safe: parameters of rows and counts of their
    tokens are kept between steps."""

    def __init__(self, kernels: Kernels) -> None:
        self._sample, self._score = kernels.sample, kernels.score
        self._prepared: dict[int, _Prepared] = {}
        self._params: list[SamplingParams] = []
        self._rows = np.zeros(0, _ROW)
        self._penalised: list[int] = []
        self._reporting: list[int] = []
        self.counts = CountBook()

    def sample(self, logits: torch.Tensor, draws: Sequence[DrawRow], masks: Mapping[int, Mask] = NO_MASKS) -> Drawn:
        wide = logits.float().contiguous()
        count, vocab = wide.shape
        self._prepare([row.params for row in draws])
        rows = self._rows
        rows["position"] = [row.position for row in draws]
        alive = self._count(draws, vocab), self._ban(draws), self._mask(masks, vocab)
        tokens = np.empty(count, np.int64)
        width = min(vocab, max((draws[i].params.logprobs or 0 for i in self._reporting), default=0))
        report = _Report(count if self._reporting else 0, width)
        self._sample(
            wide.data_ptr(), count, vocab, rows.ctypes.data, tokens.ctypes.data, *report.pointers,
            width, torch.get_num_threads(),
        )  # fmt: skip
        del alive  # the kernel has read what the rows point to
        drawn: list[int] = tokens.tolist()
        problems: dict[int, str] = {}
        if min(drawn, default=0) < 0:
            problems = {i: _WHY[token].format(draws[i].position) for i, token in enumerate(drawn) if token < 0}
            drawn = [max(token, -1) for token in drawn]
        logprobs: list[TokenLogprobs | None] = [None] * count
        for i in self._reporting:
            if drawn[i] >= 0:
                logprobs[i] = report.row(i, drawn[i], draws[i].params.logprobs or 0)
        return Drawn(drawn, problems, logprobs)

    def score(self, logits: torch.Tensor, tokens: Sequence[int], position: int, top: int) -> list[TokenLogprobs]:
        wide = logits.float().contiguous()
        count, vocab = wide.shape
        wanted = np.array(tokens, np.int64)
        if wanted.shape != (count,) or (count and not (wanted.min() >= 0 and wanted.max() < vocab)):
            raise InternalError(f"{len(tokens)} tokens are to be scored in logits of {count} rows and {vocab} tokens")
        width = min(top, vocab)
        report = _Report(count, width)
        self._score(
            wide.data_ptr(), count, vocab, wanted.ctypes.data, width, *report.pointers, torch.get_num_threads(),
        )  # fmt: skip
        wrong = np.flatnonzero(np.isnan(report.logprobs))
        if wrong.size:
            raise nan_error(position + int(wrong[0]))
        return [report.row(i, token, width) for i, token in enumerate(tokens)]

    def _prepare(self, params: list[SamplingParams]) -> None:
        """Brings the rows' lasting part up to date; nothing to do while the batch stays the same."""
        if params == self._params:
            return
        prepared: dict[int, _Prepared] = {}  # by identity; one for all rows that share theirs
        for p in params:
            if id(p) not in prepared:
                prepared[id(p)] = self._prepared.get(id(p)) or _Prepared(p)
        self._prepared = prepared
        self._params = params
        self._rows = np.concatenate([prepared[id(p)].record for p in params])
        self._penalised = [i for i, p in enumerate(params) if prepared[id(p)].penalised]
        self._reporting = [i for i, p in enumerate(params) if p.logprobs is not None]

    def _count(self, draws: Sequence[DrawRow], vocab: int) -> list[TokenCounts]:
        self.counts.next_step()
        counts = [self.counts.of(draws[i], vocab) for i in self._penalised]
        if counts:
            rows, at = self._rows, self._penalised
            rows["seen"][at] = [c.ids_pointer for c in counts]
            rows["counts"][at] = [c.counts_pointer for c in counts]
            rows["num_seen"][at] = [c.used for c in counts]
        return counts

    def _ban(self, draws: Sequence[DrawRow]) -> npt.NDArray[np.int64] | None:
        rows = self._rows
        if not any([row.banned for row in draws]):  # noqa: C419  a list is faster than a generator
            rows["num_banned"] = 0
            return None
        banned = np.array([token for row in draws for token in row.banned], np.int64)
        rows["num_banned"] = [len(row.banned) for row in draws]
        rows["banned"] = banned.ctypes.data + 8 * (np.cumsum(rows["num_banned"]) - rows["num_banned"])
        return banned

    def _mask(self, masks: Mapping[int, Mask], vocab: int) -> list[Mask]:
        self._rows["mask"] = 0
        alive: list[Mask] = []
        for i, mask in masks.items():
            if mask.shape != (-(-vocab // 32),):
                raise InternalError(f"a mask has shape {mask.shape}; {-(-vocab // 32)} words are needed")
            alive.append(np.ascontiguousarray(mask, np.uint32))
            self._rows["mask"][i] = alive[-1].ctypes.data
        return alive


class _Report:
    """Where log probabilities of some rows go: the kernels' arrays."""

    def __init__(self, rows: int, width: int) -> None:
        self.logprobs, self._ranks = np.empty(rows, np.float64), np.empty(rows, np.int32)
        self._ids, self._values = np.empty((rows, width), np.int32), np.empty((rows, width), np.float64)
        arrays = (self.logprobs, self._ranks, self._ids, self._values)
        self.pointers = tuple(array.ctypes.data for array in arrays)

    def row(self, i: int, token: int, top: int) -> TokenLogprobs:
        """One row as it is reported."""
        best = tuple(zip(self._ids[i, :top].tolist(), self._values[i, :top].tolist(), strict=True))
        return TokenLogprobs(token, float(self.logprobs[i]), int(self._ranks[i]), best)
