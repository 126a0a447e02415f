"""An engine process: EngineCore, its inboxes, a fake executor over symbolic KV.

One turn of its loop takes some frames and events, ticks, decides; the plan is carried out and settled
at a later moment, so that transports and time run beside a step as they do in production.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from engine_core.host import frames
from engine_core.scheduler.step import ScheduledSequence, StepPlan, StepResult
from engine_core.transfer import base
from engine_core.types.ids import Incarnation, SessionId
from engine_core.types.kv import KvLayout
from engine_core.types.request import Role
from engine_core.types.sampling import TokenLogprobs
from tests.support.builders import layout as build_layout
from tests.support.explorer.links import DeadEnd, Link
from tests.support.explorer.symbols import EOS, SymbolicPool, Violation, draw, score

if TYPE_CHECKING:
    from engine_core.config import SchedulerConfig
    from tests.support.explorer.shells import Shell
    from tests.support.explorer.world import World


class EngineProcess:
    """One life of an engine process."""

    def __init__(
        self, world: World, instance: str, incarnation: Incarnation, role: Role, config: SchedulerConfig, blocks: int
    ) -> None:
        self.world, self.instance, self.incarnation, self.role = world, instance, incarnation, role
        self.layout: KvLayout = build_layout(blocks + 1, config.block_size)
        self.config = config
        self.kv = world.make_kv(self.layout, "same", config.enable_prefix_cache)
        self.core = world.make_core(
            role,
            config,
            self.kv,
            self.layout,
            eos_token_ids=(EOS,),
            max_model_len=blocks * config.block_size + 1,
            verify_kv=world.scenario.verify_kv,
        )
        self.pool = SymbolicPool(blocks + 1, config.block_size)
        self.shell: Shell | None = None
        self.frames_in: deque[Any] = deque()
        self.events_in: deque[Any] = deque()
        self.commands: dict[int, deque[Any]] = {}
        self.links: dict[int, Link] = {}
        self.sessions: dict[SessionId, None] = {}
        self.plan: StepPlan | None = None
        self.awake = False
        self.wakeup: float | None = None
        self.alive, self.stopped = True, False

    @property
    def running(self) -> bool:
        """Alive and not stopped."""
        return self.alive and not self.stopped

    @property
    def can_turn(self) -> bool:
        """The loop would not sleep now."""
        if not self.running or self.plan is not None:
            return False
        due = self.wakeup is not None and self.wakeup <= self.world.clock.now
        return bool(self.frames_in or self.events_in or self.awake or due)

    @property
    def settled(self) -> bool:
        """Nothing is left to do."""
        return not (self.frames_in or self.events_in or self.awake or self.plan or any(self.commands.values()))

    def post(self, event: base.TransferEvent) -> None:
        """A transfer thread posts an event."""
        if self.alive:
            self.events_in.append(event)

    def owns(self, session: SessionId, block: int) -> bool:
        """True when the session holds the block."""
        kv = self.kv
        return kv.holds(session) and block in kv.block_ids(session)[0]

    def alone(self, session: SessionId, block: int) -> bool:
        """True when no other session has the block in its table."""
        kv = self.kv
        return not any(
            other != session and kv.holds(other) and block in kv.block_ids(other)[0] for other in self.sessions
        )

    # ---- the loop ----

    def turn(self) -> None:
        """Some inputs, then tick and decide."""
        rng, now, core = self.world.rng, self.world.clock.now, self.core
        for _ in range(rng.randint(0 if self.awake else 1, 1 + len(self.frames_in) + len(self.events_in))):
            if self.frames_in and (not self.events_in or rng.random() < 0.5):
                self._take_frame(now)
            elif self.events_in:
                core.on_transfer(self.events_in.popleft(), now)
        core.tick(now)
        self.plan = core.decide(now)
        self.awake = False
        self._flush()
        if self.plan is None and core.has_work():
            raise Violation(f"{self.instance}: there is work and no plan: the loop spins")
        if self.plan is None and self.wakeup is not None and self.wakeup <= now:
            raise Violation(f"{self.instance}: next_wakeup {self.wakeup} is not after {now}: the loop spins")

    def execute(self) -> None:
        """Carries out the plan, settles it."""
        plan = self.plan
        assert plan is not None
        self.plan = None
        self.core.settle(plan, self._compute(plan), self.world.clock.now)
        self.awake = self.core.has_work()  # otherwise the loop sleeps
        self._flush()

    def _take_frame(self, now: float) -> None:
        frame = self.frames_in.popleft()
        session = getattr(frame, "session", None) or getattr(getattr(frame, "spec", None), "session", None)
        if session is not None:
            self.sessions[session] = None
        self.core.on_frame(frame, now)

    def _flush(self) -> None:
        for command in self.core.take_commands():
            link = self.links.get(command.link_id)
            if link is not None and isinstance(command, base.PrepareReceive):
                link.command(self, command)  # in force once submitted, before the ticket leaves
            else:
                self.commands.setdefault(command.link_id, deque()).append(command)
        for frame in self.core.take_frames():
            if self.shell is not None and self.shell.alive:
                self.shell.frames_in.append(self.world.through_wire(frame, to_engine=False))
        self.wakeup = self.core.next_wakeup()
        self.core.check()  # sessions against blocks, and the recount of all blocks

    def carry_out(self, link_id: int) -> None:
        """A transfer thread carries out the next command of a link."""
        queue = self.commands[link_id]
        command = queue.popleft()
        if not queue:
            del self.commands[link_id]
        if isinstance(command, base.Connect):
            peer = self.world.engine_of(command.peer_incarnation)
            if peer is None or not peer.alive:
                DeadEnd(link_id, command.peer_incarnation, self)
                return
            link = Link(link_id, self.world.scenario.flavour, self, peer)
            self.links[link_id] = peer.links[link_id] = link
            self.world.links.append(link)
        elif link_id in self.links:
            self.links[link_id].command(self, command)
        elif isinstance(command, base.Push):
            self.post(base.PushFailed(link_id, command.session, command.push_id, "no such link"))
        elif isinstance(command, base.CancelPush):
            self.post(base.SourceQuiet(link_id, command.session))

    # ---- the fake executor ----

    def _compute(self, plan: StepPlan) -> StepResult:
        sampled: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        seen: set[SessionId] = set()
        for part in plan.sequences:
            if part.session in seen:
                raise Violation(f"{part.session} is twice in one step")
            seen.add(part.session)
            token, report = self._compute_one(part)
            sampled.append(token)
            logprobs.append(report)
        if plan.num_tokens > self.config.max_batch_tokens:
            raise Violation(f"a step of {plan.num_tokens} tokens, above {self.config.max_batch_tokens}")
        scores = tuple(self._scores(part) for part in plan.sequences)
        return StepResult(plan.step, tuple(sampled), logprobs=tuple(logprobs), prompt_logprobs=scores)

    def _scores(self, part: ScheduledSequence) -> tuple[TokenLogprobs, ...]:
        """Of the scored positions, by what this very step has computed."""
        first, end = part.scored
        if first == end:
            return ()
        if not part.start < first < end <= min(part.start + len(part.token_ids) + 1, part.prompt_len):
            raise Violation(f"{part.session} scores [{first}, {end}) with [{part.start}, +{len(part.token_ids)})")
        found = []
        for position in range(first, end):
            content = self.pool.at(part.block_ids[0], position - 1)
            assert content is not None
            found.append(score(content[1], part.known[position]))
        return tuple(found)

    def _compute_one(self, part: ScheduledSequence) -> tuple[int, TokenLogprobs | None]:
        truth, table, session = self.world.truths[part.session.room], part.block_ids[0], part.session
        if not self.kv.holds(session):
            raise Violation(f"{session} computes without blocks")
        if tuple(part.known) != truth.tokens[: len(part.known)] or part.prompt_len != len(truth.prompt):
            raise Violation(f"{session} knows {part.known}, {part.prompt_len} of the prompt; right is {truth.tokens}")
        for position in range(part.start):
            found, right = self.pool.at(table, position), truth.content(position)
            if found != right:
                raise Violation(f"{self.instance}: {session} reads {found} at {position}, right is {right}")
        for offset, token in enumerate(part.token_ids):
            position = part.start + offset
            if truth.tokens[position] != token:
                raise Violation(f"{session} computes token {token} at {position}, right is {truth.tokens[position]}")
            block = table[position // self.config.block_size]
            if not self.owns(session, block):
                raise Violation(f"{self.instance}: {session} computes into block {block}, which it does not hold")
            if not self.alone(session, block):
                raise Violation(f"{self.instance}: {session} computes into block {block}, which another shares")
            self.pool.put(table, position, truth.content(position))
        if not part.sample:
            return -1, None
        last = part.start + len(part.token_ids) - 1
        content = self.pool.at(table, last)
        assert content is not None
        token = draw(content[1], part.sampling.seed, part.banned_token_ids)
        return token, score(content[1], token) if part.sampling.logprobs is not None else None

    # ---- the end ----

    def die(self) -> None:
        """kill -9, or the exit after the service's death."""
        self.alive = False
        self.frames_in.clear()
        self.events_in.clear()
        self.commands.clear()
        self.plan, self.awake = None, False
        for link in self.links.values():
            link.process_died(self)


def engine_frame(frame: frames.Frame, to_engine: bool) -> frames.Frame:
    """Encodes and decodes a frame as the pipe would."""
    body = frames.encode(frame)[4:]
    return (frames.to_engine_decoder if to_engine else frames.from_engine_decoder).decode(body)
