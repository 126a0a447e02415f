"""What the engine's loop needs of an executor. Implemented by ModelWorker; faked in the explorer."""

from __future__ import annotations

from typing import Protocol

from engine_core.scheduler.step import StepPlan, StepResult


class Executor(Protocol):
    """Computes one step at a time on one device; blocking; owned by one thread."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs the plan. Raises InternalError when the device fails; the engine then ends."""
