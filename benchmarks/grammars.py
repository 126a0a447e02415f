"""What structured output costs: a decode step at batch 16 whose sequences follow grammars, as a ratio of the same step
without, in the same run.

    python benchmarks/grammars.py [--model DIR] [--threads N] [--batch N] [--rounds N] [--json FILE]

All kinds take turns step by step, so that what else runs on the machine meets all alike; the median step counts, and
the best one is told beside it. Half of the last kind's sequences are free. Threads wait as an engine's do, unless
OMP_WAIT_POLICY or GOMP_SPINCOUNT say otherwise: it matters most here, where two kinds of threads share the cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch

from engine_core.config import InferenceConfig, ModelConfig, SchedulerConfig
from engine_core.execution.model_worker import ModelWorker
from engine_core.grammar.book import MatcherBook
from engine_core.grammar.cache import GrammarCache
from engine_core.scheduler.step import ScheduledSequence, StepPlan, StepResult
from engine_core.types.ids import SessionId
from engine_core.types.sampling import Grammar, GrammarKind, SamplingParams
from models.demo import fetch_demo
from services.config import engine_environment

CONTEXT = 160
BLOCK = 16
LONG = 10_000
_ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "kind": {"enum": ["tool", "toy", "book"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 5000},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{2,12}$"}, "maxItems": 5},
        "maker": {"anyOf": [{"type": "string", "maxLength": 30}, {"type": "null"}]},
    },
    "required": ["name", "kind", "count", "tags", "maker"],
    "additionalProperties": False,
}
SCHEMA = Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"type": "array", "items": _ITEM, "minItems": LONG}))
REGEX = Grammar(GrammarKind.REGEX, rf"(\w{{1,12}}, ?[0-9]{{1,4}}[.;] ){{{LONG}}}")
LARK = Grammar(GrammarKind.LARK, 'start: line+\nline: WORD (" " WORD)* /[.!?]/ "\\n"\nWORD: /[A-Za-z]{1,14}/')
GRAMMARS = {"free": None, "JSON schema": SCHEMA, "regex": REGEX, "Lark": LARK, "JSON schema, half": SCHEMA}


class Batch:
    """Sequences of one kind that decode; all kinds share the blocks, whose KV says nothing here."""

    def __init__(self, index: int, name: str, size: int, room: int, temperature: float) -> None:
        width = -(-(CONTEXT + room) // BLOCK)
        self._blocks = [list(range(1 + i * width, 1 + (i + 1) * width)) for i in range(size)]
        self._known = [[(7 * i + t * t) % 1000 for t in range(CONTEXT)] for i in range(size)]
        self._sessions = [SessionId(1 + index * size + i) for i in range(size)]
        free = size // 2 if name.endswith("half") else 0
        self._sampling = [
            SamplingParams(
                max_tokens=LONG, temperature=temperature, seed=i, grammar=None if i < free else GRAMMARS[name]
            )
            for i in range(size)
        ]
        self.results: list[StepResult] = []

    def step(self, worker: ModelWorker) -> None:
        """One token for each sequence."""
        sequences = tuple(
            ScheduledSequence(
                session, known[-1:], len(known) - 1, (blocks,), True, sampling, known=known, prompt_len=CONTEXT
            )
            for session, known, blocks, sampling in zip(
                self._sessions, self._known, self._blocks, self._sampling, strict=True
            )
        )
        result = worker.execute(StepPlan(step=1, sequences=sequences))
        if result.failures:
            raise SystemExit(f"a step failed: {result.failures[0].message}")
        for known, token in zip(self._known, result.sampled, strict=True):
            known.append(token)
        self.results.append(result)

    def output(self, index: int) -> list[int]:
        """What one of them has written."""
        return self._known[index][CONTEXT:]


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="model directory; the demo model where none is given")
    parser.add_argument("--threads", type=int, default=0, help="compute threads; 0 is all cores")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--json", type=Path, help="also write the figures there")
    args = parser.parse_args()
    environment = engine_environment()
    if environment != dict(os.environ):  # it is read when libraries are loaded, which they are
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)

    directory = args.model or str(fetch_demo())
    per_sequence = -(-(CONTEXT + args.rounds + 1) // BLOCK)
    scheduler = SchedulerConfig(kv_tokens=(args.batch * per_sequence + 1) * BLOCK)
    worker = ModelWorker(InferenceConfig(ModelConfig(directory, num_threads=args.threads), scheduler=scheduler))
    info = worker.load()
    worker.bind_kv(torch.zeros(worker.layout().region_bytes, dtype=torch.uint8))
    worker.warm_up()
    grammars = GrammarCache(directory, info.eos_token_ids, info.vocab_size, lambda: None)
    worker.follow(MatcherBook(grammars, info.vocab_size, args.batch * len(GRAMMARS)))
    compiled = {}
    for name, grammar in GRAMMARS.items():
        if grammar is not None:
            began = time.perf_counter()
            grammars.get(grammar)
            compiled[name] = time.perf_counter() - began

    batches = {name: Batch(i, name, args.batch, args.rounds, args.temperature) for i, name in enumerate(GRAMMARS)}
    for _ in range(args.rounds):
        for batch in batches.values():
            batch.step(worker)

    vocabulary = grammars.get(SCHEMA).vocabulary
    ratios: dict[str, float] = {}
    free = [r.seconds for r in batches["free"].results]
    print(f"batch {args.batch}, {args.rounds} rounds, {torch.get_num_threads()} threads, {directory}")
    print(f"{'kind':<20}{'median ms':>12}{'of free':>9}{'best ms':>12}{'of free':>9}")
    for name, batch in batches.items():
        steps = [r.seconds for r in batch.results]
        median, best = statistics.median(steps), min(steps)
        ratio, at_best = median / statistics.median(free), best / min(free)
        print(f"{name:<20}{median * 1e3:>12.2f}{ratio:>9.3f}{best * 1e3:>12.2f}{at_best:>9.3f}")
        ratios |= {f"step by {name}: median": ratio, f"step by {name}: best": at_best}
    for name in ("JSON schema", "regex", "Lark"):
        print(f"{name}: {vocabulary.decode_str(batches[name].output(0))!r}")
    if args.json:
        args.json.write_text(json.dumps({"ratios": ratios, "seconds_to_compile": compiled}, indent=1))


if __name__ == "__main__":
    main()
