"""One decode step of the engine, without a mesh around it, as ratios of what this machine can do.

    python benchmarks/decode_step.py [--model DIR] [--threads N] [--linear native|torch] [--attention paged_cpu|sdpa]

Prints the step of one stream beside the time that reading its weights takes at the bandwidth measured in
the same run, and at batch 32 the share of the step outside the model's forward. Best of several steps: what
else runs on the machine can only add.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from engine_core.config import InferenceConfig, ModelConfig, SchedulerConfig
from engine_core.execution.model_worker import ModelWorker
from engine_core.scheduler.step import ScheduledSequence, StepPlan
from engine_core.types.ids import SessionId
from engine_core.types.sampling import SamplingParams
from models.checkpoint import iterate_weights
from models.demo import fetch_demo

CONTEXT = 160
ROUNDS = 15


def read_bandwidth(size: int) -> float:
    """Bytes per second of reading `size` bytes of fresh memory with torch's threads; best of several."""
    data = torch.ones(size // 4)
    best = 0.0
    for _ in range(8):
        began = time.perf_counter()
        data.sum()
        best = max(best, size / (time.perf_counter() - began))
    return best


def best_step(worker: ModelWorker, batch: int, sampling: SamplingParams) -> tuple[float, float]:
    """Seconds of the best decode step of `batch` sequences, and of that step outside forward."""
    per_sequence = CONTEXT // 16 + 1
    sequences = tuple(
        ScheduledSequence(
            session=SessionId(i),
            token_ids=[100 + i],
            start=CONTEXT,
            block_ids=(list(range(1 + i * per_sequence, 1 + (i + 1) * per_sequence)),),
            sample=True,
            sampling=sampling,
        )
        for i in range(batch)
    )
    results = [worker.execute(StepPlan(step=i, sequences=sequences)) for i in range(ROUNDS)]
    best = min(results, key=lambda r: r.seconds)
    return best.seconds, best.seconds - best.forward_seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--linear", default="auto")
    parser.add_argument("--attention", default="auto")
    options = parser.parse_args()
    directory = options.model or fetch_demo()
    worker = ModelWorker(
        InferenceConfig(
            model=ModelConfig(
                model_path=str(directory),
                num_threads=options.threads,
                linear_backend=options.linear,
                attention_backend=options.attention,
            ),
            scheduler=SchedulerConfig(kv_tokens=32 * (CONTEXT + 16), block_size=16),
        )
    )
    began = time.perf_counter()
    worker.load()
    region = torch.full((worker.layout().region_bytes,), 1, dtype=torch.uint8)
    worker.bind_kv(region)
    worker.warm_up()
    print(f"load and warm-up   {time.perf_counter() - began:.1f} s, {torch.get_num_threads()} threads")

    weights = sum(tensor.nbytes for _, tensor in iterate_weights(directory))
    bandwidth = read_bandwidth(weights)
    limit = weights / bandwidth
    print(f"weights            {weights / 1e6:.0f} MB, read at {bandwidth / 1e9:.1f} GB/s: {limit * 1e3:.1f} ms")
    greedy = SamplingParams(max_tokens=1)
    drawn = SamplingParams(max_tokens=1, temperature=0.8, top_p=0.95, seed=7)
    for batch in (1, 2, 4, 8, 16, 32):
        seconds, outside = best_step(worker, batch, greedy)
        print(
            f"batch {batch:2}           {seconds * 1e3:6.1f} ms a step, {batch / seconds:5.0f} tokens/s, "
            f"{limit / seconds:4.0%} of the bandwidth limit, {outside / seconds:5.1%} outside forward"
        )
    seconds, outside = best_step(worker, 32, drawn)
    print(f"batch 32, top_p    {seconds * 1e3:6.1f} ms a step, {outside / seconds:5.1%} outside forward")


if __name__ == "__main__":
    main()
