"""Sends the requests of a run and times them: the only part besides the client that waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from services.bench.client import Client, Reply
from services.bench.outcome import Failure, Outcome
from services.bench.plan import LevelPlan, RunOptions, levels
from services.bench.report import Level
from services.bench.summary import summarize
from services.bench.tally import Tally
from services.bench.workload import Ask, Calibration, prompt_text
from services.runtime.tasks import Stop, TaskOwner

_WAIT_AFTER_429 = 1.0
"""Seconds, where a 429 names none."""
_LONGEST_PAUSE = 10.0
"""Seconds that one client of a closed loop pauses at most after a 429."""
_WARMUP_CONCURRENCY = 8
"""Of an open loop."""


@dataclass(frozen=True)
class Measured:
    """What a level gave."""

    outcomes: list[Outcome]
    wall: float
    interrupted: int
    client_cpu: float


class Runner:
    """Runs levels one after another against a client that is prepared."""

    def __init__(
        self, client: Client, options: RunOptions, calibration: Calibration, tally: Tally, run_id: str, stop: Stop
    ) -> None:
        self._client, self._options, self._calibration = client, options, calibration
        self._tally, self._run_id, self._stop = tally, run_id, stop

    async def run(self) -> list[Level]:
        """All levels, or those that began before the stop was asked for."""
        o, found = self._options, []
        plans = levels(o)
        self._tally.plans = plans
        for number, plan in enumerate(plans):
            if self._stop.draining.is_set():
                break
            if o.warmup:
                warmup = LevelPlan(
                    name=f"warm-up of {plan.name}",
                    load=plan.load,
                    concurrency=plan.concurrency or min(o.warmup, _WARMUP_CONCURRENCY),
                    requests=o.warmup,
                )
                await self._measure(warmup, "warming up", f"{self._run_id}-w{number}")
            if self._stop.draining.is_set():
                break
            measured = await self._measure(plan, "measuring", f"{self._run_id}-{number}")
            level = summarize(
                plan.name,
                plan.load,
                measured.outcomes,
                wall=measured.wall,
                objectives=o.objectives,
                interrupted=measured.interrupted,
                client_cpu=measured.client_cpu,
                rows=o.rows,
            )
            found.append(level)
            self._tally.finished.append(level)
        self._tally.phase = "done"
        return found

    async def _measure(self, plan: LevelPlan, phase: str, tag: str) -> Measured:
        level = _LevelRun(self._client, self._options, self._calibration, self._tally, plan, tag)
        return await level.run(phase, self._stop)


class _LevelRun:
    """One level while it runs."""

    def __init__(
        self,
        client: Client,
        options: RunOptions,
        calibration: Calibration,
        tally: Tally,
        plan: LevelPlan,
        tag: str,
    ) -> None:
        self._client, self._options, self._calibration = client, options, calibration
        self._tally, self._plan, self._tag = tally, plan, tag
        self._start = 0.0
        self._outcomes: list[Outcome] = []
        limit = 0 if plan.concurrency else options.max_in_flight
        self._room = asyncio.Semaphore(limit) if limit else None

    async def run(self, phase: str, stop: Stop) -> Measured:
        """Sends everything and waits for the answers, or until the stop is asked for."""
        plan, owner = self._plan, TaskOwner("bench")
        bodies = [self._body(ask) for ask in plan.asks]  # made before the clock starts
        cpu, self._start = time.process_time(), time.perf_counter()
        self._tally.begin(plan, phase, self._start)
        try:
            if plan.concurrency:
                asks = plan.closed(self._options.shape)
                tasks = [owner.spawn(self._ask_in_turn(asks), f"client {i}") for i in range(plan.concurrency)]
            else:
                tasks = [owner.spawn(self._ask_when_due(plan.asks, bodies, owner), "arrivals")]
            ended = owner.spawn(asyncio.wait(tasks), "level")
            told = owner.spawn(stop.draining.wait(), "stop")
            await asyncio.wait({ended, told}, return_when=asyncio.FIRST_COMPLETED)
            interrupted = 0 if ended.done() else self._tally.in_flight
            wall = time.perf_counter() - self._start
        finally:
            await owner.close()
        for task in tasks:
            if not task.cancelled() and (exc := task.exception()) is not None:
                raise exc
        if self._outcomes and not interrupted:
            wall = max(outcome.end for outcome in self._outcomes)
        cpu = time.process_time() - cpu
        return Measured(self._outcomes, wall, interrupted, cpu / wall if wall > 0 else 0.0)

    def _body(self, ask: Ask) -> bytes:
        prompt = prompt_text(ask, self._options.shape, self._plan.name, self._calibration)
        return self._client.body(prompt, ask.output_tokens)

    async def _ask_in_turn(self, asks: Iterator[Ask]) -> None:
        """One client of a closed loop."""
        duration = self._plan.duration
        until = float("inf") if duration is None else self._start + duration
        while (now := time.perf_counter()) < until:
            ask = next(asks, None)
            if ask is None:
                return
            outcome = await self._one(ask, self._body(ask), None)
            if outcome.failure is Failure.REJECTED:
                wait = outcome.retry_afters[-1]
                pause = _WAIT_AFTER_429 if wait is None else wait
                now = time.perf_counter()
                await asyncio.sleep(max(0.0, min(pause, _LONGEST_PAUSE, until - now)))

    async def _ask_when_due(self, asks: Sequence[Ask], bodies: Sequence[bytes], owner: TaskOwner) -> None:
        """An open loop: nothing that a request does delays the next."""
        running = []
        for ask, body in zip(asks, bodies, strict=True):
            due = self._start + (ask.due or 0.0)
            while (wait := due - time.perf_counter()) > 0:  # noqa: ASYNC110  # timers may come a little early
                await asyncio.sleep(wait)
            running.append(owner.spawn(self._one(ask, body, due), f"request {ask.index}"))
        if running:
            await asyncio.gather(*running)

    async def _one(self, ask: Ask, body: bytes, due: float | None) -> Outcome:
        tally, request_id = self._tally, f"{self._tag}-{ask.index}"
        due = time.perf_counter() if due is None else due
        tally.in_flight += 1
        try:
            if self._room is None:
                outcome = await self._attempts(ask, body, due, request_id)
            else:
                async with self._room:
                    outcome = await self._attempts(ask, body, due, request_id)
        finally:
            tally.in_flight -= 1
        tally.ended(outcome)
        self._outcomes.append(outcome)
        return outcome

    async def _attempts(self, ask: Ask, body: bytes, due: float, request_id: str) -> Outcome:
        """The request, again after each 429 if so asked; the wait counts."""

        def on_text(reply: Reply) -> None:
            tally.chunks += 1
            if reply.gaps:
                tally.gaps.append(reply.gaps[-1])
            elif reply.first is not None:
                tally.ttfts.append(reply.first - due)

        tally, waits, sent = self._tally, [], 0.0
        while True:
            reply = await self._client.stream(body, request_id, on_text)
            sent = sent or reply.sent
            if reply.failure is not Failure.REJECTED:
                break
            waits.append(reply.retry_after)
            wait = _WAIT_AFTER_429 if reply.retry_after is None else reply.retry_after
            if not self._options.retry_429 or reply.end + wait - due > self._options.timeout:
                break
            await asyncio.sleep(wait)
        start = self._start
        return Outcome(
            index=ask.index,
            request_id=request_id,
            due=due - start,
            sent=sent - start,
            end=reply.end - start,
            first=None if reply.first is None else reply.first - start,
            gaps=tuple(reply.gaps),
            prompt_asked=ask.prompt_tokens,
            output_asked=ask.output_tokens,
            prompt_tokens=reply.prompt_tokens,
            output_tokens=reply.output_tokens,
            cached_tokens=reply.cached_tokens,
            failure=reply.failure,
            status=reply.status,
            detail=reply.detail,
            retry_afters=tuple(waits),
        )
