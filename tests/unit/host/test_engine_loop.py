"""The loop sleeps only when nothing can go on: room that a step makes is used before the next sleep."""

from __future__ import annotations

from collections.abc import Sequence

from engine_core.host.loop import EngineLoop, EventQueue, Wake
from engine_core.scheduler.messages import Frame, Open, Outputs
from engine_core.scheduler.step import StepPlan, StepResult
from engine_core.types.request import Role
from tests.support.builders import FAR, spec
from tests.support.cores import DrivenCore, next_token


class Channel:
    """Frames in a list."""

    def __init__(self, *frames: Frame) -> None:
        self.incoming, self.sent = list(frames), list[Frame]()

    def drain(self) -> list[Frame]:
        frames, self.incoming = self.incoming, []
        return frames

    def send(self, frame: Frame) -> None:
        self.sent.append(frame)

    def finished(self) -> int:
        return sum(o.finish is not None for f in self.sent if isinstance(f, Outputs) for o in f.outputs)


class CountingWake(Wake):
    """Counts sleeps instead of sleeping."""

    sleeps = 0

    def sleep(self, seconds: float) -> None:
        self.sleeps += 1


class NextToken:
    """An executor that draws next_token."""

    def execute(self, plan: StepPlan) -> StepResult:
        return StepResult(plan.step, tuple(next_token(p.start + len(p.token_ids)) for p in plan.sequences))


class NoProfiler:
    """Records nothing."""

    def start(self, path: str, steps: int) -> None: ...
    def after_step(self) -> None: ...
    def stop(self) -> None: ...


class OpenGate:
    """Holds nothing back."""

    def pass_on(self, frames: Sequence[Frame], now: float) -> tuple[list[Frame], list[Frame]]:
        return list(frames), []


def test_room_that_an_end_makes_is_used_without_a_sleep() -> None:
    driven, wake = DrivenCore(Role.MIXED, num_blocks=5), CountingWake()
    # Each needs the whole pool; nobody sends EndSession.
    whole = [Open(spec(tuple(range(7)), room=r, max_tokens=2, deadline=FAR), remote=False) for r in (1, 2)]
    channel = Channel(*whole)
    loop = EngineLoop(driven.core, NextToken(), channel, None, EventQueue(wake), wake, NoProfiler(), OpenGate())  # type: ignore[arg-type]
    turns = 0
    while channel.finished() < 2:
        loop._turn()
        turns += 1
        assert turns < 20
    assert wake.sleeps == 1  # before the first frame came
