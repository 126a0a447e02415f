"""Drives a ModelWorker with hand-made StepPlans, as an engine would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from engine_core.config import InferenceConfig, ModelConfig, SchedulerConfig
from engine_core.execution.model_worker import ModelInfo, ModelWorker
from engine_core.scheduler.step import ScheduledSequence, StepPlan
from engine_core.types.ids import SessionId
from engine_core.types.sampling import SamplingParams, TokenLogprobs

GREEDY = SamplingParams(max_tokens=1)


@dataclass
class Stream:
    """One sequence: known tokens, how many of them are the prompt's and how many computed, the blocks that hold
    them, and what came out."""

    known: list[int]
    blocks: list[int]
    sampling: SamplingParams = GREEDY
    computed: int = 0
    output: list[int] = field(default_factory=list)
    prompt_len: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    def part(self, tokens: int) -> ScheduledSequence:
        """The next `tokens` known tokens as a part of a step; samples when none is left after them."""
        end = min(self.computed + tokens, len(self.known))
        scored = (0, 0)
        if self.sampling.prompt_logprobs is not None and self.computed + 1 < self.prompt_len:
            scored = self.computed + 1, min(end + 1, self.prompt_len)
        return ScheduledSequence(
            session=SessionId(1 + self.blocks[0]),
            token_ids=self.known[self.computed : end],
            start=self.computed,
            block_ids=(self.blocks,),
            sample=end == len(self.known),
            sampling=self.sampling,
            known=self.known,
            prompt_len=self.prompt_len,
            scored=scored,
        )


class Stepper:
    """A loaded worker over its own pool; blocks are dealt out once, in a scattered order."""

    def __init__(self, model: Path, *, block_size: int = 16, kv_tokens: int = 4096, **model_config: Any) -> None:
        self.block_size = block_size
        self.worker = ModelWorker(
            InferenceConfig(
                model=ModelConfig(model_path=str(model), **model_config),
                scheduler=SchedulerConfig(block_size=block_size, kv_tokens=kv_tokens),
            )
        )
        self.info: ModelInfo = self.worker.load()
        layout = self.worker.layout()
        self.region = torch.full((layout.region_bytes,), 0x3F, dtype=torch.uint8)  # stale KV: finite, not zero
        self.worker.bind_kv(self.region)
        blocks = layout.groups[0].num_blocks - 1
        self._free = [1 + (i * 7919) % blocks for i in range(blocks)] if blocks % 7919 else list(range(1, blocks + 1))

    def stream(
        self, prompt: Sequence[int], room_for: int, sampling: SamplingParams = GREEDY, *, emitted: Sequence[int] = ()
    ) -> Stream:
        """A new sequence with blocks for the prompt and `room_for` more tokens; `emitted` ones have come before."""
        known = [*prompt, *emitted]
        count = -(-(len(known) + room_for) // self.block_size)
        taken, self._free = self._free[:count], self._free[count:]
        assert len(taken) == count, "the pool is too small for this test"
        return Stream(known, taken, sampling, prompt_len=len(prompt))

    def step(self, parts: Sequence[tuple[Stream, int]]) -> None:
        """One step of (stream, tokens to compute at most); what is sampled joins the known tokens."""
        sequences = tuple(stream.part(tokens) for stream, tokens in parts)
        result = self.worker.execute(StepPlan(step=1, sequences=sequences))
        nobody = (None,) * len(sequences)
        scored = result.prompt_logprobs or ((),) * len(sequences)
        for (stream, _), sequence, token, report, of_prompt in zip(
            parts, sequences, result.sampled, result.logprobs or nobody, scored, strict=True
        ):
            stream.computed += len(sequence.token_ids)
            stream.prompt_logprobs += of_prompt
            assert (report is not None) == (sequence.sample and stream.sampling.logprobs is not None)
            if report is not None:
                stream.logprobs.append(report)
            assert (token >= 0) == sequence.sample
            if sequence.sample:
                stream.known.append(token)
                stream.output.append(token)

    def generate(
        self, prompt: Sequence[int], count: int, *, chunk: int = 1 << 30, sampling: SamplingParams = GREEDY
    ) -> list[int]:
        """The next `count` tokens, the prompt computed in chunks."""
        return self.run(self.stream(prompt, count, sampling), count, chunk=chunk).output

    def run(self, stream: Stream, count: int, *, chunk: int = 1 << 30) -> Stream:
        """Drives a stream to `count` tokens of output; its blocks are free then."""
        while len(stream.output) < count:
            self.step([(stream, chunk)])
        self._free += stream.blocks
        return stream
