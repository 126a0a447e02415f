"""Which tokens a grammar allows: what the worker asks of whoever knows the grammars."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from engine_core.scheduler.step import StepPlan

Masks = dict[int, npt.NDArray[np.uint32]]
"""By index in the plan: ceil(V / 32) words; bit t % 32 of word t // 32 allows token t."""


class MaskSource(Protocol):
    """Masks of one plan at a time; both calls come from the engine's thread, start before collect."""

    def start(self, plan: StepPlan) -> None:
        """Begins with the masks of the plan's sampled sequences that have a grammar. Returns at once: the work
        goes on beside the forward. What the plan names is to be read before collect returns, not later."""

    def collect(self) -> tuple[Masks, dict[int, str]]:
        """Waits for what start began. Returns the masks, and why there is none, by index in the plan: those
        sequences fail, the others go on."""


class NoMasks:
    """Implements MaskSource where nobody knows grammars: a sequence that has one fails, rather than go free."""

    def __init__(self) -> None:
        self._problems: dict[int, str] = {}

    def start(self, plan: StepPlan) -> None:
        self._problems = {
            i: "this worker follows no grammars"
            for i, s in enumerate(plan.sequences)
            if s.sample and s.sampling.grammar is not None
        }

    def collect(self) -> tuple[Masks, dict[int, str]]:
        return {}, self._problems
