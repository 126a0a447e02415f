"""The engine's loop: one thread that owns core and executor.

Each turn: take transfer events and frames, tick, carry out commands, send frames, run one step, settle.
Commands go before frames: a ticket leaves only when its blocks can be written. With nothing to compute
the loop sleeps until something arrives, a deadline passes or figures are due.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Sequence
from typing import Protocol

import msgspec

from engine_core.engine import EngineCore
from engine_core.execution.executor_api import Executor
from engine_core.host.channel import FrameChannel
from engine_core.host.step_page import StepPage
from engine_core.scheduler.messages import (
    ExpectPeer,
    Frame,
    Moves,
    Open,
    OpenPrefill,
    PairStats,
    ReportStats,
    Shutdown,
    StartProfile,
    StopProfile,
    Tokens,
)
from engine_core.transfer.base import ExpectLink, SetTokens, TransferCommand, TransferEvent, TransferPort

STATS_SECONDS = 1.0
"""How often figures are sent; they are the heartbeat that the service process listens to. They are also sent
when the last session is forgotten, so that an idle worker looks idle at once."""

MAX_QUARANTINED_SHARE = 0.5
"""Above this share of the pool the worker starts anew: a new pool is quiet. Its service process sees it in the
figures and hands the streams over first."""

QUARANTINE_PATIENCE = 10.0
"""Seconds after which the engine ends itself for that, should the service process not have done it."""


class QuarantineOverflow(Exception):
    """Too much of the pool waits for a proof of quiet."""


class Wake:
    """Wakes the loop from any thread."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def __call__(self) -> None:
        """Ends the present or the next sleep."""
        self._event.set()

    def sleep(self, seconds: float) -> None:
        """Sleeps until woken, at most `seconds`."""
        if seconds > 0:
            self._event.wait(seconds)
        self._event.clear()


class EventQueue:
    """Transfer events on their way to the loop."""

    def __init__(self, wake: Wake) -> None:
        self._events: queue.SimpleQueue[TransferEvent] = queue.SimpleQueue()
        self._wake = wake

    def post(self, event: TransferEvent) -> None:
        """Called by transfer threads."""
        self._events.put(event)
        self._wake()

    def drain(self) -> list[TransferEvent]:
        """All events that are here."""
        events = []
        while True:
            try:
                events.append(self._events.get_nowait())
            except queue.Empty:
                return events


class Profiler(Protocol):
    """Records steps; see execution/profiler.py."""

    def start(self, path: str, steps: int) -> None: ...
    def after_step(self) -> None: ...
    def stop(self) -> None: ...


class Gate(Protocol):
    """Holds sessions back until they can be served; see host/gate.py."""

    def pass_on(self, frames: Sequence[Frame], now: float) -> tuple[list[Frame], list[Frame]]: ...


class EngineLoop:
    """Runs until Shutdown arrives. Raises what the executor raises, and QuarantineOverflow."""

    def __init__(
        self,
        core: EngineCore,
        executor: Executor,
        channel: FrameChannel,
        transfer: TransferPort | None,
        events: EventQueue,
        wake: Wake,
        profiler: Profiler,
        gate: Gate,
        page: StepPage | None = None,
    ) -> None:
        """`page` tells the service process whose step it is."""
        self._page = page
        self._core, self._executor, self._channel = core, executor, channel
        self._profiler, self._gate = profiler, gate
        self._transfer, self._events, self._wake = transfer, events, wake
        self._stats_at = 0.0
        self._was_idle = True
        self._moved = False
        self._step_seconds = 0.0
        self._forward_seconds = 0.0
        self._overflow_since = math.inf

    def run(self) -> None:
        """The loop."""
        while self._turn():
            pass

    def _turn(self) -> bool:
        # What moved in the last turn may have made room for something that waits: look once more before sleeping.
        if not self._core.has_work() and not self._moved:
            self._wake.sleep(self._sleep_seconds(time.monotonic()))
        self._moved = False
        # Frames are taken first and applied last: an event that happened before a frame was sent is
        # in the queue by then, so that causes are seen before effects.
        frames = self._channel.drain()
        for event in self._events.drain():
            self._core.on_transfer(event, time.monotonic())
        frames, refusals = self._gate.pass_on(frames, time.monotonic())
        for frame in refusals:
            self._channel.send(frame)
        for frame in frames:
            if isinstance(frame, Shutdown):
                return False
            self._take(frame)
        self._core.tick(time.monotonic())
        plan = self._core.decide(time.monotonic())
        self._flush()
        if plan is not None:
            if self._page is not None:
                self._page.begin([part.session for part in plan.sequences])
            result = self._executor.execute(plan)
            self._step_seconds += result.seconds
            self._forward_seconds += result.forward_seconds
            self._core.settle(plan, result, time.monotonic())
            if self._page is not None:
                self._page.end()
            self._flush()
            self._profiler.after_step()
        self._report(time.monotonic())
        return True

    def _take(self, frame: Frame) -> None:
        match frame:
            case ReportStats():
                self._stats_at = 0.0
            case StartProfile():
                self._profiler.start(frame.path, frame.steps)
            case StopProfile():
                self._profiler.stop()
            case ExpectPeer(peer_incarnation=peer, secret=secret):
                self._submit(ExpectLink(peer, secret))
            case Tokens(tokens=tokens):
                self._submit(SetTokens(tokens))
            case _:
                self._core_frame(frame)

    def _core_frame(self, frame: Frame) -> None:
        if self._page is not None and isinstance(frame, Open | OpenPrefill):
            self._page.begin((frame.spec.session,))
            self._core.on_frame(frame, time.monotonic())
            self._page.end()
        else:
            self._core.on_frame(frame, time.monotonic())

    def _submit(self, command: TransferCommand) -> None:
        if self._transfer is not None:
            self._transfer.submit(command)

    def _sleep_seconds(self, now: float) -> float:
        wakeup = self._core.next_wakeup()
        due = self._stats_at + STATS_SECONDS
        return min(due, wakeup if wakeup is not None else due) - now

    def _flush(self) -> None:
        for command in self._core.take_commands():
            self._submit(command)
        for frame in self._core.take_frames():
            self._channel.send(frame)
        moves = self._core.take_moves()
        if moves:
            self._moved = True
            self._channel.send(Moves(moves))

    def _report(self, now: float) -> None:
        idle = self._core.idle()
        became_idle, self._was_idle = idle and not self._was_idle, idle
        if now < self._stats_at + STATS_SECONDS and not became_idle:
            return
        self._stats_at = now
        stats = self._core.stats()
        figures = self._transfer.figures() if self._transfer is not None else ()
        pairs = tuple(
            PairStats(
                f.link_id,
                f.peer_incarnation,
                f.peer_instance,
                f.transport,
                f.reason,
                f.up,
                f.bytes,
                f.seconds,
                f.failures,
            )
            for f in figures
        )
        counters = {
            **stats.counters,
            "step_seconds": self._step_seconds,
            "forward_seconds": self._forward_seconds,
        }
        self._channel.send(msgspec.structs.replace(stats, pairs=pairs, counters=counters))
        if self._core.quarantined_share() <= MAX_QUARANTINED_SHARE:
            self._overflow_since = math.inf
        elif now - (since := min(self._overflow_since, now)) < QUARANTINE_PATIENCE:
            self._overflow_since = since
        else:
            raise QuarantineOverflow(f"{self._core.quarantined_share():.0%} of the KV cache is quarantined")
