"""A recording covers the steps asked for and ends as a Chrome trace."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from engine_core.execution.profiler import ProfilerManager


def test_a_profile_ends_after_its_steps(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    profiler = ProfilerManager()
    profiler.after_step()
    profiler.start(str(path), 2)
    for _ in range(2):
        torch.ones(4).cumsum(0)
        assert not path.exists()
        profiler.after_step()
    events = json.loads(path.read_text())["traceEvents"]
    assert sum(e.get("name") == "aten::cumsum" for e in events) == 2
    profiler.stop()


def test_a_path_that_cannot_be_written_harms_nothing(tmp_path: Path) -> None:
    profiler = ProfilerManager()
    profiler.start(str(tmp_path / "missing" / "trace.json"), 1)
    profiler.after_step()
    profiler.stop()
