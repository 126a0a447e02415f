"""ModelWorker: one rank's model on one device. Implements Executor."""

from __future__ import annotations

import hashlib
import json
import math
import time
from typing import Any

import msgspec
import torch

from engine_core import plugins
from engine_core.config import InferenceConfig
from engine_core.execution.attention.base import group_tensor
from engine_core.execution.batch import BatchBuilder, ForwardBatch
from engine_core.execution.masks import MaskSource, NoMasks
from engine_core.execution.sampler import Sampler, choose_sampler
from engine_core.platforms.base import Platform
from engine_core.scheduler.step import ScheduledSequence, SequenceFailure, StepPlan, StepResult
from engine_core.types.digest import tokenizer_digest
from engine_core.types.errors import ConfigError, InternalError
from engine_core.types.ids import SessionId
from engine_core.types.kv import KvGroupLayout, KvGroupSpec, KvLayout
from engine_core.types.sampling import SamplingParams, TokenLogprobs

HEADER_BYTES = 4096
"""The region's first page belongs to who made it; groups start behind it, each on a page."""

_SMALL_MODEL = 4_000_000
_SCORE_BYTES = 32 << 20
"""Logits of scored rows that are in memory at a time."""
_TORCH_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}

_EVERYTHING = SamplingParams(
    max_tokens=1, temperature=1.0, top_p=0.9, top_k=50, min_p=0.01, frequency_penalty=0.1, presence_penalty=0.1,
    repetition_penalty=1.1, logit_bias=((0, 0.1),), logprobs=5, prompt_logprobs=5,
)  # fmt: skip


class ModelInfo(msgspec.Struct, frozen=True):
    """What loading found out."""

    kv_groups: tuple[KvGroupSpec, ...]
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    fingerprint_parts: dict[str, str]


