"""EngineCore: decide → (execute) → settle, for every role.

It is pure: messages, transfer events and step results go in with the time; frames, commands and step
plans come out. The host runs it in one thread and carries out what it says; the explorer runs the very
same object in a simulated world. Frames and events are handled between steps, never during one.
"""

from __future__ import annotations

from typing import Protocol

from engine_core.config import SchedulerConfig
from engine_core.kv.api import KvManager
from engine_core.lifecycle.machine import Move
from engine_core.scheduler.context import SchedulerContext
from engine_core.scheduler.decode import DecodeDisaggScheduler
from engine_core.scheduler.messages import ConnectLink, Frame, LinkDown, LinkUp, Stats
from engine_core.scheduler.prefill import PrefillDisaggScheduler
from engine_core.scheduler.step import Computed, ScheduledSequence, SequenceFailure, StepPlan, StepResult
from engine_core.transfer.base import Connect, LinkClosed, LinkOpened, TransferCommand, TransferEvent
from engine_core.types.errors import InternalError
from engine_core.types.ids import SessionId
from engine_core.types.kv import KvLayout
from engine_core.types.request import Role


class Scheduler(Protocol):
    """What EngineCore needs of a role. See prefill.py and decode.py for the life of a session."""

    def on_frame(self, frame: Frame, now: float) -> None: ...
    def on_transfer(self, event: TransferEvent, now: float) -> None: ...
    def on_link_closed(self, event: LinkClosed, sessions: tuple[SessionId, ...], now: float) -> None: ...
    def tick(self, now: float) -> None: ...
    def next_wakeup(self) -> float | None: ...
    def schedule(self, now: float) -> list[ScheduledSequence]: ...
    def settle(self, part: ScheduledSequence, computed: Computed, now: float) -> None: ...
    def fail(self, part: ScheduledSequence, failure: SequenceFailure, now: float) -> None: ...
    def load(self) -> tuple[int, int, int]: ...
    def num_sessions(self) -> int: ...
    def stuck_blocks(self, now: float) -> int: ...
    def states(self) -> dict[str, int]: ...
    def quarantined(self) -> dict[str, int]: ...
    def has_work(self) -> bool: ...
    def check(self) -> None: ...


