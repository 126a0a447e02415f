"""Chunks beside running sequences are as long as the step's stretch allows, once step times are known."""

from __future__ import annotations

import pytest

from engine_core.config import load_config
from engine_core.scheduler.messages import Open
from engine_core.scheduler.pacing import StepPacer
from engine_core.scheduler.step import StepPlan, StepResult
from engine_core.types.errors import ConfigError
from engine_core.types.request import Role
from tests.support.builders import spec
from tests.support.cores import DrivenCore, next_token


def test_what_is_not_known_bounds_nothing() -> None:
    pacer = StepPacer(2.0)
    assert pacer.chunk_budget(8, 512) == 512
    pacer.observe(8, 0, 0.0)
    pacer.observe(0, 512, 0.5)
    assert pacer.chunk_budget(8, 512) == 512


def test_the_stretch_bounds_the_chunk() -> None:
    pacer = StepPacer(2.0)
    pacer.observe(8, 0, 0.040)
    pacer.observe(0, 512, 0.512)  # 1 ms a token
    assert pacer.chunk_budget(8, 512) == 40
    assert pacer.chunk_budget(0, 512) == 512
    assert pacer.chunk_budget(8, 20) == 20
    for _ in range(50):
        pacer.observe(8, 40, 0.040 + 40 * 0.004)  # tokens became dearer
    assert pacer.chunk_budget(8, 512) == 16
    assert StepPacer(0.0).chunk_budget(8, 512) == 512


def test_an_engine_paces_prompts_beside_running_sequences() -> None:
    driven = DrivenCore(Role.MIXED, num_blocks=200, block_size=16, max_batch_tokens=512, max_step_stretch=2.0)
    core = driven.core

    def step() -> StepPlan:
        core.tick(driven.clock())
        plan = core.decide(driven.clock())
        assert plan is not None
        chunk = sum(len(p.token_ids) for p in plan.sequences if len(p.token_ids) > 1)
        sampled = tuple(next_token(p.start) if p.sample else -1 for p in plan.sequences)
        core.settle(plan, StepResult(plan.step, sampled, 0.002 * chunk + (0.05 if not chunk else 0.0)), driven.clock())
        return plan

    driven.send(Open(spec(tuple(range(40)), room=1, max_tokens=20), remote=False))
    assert step().num_tokens == 40
    assert step().num_tokens == 1
    driven.send(Open(spec(tuple(range(100, 160)), room=2, max_tokens=2), remote=False))
    plan = step()
    assert [len(p.token_ids) for p in plan.sequences] == [1, 25]


def test_a_stretch_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_step_stretch is 0.5"):
        load_config({"model": {"model_path": "m"}, "scheduler": {"max_step_stretch": 0.5}})
