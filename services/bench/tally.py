"""What is known while a level runs: counted by the runner, read by the live view."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from services.bench.outcome import Failure, Outcome
from services.bench.plan import LevelPlan
from services.bench.report import Level

RECENT = 400
"""Measures that the percentiles of the live view are of."""


@dataclass
class Tally:
    """The running level, and those before it."""

    plans: list[LevelPlan] = field(default_factory=list)
    finished: list[Level] = field(default_factory=list)
    plan: LevelPlan | None = None
    phase: str = "asking the server"
    started: float = 0.0
    """time.perf_counter() of the level's start; 0 before it."""
    in_flight: int = 0
    completed: int = 0
    over: int = 0
    """Requests that ended, however."""
    errors: int = 0
    rejected: int = 0
    """Answers 429."""
    chunks: int = 0
    """Chunks with text of the level."""
    ttfts: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    gaps: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=60))
    """Chunks per second, one value a second."""
    last_error: str = ""

    def begin(self, plan: LevelPlan, phase: str, now: float) -> None:
        """A level, or its warm-up, starts."""
        self.plan, self.phase, self.started = plan, phase, now
        self.in_flight = self.completed = self.over = self.errors = self.rejected = self.chunks = 0
        self.ttfts.clear()
        self.gaps.clear()
        self.rates.clear()

    def ended(self, outcome: Outcome) -> None:
        """A request ended."""
        self.over += 1
        self.rejected += len(outcome.retry_afters)
        if outcome.ok:
            self.completed += 1
        elif outcome.failure is not Failure.REJECTED:
            self.errors += 1
            self.last_error = outcome.detail

    def share_done(self, now: float) -> float:
        """How much of the level is over, 0 to 1."""
        plan = self.plan
        if plan is None or not self.started:
            return 0.0
        total = len(plan.asks) or plan.requests
        shares = [self.over / total] if total else []
        if plan.duration:
            shares.append((now - self.started) / plan.duration)
        return min(1.0, max(shares, default=0.0))
