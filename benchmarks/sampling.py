"""What sampling costs: a decode step at batch 16 with log probabilities, penalties and other parameters, as ratios of
the greedy step in the same run.

    python benchmarks/sampling.py [--model DIR] [--threads N] [--batch N] [--rounds N] [--json FILE]

The kinds take turns step by step, so that what else runs on the machine meets all alike; of each kind the best step
and the median one count.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch

from engine_core.config import InferenceConfig, ModelConfig, SchedulerConfig
from engine_core.execution.model_worker import ModelWorker
from engine_core.scheduler.step import ScheduledSequence, StepPlan, StepResult
from engine_core.types.ids import SessionId
from engine_core.types.sampling import SamplingParams
from models.demo import fetch_demo

CONTEXT = 160
BLOCK = 16
PENALTIES = {"frequency_penalty": 0.5, "presence_penalty": 0.5, "repetition_penalty": 1.1}
KINDS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(max_tokens=999),
    "logprobs 5": SamplingParams(max_tokens=999, logprobs=5),
    "all penalties": SamplingParams(max_tokens=999, **PENALTIES),  # type: ignore[arg-type]
    "temperature": SamplingParams(max_tokens=999, temperature=0.8, seed=7),
    "top_p": SamplingParams(max_tokens=999, temperature=0.8, top_p=0.95, seed=7),
    "everything": SamplingParams(
        max_tokens=999, temperature=0.8, top_p=0.95, top_k=50, min_p=0.02, seed=7, logprobs=5,
        logit_bias=tuple((i, -1.0) for i in range(100)), **PENALTIES,  # type: ignore[arg-type]
    ),
}  # fmt: skip


class Batch:
    """Sequences of one kind that decode; all kinds share the blocks, whose KV says nothing here."""

    def __init__(self, index: int, size: int, room: int, sampling: SamplingParams) -> None:
        width = -(-(CONTEXT + room) // BLOCK)
        self._blocks = [list(range(1 + i * width, 1 + (i + 1) * width)) for i in range(size)]
        self._known = [[(7 * i + t * t) % 1000 for t in range(CONTEXT)] for i in range(size)]
        self._sessions = [SessionId(1 + index * size + i) for i in range(size)]
        self._sampling = sampling
        self.results: list[StepResult] = []

    def step(self, worker: ModelWorker) -> None:
        """One token for each sequence."""
        sequences = tuple(
            ScheduledSequence(
                session, known[-1:], len(known) - 1, (blocks,), True, self._sampling,
                known=known, prompt_len=CONTEXT // 2,
            )
            for session, known, blocks in zip(self._sessions, self._known, self._blocks, strict=True)
        )  # fmt: skip
        result = worker.execute(StepPlan(step=1, sequences=sequences))
        if result.failures:
            raise SystemExit(f"a step failed: {result.failures[0].message}")
        for known, token in zip(self._known, result.sampled, strict=True):
            known.append(token)
        self.results.append(result)


def measure(worker: ModelWorker, kinds: dict[str, SamplingParams], size: int, rounds: int) -> dict[str, Batch]:
    """Runs batches of all kinds in turns."""
    batches = {name: Batch(i, size, rounds, sampling) for i, (name, sampling) in enumerate(kinds.items())}
    for _ in range(rounds):
        for batch in batches.values():
            batch.step(worker)
    return batches


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    tokens = options.batch * (CONTEXT + options.rounds + BLOCK)
    worker = ModelWorker(
        InferenceConfig(
            model=ModelConfig(model_path=str(options.model or fetch_demo()), num_threads=options.threads),
            scheduler=SchedulerConfig(kv_tokens=tokens, block_size=BLOCK),
        )
    )
    worker.load()
    region = torch.full((worker.layout().region_bytes,), 1, dtype=torch.uint8)
    worker.bind_kv(region)
    worker.warm_up()
    batches = measure(worker, KINDS, options.batch, options.rounds)
    best = {name: min(r.seconds for r in batch.results) for name, batch in batches.items()}
    middle = {name: statistics.median(r.seconds for r in batch.results) for name, batch in batches.items()}
    outside = {
        name: statistics.median(r.seconds - r.forward_seconds for r in batch.results) for name, batch in batches.items()
    }
    ratios = {}
    print(f"batch {options.batch}, {torch.get_num_threads()} threads, {options.rounds} steps of each kind")
    for name in KINDS:
        ratios[f"step with {name}: best"] = best[name] / best["greedy"]
        ratios[f"step with {name}: median"] = middle[name] / middle["greedy"]
        print(
            f"{name:14} {best[name] * 1e3:6.1f} ms at best ({best[name] / best['greedy']:.3f} of greedy), "
            f"{middle[name] * 1e3:6.1f} ms in the median ({middle[name] / middle['greedy']:.3f}), "
            f"{outside[name] * 1e3:5.2f} ms outside forward"
        )
    if options.json:
        options.json.write_text(json.dumps({"ratios": ratios, "seconds": {"best": best, "median": middle}}, indent=1))


if __name__ == "__main__":
    main()
