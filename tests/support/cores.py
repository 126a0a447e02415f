"""An EngineCore with a deterministic executor, driven by hand in unit tests."""

from __future__ import annotations

from collections.abc import Sequence

from engine_core.engine import EngineCore
from engine_core.kv.manager import KVCacheManager
from engine_core.scheduler.messages import FirstToken, Frame, Outputs, PromptLogprobs, SessionOutput
from engine_core.scheduler.step import ScheduledSequence, SequenceFailure, StepPlan, StepResult
from engine_core.transfer.base import LinkClosed, LinkOpened, TransferCommand
from engine_core.types.ids import Incarnation
from engine_core.types.request import Role
from engine_core.types.sampling import TokenLogprobs
from tests.support.builders import layout, scheduler
from tests.support.clock import VirtualClock

EOS = 99


def next_token(position: int) -> int:
    """The token that the fake executor draws at a position: never EOS by itself."""
    return 1000 + position


def score(token: int, position: int) -> TokenLogprobs:
    """The log probabilities that the fake executor gives to a token at a position."""
    return TokenLogprobs(token, -float(position), 1)


class DrivenCore:
    """Wraps a core: collects frames and commands, runs steps on demand."""

    def __init__(
        self,
        role: Role,
        *,
        num_blocks: int = 5,
        block_size: int = 2,
        verify_kv: bool = False,
        vocab_size: int = 0,
        **config: object,
    ):
        self.layout = layout(num_blocks, block_size)
        self.kv = KVCacheManager(self.layout, "test", True)
        self.clock = VirtualClock()
        self.core = EngineCore(
            role, scheduler(block_size, **config), self.kv, self.layout,
            eos_token_ids=(EOS,), max_model_len=64, verify_kv=verify_kv, vocab_size=vocab_size,
        )  # fmt: skip
        self.frames: list[Frame] = []
        self.commands: list[TransferCommand] = []
        self.plans: list[StepPlan] = []
        self.forced: dict[int, int] = {}
        self.failing: dict[int, bool] = {}
        """Positions whose draw fails; True when the sequence is lost, and not to blame."""
        self.silent = False
        """True for an executor that gives no log probabilities."""

    def link(self, link_id: int = 1, *, local_quiet: bool = False) -> None:
        """Opens a link."""
        self.core.on_transfer(
            LinkOpened(link_id, Incarnation(7), "peer", "tcp" if local_quiet else "shm", "test", local_quiet),
            self.clock(),
        )
        self.take()

    def unlink(self, link_id: int = 1, *, quiet_proved: bool = True) -> list[Frame | TransferCommand]:
        """Closes a link."""
        self.core.on_transfer(LinkClosed(link_id, Incarnation(7), "gone", quiet_proved), self.clock())
        return self.take()

    def send(self, *frames: Frame) -> list[Frame | TransferCommand]:
        """Hands frames over and ticks; returns what the core wants done."""
        for frame in frames:
            self.core.on_frame(frame, self.clock())
        return self.take()

    def event(self, event: object) -> list[Frame | TransferCommand]:
        """Hands a transfer event over and ticks."""
        self.core.on_transfer(event, self.clock())  # type: ignore[arg-type]
        return self.take()

    def take(self) -> list[Frame | TransferCommand]:
        """Ticks, checks the core, returns commands and frames since the last call."""
        self.core.tick(self.clock())
        self.core.check()
        commands, frames = self.core.take_commands(), self.core.take_frames()
        self.commands += commands
        self.frames += frames
        return [*commands, *frames]

    def step(self) -> StepPlan | None:
        """One step, if there is one; the token at a position is next_token or what `forced` says."""
        self.core.tick(self.clock())
        plan = self.core.decide(self.clock())
        if plan is None:
            return None
        self.plans.append(plan)
        sampled, failures = [], []
        logprobs: list[TokenLogprobs | None] = []
        for index, part in enumerate(plan.sequences):
            position = part.start + len(part.token_ids)
            if part.sample and position in self.failing:
                failures.append(SequenceFailure(index, "no number", self.failing[position]))
            token = self.forced.get(position, next_token(position))
            sampled.append(token if part.sample else -1)
            asked = part.sample and part.sampling.logprobs is not None
            logprobs.append(score(token, position) if asked else None)
        result = StepResult(
            plan.step,
            tuple(sampled),
            failures=tuple(failures),
            logprobs=tuple(logprobs) if any(logprobs) and not self.silent else (),
            prompt_logprobs=() if self.silent else tuple(self._scores(part) for part in plan.sequences),
        )
        self.core.settle(plan, result, self.clock())
        self.take()
        return plan

    def _scores(self, part: ScheduledSequence) -> tuple[TokenLogprobs, ...]:
        first, end = part.scored
        assert first == end or part.start < first <= end <= part.start + len(part.token_ids) + 1
        return tuple(score(part.known[position], position) for position in range(first, end))

    def run(self, limit: int = 1000) -> int:
        """Steps until there is nothing to compute; returns the number of steps."""
        for count in range(limit):
            if self.step() is None:
                return count
        raise AssertionError(f"still busy after {limit} steps")

    def outputs(self, room: int = 1) -> list[SessionOutput]:
        """All outputs of a room so far."""
        return [o for f in self.frames if isinstance(f, Outputs) for o in f.outputs if o.session.room == room]

    def tokens(self, room: int = 1) -> list[int]:
        """All output tokens of a room so far; asserts that indexes have no gap and no overlap."""
        tokens: list[int] = []
        first: int | None = None
        for output in self.outputs(room):
            first = output.first_index if first is None else first
            assert output.first_index == first + len(tokens)
            tokens += output.token_ids
        return tokens

    def scores(self, room: int = 1) -> list[TokenLogprobs]:
        """All prompt scores of a room so far; asserts that positions come in order, each once, before any token."""
        found: list[TokenLogprobs] = []
        tokens = False
        for frame in self.frames:
            if isinstance(frame, PromptLogprobs) and frame.session.room == room:
                assert frame.first_position == 1 + len(found) and not tokens
                found += frame.positions
            elif isinstance(frame, FirstToken):
                tokens = tokens or frame.session.room == room
            elif isinstance(frame, Outputs):
                tokens = tokens or any(o.token_ids and o.session.room == room for o in frame.outputs)
        return found


def of(kind: type, items: Sequence[object]) -> list:  # type: ignore[type-arg]
    """The items of one kind."""
    return [i for i in items if isinstance(i, kind)]
