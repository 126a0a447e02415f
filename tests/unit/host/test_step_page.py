"""The page that says whose step it is, and scripted faults."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_core.host.faults import FaultyExecutor, ScriptedFault
from engine_core.host.step_page import PAGE_BYTES, StepPage, create_page
from engine_core.scheduler.step import ScheduledSequence, SequenceFailure, StepPlan, StepResult
from engine_core.types.errors import ConfigError
from engine_core.types.ids import SessionId
from engine_core.types.sampling import SamplingParams


@pytest.fixture
def page_fd() -> Iterator[int]:
    fd = create_page()
    yield fd
    os.close(fd)


def test_both_ends_see_the_same(page_fd: int) -> None:
    engine, service = StepPage(page_fd), StepPage(page_fd)
    big = SessionId(2**63 - 1, 7)
    assert not service.busy_with(big)
    engine.begin([SessionId(1, 0), big])
    assert service.busy_with(big) and service.busy_with(SessionId(1, 0))
    assert not service.busy_with(SessionId(1, 1)) and not service.busy_with(SessionId(0, 1))
    engine.begin([SessionId(3)])
    assert service.busy_with(SessionId(3)) and not service.busy_with(big)
    engine.end()
    assert not service.busy_with(SessionId(3))


def test_more_sessions_than_fit_are_all_suspects(page_fd: int) -> None:
    engine, service = StepPage(page_fd), StepPage(page_fd)
    most = (PAGE_BYTES - 8) // 16
    engine.begin([SessionId(i) for i in range(most)])
    assert service.busy_with(SessionId(most - 1)) and not service.busy_with(SessionId(most))
    engine.begin([SessionId(i) for i in range(most + 1)])
    assert service.busy_with(SessionId(10**9))


def test_the_page_outlives_a_process_that_crashed(page_fd: int) -> None:
    program = textwrap.dedent("""
        import os, signal, sys
        from engine_core.host.step_page import StepPage
        from engine_core.types.ids import SessionId
        StepPage(int(sys.argv[1])).begin([SessionId(5, 2)])
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    done = subprocess.run([sys.executable, "-c", program, str(page_fd)], pass_fds=(page_fd,), timeout=60)
    assert done.returncode == -signal.SIGKILL
    service = StepPage(page_fd)
    assert service.busy_with(SessionId(5, 2)) and not service.busy_with(SessionId(5, 1))


class Drawing:
    """Draws the position."""

    def execute(self, plan: StepPlan) -> StepResult:
        return StepResult(plan.step, tuple(part.start + len(part.token_ids) for part in plan.sequences))


def part(tokens: list[int], start: int = 0, *, sample: bool = True) -> ScheduledSequence:
    return ScheduledSequence(SessionId(1), tokens, start, ([1],), sample, SamplingParams(max_tokens=1))


def run(script: str, *parts: ScheduledSequence) -> StepResult:
    return FaultyExecutor(Drawing(), script).execute(StepPlan(1, parts))


def test_rules_choose_their_sequence(tmp_path: Path) -> None:
    once = tmp_path / "once"
    rules = [
        {"token": 9, "action": "nan", "phase": "prompt"},
        {"position": 6, "action": "fail", "once": str(once)},
    ]
    executor = FaultyExecutor(Drawing(), json.dumps({"rules": rules}))
    plan = StepPlan(1, (part([9], 3), part([8, 9]), part([5], 5), part([4, 5], 4, sample=False)))
    result = executor.execute(plan)
    assert result.sampled == (4, 2, 6, 6)
    assert result.failures == (
        SequenceFailure(1, "the logits hold NaN (scripted)"),
        SequenceFailure(2, "the worker is gone (scripted)", lost=True),
    )
    assert once.exists()
    assert [f.index for f in executor.execute(plan).failures] == [1], "the second rule was for one time"


def test_a_rule_waits_for_its_file(tmp_path: Path) -> None:
    when = tmp_path / "when"
    script = json.dumps({"rules": [{"token": 9, "action": "raise", "when": str(when)}]})
    assert run(script, part([9])).sampled == (1,)
    when.touch()
    with pytest.raises(ScriptedFault):
        run(script, part([9]))
    assert run(script, part([8])).sampled == (1,)


@pytest.mark.parametrize(
    "script", ["{", '{"rules": [{"action": "explode"}]}', '{"rules": [{"action": "nan", "x": 1}]}']
)
def test_a_wrong_script_is_named(script: str) -> None:
    with pytest.raises(ConfigError, match="^fault_script: "):
        FaultyExecutor(Drawing(), script)