class ModelWorker:
    """Call in this order: load, layout, bind_kv, warm_up, then execute once per step; one thread."""

    def __init__(self, config: InferenceConfig) -> None:
        self._config = config
        name = "cpu" if config.model.platform == "auto" else config.model.platform
        self._platform: Platform = plugins.load(plugins.PLATFORMS, "platform", name)()
        self._model: Any = None
        self._info: ModelInfo | None = None
        self._builder: BatchBuilder | None = None
        self._sampler: Sampler = choose_sampler(name)
        self._masks: MaskSource = NoMasks()

    def load(self) -> ModelInfo:
        """Loads the model. Raises ConfigError in one line naming the file, field or tensor."""
        model_config = self._config.model
        linear = model_config.linear_backend
        backend = self._platform.linear_backend() if linear == "auto" else linear
        linears = plugins.load(plugins.LINEAR_BACKENDS, "linear backend", backend)()
        directory = plugins.load_path(plugins.MODEL_DIRECTORY)(model_config.model_path)
        loader_name = "default" if model_config.with_ckpt else "dummy"
        loader = plugins.load(plugins.MODEL_LOADERS, "model loader", loader_name)(directory)
        self._model = loader.load(model_config.dtype, self._platform.ops(), linears)
        dtype = _TORCH_NAMES[self._model.dtype]
        spec = self._model.spec
        self._platform.set_threads(model_config.num_threads or self._threads_that_pay())
        longest = spec.max_model_len
        if model_config.max_model_len > longest:
            raise ConfigError(f"model.max_model_len is {model_config.max_model_len}; the model allows {longest}")
        self._info = ModelInfo(
            kv_groups=self._model.kv_cache_groups(dtype),
            max_model_len=model_config.max_model_len or longest,
            eos_token_ids=loader.eos_token_ids(),
            vocab_size=spec.vocab_size,
            fingerprint_parts={
                "model": hashlib.sha256(json.dumps(loader.hf_config, sort_keys=True).encode()).hexdigest()[:32],
                "checkpoint": loader.digest(),
                "tokenizer": tokenizer_digest(directory),
                "dtype": dtype,
                "kv_dtype": dtype,
                "block_size": str(self._config.scheduler.block_size),
                "rope": hashlib.sha256(msgspec.json.encode(spec.rope)).hexdigest()[:32],
                "draft": "none",
            },
        )
        return self._info

    def _threads_that_pay(self) -> int:
        """1 for a model so small that waking a second thread costs more than it computes; else 0, all cores."""
        parameters = sum(math.prod(shape) for shape in self._model.parameter_shapes().values())
        return 1 if parameters < _SMALL_MODEL else 0

    def layout(self) -> KvLayout:
        """The KV pool that the configuration asks for. Raises ConfigError when no sequence could run in it."""
        scheduler, groups = self._config.scheduler, self._loaded().kv_groups
        size = scheduler.block_size
        bytes_per_block = size * sum(group.bytes_per_token() for group in groups)
        blocks = (
            -(-scheduler.kv_tokens // size) if scheduler.kv_tokens else scheduler.kv_memory_bytes // bytes_per_block
        )
        if blocks < 1:
            raise ConfigError(
                f"scheduler.kv_memory_bytes is {scheduler.kv_memory_bytes}; one block takes {bytes_per_block} bytes"
            )
        layouts: list[KvGroupLayout] = []
        offset = HEADER_BYTES
        for group in groups:
            layouts.append(KvGroupLayout(spec=group, block_size=size, num_blocks=blocks + 1, offset=offset))
            offset += -(-layouts[-1].block_bytes * (blocks + 1) // HEADER_BYTES) * HEADER_BYTES
        return KvLayout(groups=tuple(layouts), region_bytes=offset)

    def bind_kv(self, region: torch.Tensor) -> None:
        """Takes the pool: a flat uint8 tensor of at least layout().region_bytes, owned by the caller."""
        info, layout, spec = self._loaded(), self.layout(), self._model.spec
        chosen = self._config.model.attention_backend
        name = self._platform.attention_backend() if chosen == "auto" else chosen
        backend = plugins.load(plugins.ATTENTION_BACKENDS, "attention backend", name)
        self._model.init_attention(
            tuple(
                backend(group, group_tensor(region, group), spec.num_heads, spec.head_dim**-0.5)
                for group in layout.groups
            )
        )
        self._builder = BatchBuilder(layout, info.vocab_size)

    def follow(self, masks: MaskSource) -> None:
        """Takes whoever knows the grammars; without, sequences that have one fail."""
        self._masks = masks

    def warm_up(self) -> None:
        """Runs one prefill-sized step, one decode-sized and one that draws and reports in every way into the null
        block, so that the first request finds threads, kernels and pages ready."""
        info, scheduler = self._loaded(), self._config.scheduler
        tokens = min(scheduler.max_batch_tokens, info.max_model_len)
        running = min(scheduler.max_running, 4)
        plain = SamplingParams(max_tokens=1)
        for count, sequences, sampling in ((tokens, 1, plain), (1, running, plain), (2, running, _EVERYTHING)):
            if count > info.max_model_len:
                continue
            blocks = [0] * -(-count // scheduler.block_size)
            sequence = ScheduledSequence(
                session=SessionId(0),
                token_ids=[0] * count,
                start=0,
                block_ids=tuple(blocks for _ in info.kv_groups),
                sample=True,
                sampling=sampling,
                known=[0] * count,
                prompt_len=count,
                scored=(0, 0) if sampling.prompt_logprobs is None else (1, count),
            )
            self.execute(StepPlan(step=0, sequences=(sequence,) * sequences))

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one step. Numbers that are none fail the sequences that they came out for, and so does a grammar
        that can't be followed. Raises InternalError when the plan is broken."""
        began = time.perf_counter()
        if self._builder is None:
            raise InternalError("execute before bind_kv")
        if not plan.sequences:
            return StepResult(step=plan.step, sampled=())
        batch = self._builder.build(plan)
        self._masks.start(plan)
        forward_began = time.perf_counter()
        with torch.inference_mode():
            hidden = self._model.hidden(batch.input_ids, batch.position_ids, batch.metadata)
            logits = self._model.logits(hidden[: len(batch.draws)])
            forward_ended = time.perf_counter()
            failures: dict[int, str] = {}
            prompt_logprobs = self._score(batch, hidden, len(plan.sequences), failures)
        masks, problems = self._masks.collect()
        failures.update(problems)
        sampled = [-1] * len(plan.sequences)
        logprobs: list[TokenLogprobs | None] = [None] * len(plan.sequences)
        if batch.draws:
            at = batch.sampled_sequences
            drawn = self._sampler.sample(logits, batch.draws, {r: masks[i] for r, i in enumerate(at) if i in masks})
            failures.update((at[row], why) for row, why in drawn.problems.items() if at[row] not in failures)
            for index, token, report in zip(at, drawn.tokens, drawn.logprobs, strict=True):
                if index not in failures:
                    sampled[index], logprobs[index] = token, report
        return StepResult(
            step=plan.step,
            sampled=tuple(sampled),
            failures=tuple(SequenceFailure(index, why) for index, why in sorted(failures.items())),
            seconds=time.perf_counter() - began,
            forward_seconds=forward_ended - forward_began,
            logprobs=tuple(logprobs) if any(report is not None for report in logprobs) else (),
            prompt_logprobs=prompt_logprobs,
        )

    def _score(
        self, batch: ForwardBatch, hidden: torch.Tensor, sequences: int, failures: dict[int, str]
    ) -> tuple[tuple[TokenLogprobs, ...], ...]:
        """Log probabilities of prompt positions, in slices: all rows' logits at once may be gigabytes."""
        if not batch.scores:
            return ()
        found: list[tuple[TokenLogprobs, ...]] = [()] * sequences
        rows = max(1, _SCORE_BYTES // (4 * self._loaded().vocab_size))
        for score in batch.scores:
            reports: list[TokenLogprobs] = []
            try:
                for i in range(0, len(score.tokens), rows):
                    tokens = score.tokens[i : i + rows]
                    logits = self._model.logits(hidden[score.first + i : score.first + i + len(tokens)])
                    reports += self._sampler.score(logits, tokens, score.position + i, score.top)
            except InternalError as exc:  # this sequence alone
                failures[score.sequence] = exc.message
            else:
                found[score.sequence] = tuple(reports)
        return tuple(found)

    def _loaded(self) -> ModelInfo:
        if self._info is None:
            raise InternalError("the model is not loaded")
        return self._info