class EngineCore:
    """One engine's decisions. Single-threaded; `now` never goes back."""

    def __init__(
        self,
        role: Role,
        config: SchedulerConfig,
        kv: KvManager,
        layout: KvLayout,
        *,
        eos_token_ids: tuple[int, ...],
        max_model_len: int,
        verify_kv: bool = False,
        vocab_size: int = 0,
    ) -> None:
        self._context = SchedulerContext(
            role, config, kv, layout, frozenset(eos_token_ids), max_model_len, verify_kv, vocab_size
        )  # fmt: skip
        self._scheduler: Scheduler = (
            PrefillDisaggScheduler(self._context) if role is Role.PREFILL else DecodeDisaggScheduler(self._context)
        )
        self._step = 0
        self._outstanding: StepPlan | None = None
        self._ticked_at = 0.0

    def on_frame(self, frame: Frame, now: float) -> None:
        """Takes a message from the service process."""
        self._between_steps()
        if isinstance(frame, ConnectLink):
            self._context.out.command(
                Connect(
                    frame.link_id, frame.peer_incarnation, frame.peer_instance, frame.layout, frame.descriptors,
                    frame.transport, frame.secret,
                )
            )  # fmt: skip
            return
        self._scheduler.on_frame(frame, now)

    def on_transfer(self, event: TransferEvent, now: float) -> None:
        """Takes an event from the transfer threads."""
        self._between_steps()
        links, out = self._context.links, self._context.out
        if isinstance(event, LinkOpened):
            links.opened(event)
            out.frame(LinkUp(event.link_id, event.peer_incarnation, event.peer_instance, event.transport, event.reason))
        elif isinstance(event, LinkClosed):
            sessions = links.closed(event)
            self._scheduler.on_link_closed(event, sessions, now)
            out.frame(LinkDown(event.link_id, event.peer_incarnation, event.reason))
        else:
            self._scheduler.on_transfer(event, now)

    def tick(self, now: float) -> None:
        """Applies deadlines, then grants blocks. To be called before decide and at next_wakeup."""
        self._between_steps()
        self._ticked_at = now
        self._scheduler.tick(now)

    def decide(self, now: float) -> StepPlan | None:
        """The next step, or None when there is nothing to compute."""
        self._between_steps()
        parts = self._scheduler.schedule(now)
        if not parts:
            return None
        self._step += 1
        self._outstanding = StepPlan(self._step, tuple(parts))
        return self._outstanding

    def settle(self, plan: StepPlan, result: StepResult, now: float) -> None:
        """Applies the result of the plan that decide returned last."""
        if self._outstanding is not plan or result.step != plan.step or len(result.sampled) != len(plan.sequences):
            raise InternalError(f"the result of step {result.step} does not answer the plan of step {plan.step}")
        self._outstanding = None
        failed = {failure.index: failure for failure in result.failures}
        for index, part in enumerate(plan.sequences):
            if index in failed:
                self._scheduler.fail(part, failed[index], now)
                continue
            computed = result.of(index)
            lack = computed.lacks(part)
            if lack:
                self._scheduler.fail(part, SequenceFailure(index, lack), now)
            else:
                self._scheduler.settle(part, computed, now)
        decodes = sum(len(part.token_ids) == 1 for part in plan.sequences)
        tokens = plan.num_tokens
        self._context.pacer.observe(decodes, tokens - decodes, result.seconds)
        self._context.distributions.step(decodes, len(plan.sequences) - decodes, tokens, result.seconds)
        self._context.counters["steps"] += 1

    def take_frames(self) -> list[Frame]:
        """Frames for the service process, in order. To be sent after take_commands is carried out."""
        return self._context.out.take_frames()

    def take_commands(self) -> list[TransferCommand]:
        """Commands for the transfer threads, in order."""
        return self._context.out.take_commands()

    def take_moves(self) -> tuple[Move, ...]:
        """State moves since the last call."""
        moves, self._context.out.moves = self._context.out.moves, []
        return tuple(moves)

    def next_wakeup(self) -> float | None:
        """Absolute time of the earliest deadline, or None."""
        return self._scheduler.next_wakeup()

    def has_work(self) -> bool:
        """True when a step could be planned."""
        return self._scheduler.has_work()

    def idle(self) -> bool:
        """True when no session is known, quarantined ones included."""
        return self._scheduler.num_sessions() == 0

    def stats(self) -> Stats:
        """Figures without the pairs, which the transfer side knows."""
        running, queued, queued_tokens = self._scheduler.load()
        kv = self._context.kv
        prefix = {
            "prefix_query_tokens": kv.prefix_query_tokens,
            "prefix_hit_tokens": kv.prefix_hit_tokens,
            "evictions": kv.evictions,
        }
        return Stats(
            running=running,
            queued=queued,
            queued_tokens=queued_tokens,
            sessions=self._scheduler.num_sessions(),
            kv=kv.usage(),
            steps=self._step,
            busy=self.has_work(),
            counters={**self._context.counters, **prefix},
            histograms=self._context.distributions.figures(),
            states=self._scheduler.states(),
            quarantined=self._scheduler.quarantined(),
            stuck=self._scheduler.stuck_blocks(self._ticked_at),
        )

    def quarantined_share(self) -> float:
        """Blocks that are quarantined for longer than a living writer needs to answer, as a share of the pool."""
        return self._scheduler.stuck_blocks(self._ticked_at) / self._context.kv.usage().total

    def check(self) -> None:
        """Raises InternalError when blocks, sessions and counts disagree."""
        self._context.kv.check_conservation()
        self._scheduler.check()

    def _between_steps(self) -> None:
        if self._outstanding is not None:
            raise InternalError(f"step {self._outstanding.step} is not settled yet")
