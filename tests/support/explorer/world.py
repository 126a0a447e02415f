"""The schedule: what may happen next, drawn by the seed; faults; checks at the end."""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from engine_core.engine import EngineCore
from engine_core.kv.manager import KVCacheManager
from engine_core.types.ids import Incarnation
from engine_core.types.request import Role
from engine_core.types.sampling import SamplingParams
from tests.support.clock import VirtualClock
from tests.support.explorer.engines import EngineProcess, engine_frame
from tests.support.explorer.faults import KEEPALIVE, Faults
from tests.support.explorer.journey import GRACE, Journey
from tests.support.explorer.links import Link
from tests.support.explorer.scenario import Ask, Scenario, scenario_of
from tests.support.explorer.shells import DecodeShell, PrefillShell, Shell
from tests.support.explorer.symbols import Truth, Violation
from tests.support.explorer.wires import Call, Peer, Process

FAULTY_ACTIONS = 400
MAX_ACTIONS = 6000
PATIENCE = 14.0
"""Less than any timeout: without a fault nothing may need one."""
PACES = (0.03, 0.2, 1.0, 1.0, 4.0)

Action = tuple[str, Callable[..., None], tuple[Any, ...]]


class Failure(msgspec.Struct, frozen=True):
    """A seed that broke a rule."""

    seed: int
    message: str
    trace: tuple[str, ...]

    def __str__(self) -> str:
        steps = "\n".join(f"  {i:4d} {line}" for i, line in enumerate(self.trace))
        return f"seed {self.seed}: {self.message}\n{steps}\nreplay: run_seed({self.seed}, trace=True)"


class RouterProcess:
    """The router; it is never stopped here."""

    alive = running = True


class World:
    """One run."""

    def __init__(self, seed: int, *, make_core: Callable[..., Any], make_kv: Callable[..., Any], trace: bool) -> None:
        self.rng = random.Random(seed)
        self.scenario: Scenario = scenario_of(self.rng)
        self.clock = VirtualClock()
        self.make_core, self.make_kv = make_core, make_kv
        self.trace: list[str] | None = [str(self.scenario)] if trace else None
        self.calls: list[Call] = []
        self.links: list[Link] = []
        self.server_state: dict[Call, Any] = {}
        self.truths: dict[int, Truth] = {}
        self.journeys: list[Journey] = []
        self.router = RouterProcess()
        self._paces: dict[str, float] = {}
        self._engines: dict[Incarnation, EngineProcess] = {}
        self._next_link = 100
        self._next_incarnation = 10
        self.roles = [Role.PREFILL] * self.scenario.prefills + [
            Role.MIXED if self.scenario.mixed else Role.DECODE
        ] * self.scenario.decodes
        self.shells: list[Shell] = [self._start(slot) for slot in range(len(self.roles))]
        self.known: list[Incarnation] = [s.incarnation for s in self.shells]
        self.faults = Faults(self)
        self._to_launch = list(self.scenario.asks)

    # ---- who is there ----

    def _start(self, slot: int) -> Shell:
        role = self.roles[slot]
        incarnation = Incarnation(self._next_incarnation)
        self._next_incarnation += 1
        s = self.scenario
        prefill = role is Role.PREFILL
        engine = EngineProcess(
            self, f"{role.value.lower()}-{slot}", incarnation, role,
            s.prefill_config if prefill else s.decode_config, s.prefill_blocks if prefill else s.decode_blocks,
        )  # fmt: skip
        self._engines[incarnation] = engine
        return PrefillShell(self, engine) if prefill else DecodeShell(self, engine)

    def engine_of(self, incarnation: Incarnation) -> EngineProcess | None:
        """The engine of an incarnation."""
        return self._engines.get(incarnation)

    def prefill_at(self, slot: int) -> Shell:
        """The prefill service that listens at an endpoint now."""
        return self.shells[slot]

    def decode_at(self, slot: int) -> Shell:
        """The decode service that listens at an endpoint now."""
        return self.shells[self.scenario.prefills + slot]

    def known_prefill(self, slot: int) -> Incarnation:
        """The incarnation that the router's table has."""
        return self.known[slot]

    def known_decode(self, slot: int) -> Incarnation:
        """The incarnation that the router's table has."""
        return self.known[self.scenario.prefills + slot]

    def place(self) -> tuple[int, int]:
        """A pair."""
        s = self.scenario
        return (self.rng.randrange(s.prefills) if s.prefills else 0, self.rng.randrange(s.decodes))

    def new_link_id(self) -> int:
        """A link id that no other has."""
        self._next_link += 1
        return self._next_link

    def call(self, name: str, client: Process, server: Shell, handler: Peer) -> Call:
        """Opens a call."""
        call = Call(name, client, server, handler, self.rng)
        call.server_handler = server  # type: ignore[assignment]
        self.calls.append(call)
        return call

    def through_wire(self, frame: Any, *, to_engine: bool) -> Any:
        """A frame as it comes out of the pipe."""
        return engine_frame(frame, to_engine) if self.scenario.encode_frames else frame

    # ---- what may happen ----

    def _actions(self, faulty: bool) -> list[Action]:
        actions: list[Action] = []
        for shell in self.shells:
            self._process_actions(shell, actions.append)
        for call in self.calls:
            if call.to_client and call.client.running:
                actions.append((f"{call.name}.down", call.deliver_to_client, ()))
            if call.to_server and call.server.running:
                actions.append((f"{call.name}.up", call.deliver_to_server, ()))
        for link in self.links:
            self._link_actions(link, actions.append)
        for journey in self.journeys:
            if journey.retry_at is not None and journey.retry_at <= self.clock.now:
                actions.append(("router.attempt", journey.start_attempt, ()))
        for slot, shell in enumerate(self.shells):
            if not shell.alive and not shell.engine.alive:
                actions.append(("supervisor", self._restart, (slot,)))
            elif self.known[slot] != shell.incarnation:
                actions.append(("table", self._learn, (slot,)))
        if self._to_launch:
            actions.append(("router.launch", self._launch, ()))
        if faulty:
            actions += self.faults.actions()
        return actions

    def _process_actions(self, shell: Shell, add: Callable[[Action], None]) -> None:
        engine = shell.engine
        name = engine.instance
        if engine.running:
            if engine.plan is not None:
                add((f"{name}.execute", engine.execute, ()))
            elif engine.can_turn:
                add((f"{name}.turn", engine.turn, ()))
            for link_id in engine.commands:
                add((f"{name}.threads", engine.carry_out, (link_id,)))
            if not shell.alive:
                add((f"{name}.orphan", self.kill_engine, (engine,)))
        if shell.running:
            if shell.frames_in:
                add((f"{name}.service", shell.take_frame, ()))
            if not engine.alive:
                add((f"{name}.orphan", self.kill_shell, (shell,)))

    def _link_actions(self, link: Link, add: Callable[[Action], None]) -> None:
        if link.to_reader and link.reader.running:
            add((f"link{link.link_id}.read", link.read_at_reader, ()))
        if link.to_writer and link.writer.running:
            add((f"link{link.link_id}.back", link.read_at_writer, ()))
        if link.writer.running:
            for session in link.pushes:
                add((f"link{link.link_id}.copy", link.copy, (session,)))

    def kill_shell(self, shell: Shell) -> None:
        """The service process dies."""
        shell.stopped = False
        shell.die()
        shell.engine.shell = None

    def kill_engine(self, engine: EngineProcess) -> None:
        """The engine process dies."""
        engine.stopped = False
        engine.die()

    def _restart(self, slot: int) -> None:
        self.shells[slot] = self._start(slot)

    def _learn(self, slot: int) -> None:
        self.known[slot] = self.shells[slot].incarnation

    def _launch(self) -> None:
        ask = self._to_launch.pop(0)
        self.ask(ask)

    def ask(self, ask: Ask, pair: tuple[int, int] | None = None) -> Journey:
        """A user asks."""
        room = len(self.journeys) + 1
        self.truths[room] = Truth(ask.prompt, ask.sampling, ask.salt)
        journey = Journey(self, room, ask, pair)
        self.journeys.append(journey)
        return journey

    # ---- time ----

    def _timers(self) -> Iterable[float]:
        for shell in self.shells:
            if shell.engine.running and shell.engine.wakeup is not None:
                yield shell.engine.wakeup
            if shell.running and isinstance(shell, DecodeShell):
                yield from shell.timeouts.values()
        for journey in self.journeys:
            if journey.retry_at is not None:
                yield journey.retry_at
            if not journey.over:
                yield journey.deadline + GRACE

    def _expire(self) -> None:
        for shell in self.shells:
            if shell.running and isinstance(shell, DecodeShell) and shell.timeouts:
                shell.expire()
        for journey in self.journeys:
            journey.expire()

    # ---- the run ----

    def run(self) -> None:
        """Runs to the end; raises what broke."""
        count = 0
        while count < FAULTY_ACTIONS and self._one(faulty=True):
            count += 1
        self.faults.heal()
        self._settle()
        self._check_ends()
        self._probe()
        self._settle()
        self._check_ends()

    def _one(self, *, faulty: bool) -> bool:
        """Lets one thing happen; False when nothing is left but time that nobody waits for."""
        actions = self._actions(faulty)
        if not actions:
            stopped = [p for s in self.shells for p in (s, s.engine) if p.stopped]
            when = min(self._timers(), default=None)
            if when is None:
                return False
            if stopped and self.rng.random() < 0.5:
                actions = [("fault.continue", self.faults.resume, (self.rng.choice(stopped),))]
            else:
                before = self.clock.now
                self.clock.advance_to(when)
                if stopped and self.clock.now - before > KEEPALIVE:
                    self.faults.break_stopped()
                self._note("time", ())
                self._expire()
                return True
        weights = [self._pace(a[0]) for a in actions]
        name, act, args = self.rng.choices(actions, weights)[0]
        self._note(name, args)
        act(*args)
        self.clock.advance(self.rng.choice((0.0, 0.0, 0.0005)))
        self._expire()
        if len(self.calls) > 4:
            self.calls = [c for c in self.calls if not c.over]
        return True

    def _pace(self, name: str) -> float:
        pace = self._paces.get(name)
        if pace is None:
            pace = self._paces[name] = self.rng.choice(PACES)
        return pace

    def _note(self, name: str, args: tuple[Any, ...]) -> None:
        if self.trace is not None:
            shown = " ".join(str(a) for a in args if isinstance(a, int | str | msgspec.Struct))
            self.trace.append(f"{self.clock.now:.4f} {name} {shown}")

    def _settle(self) -> None:
        for _ in range(MAX_ACTIONS):
            if not self._one(faulty=False):
                return
        raise Violation(f"no end after {MAX_ACTIONS} actions")

    def _probe(self) -> None:
        """After all faults every pair must serve again."""
        s = self.scenario
        size = s.prefill_config.block_size + 1
        fits = s.prefill_config.block_size * min(s.decode_blocks, s.prefill_blocks or s.decode_blocks)
        for prefill in range(max(1, s.prefills)):
            for decode in range(s.decodes):
                prompt = tuple(self.rng.randrange(6) for _ in range(min(size, fits)))
                params = SamplingParams(max_tokens=2, seed=1, ignore_eos=True)
                self.ask(Ask(prompt, params, "", 600.0), (prefill, decode))

    def _check_ends(self) -> None:
        calm = self.scenario.kind in ("calm", "cancel")
        for journey in self.journeys:
            if not journey.over:
                raise Violation(f"room {journey.room} has no end")
            strict = calm or journey.pair is not None
            right = "done" if journey.ask.fits else "refused"
            if strict and journey.outcome not in (right, "cancelled"):
                raise Violation(f"room {journey.room} without a fault: {journey.outcome} {journey.error}")
            if self.scenario.kind == "calm" and journey.attempt > 0:
                raise Violation(f"room {journey.room} needed another attempt without a fault: {journey.error}")
            if self.scenario.kind == "calm" and journey.took > PATIENCE:
                raise Violation(f"room {journey.room} without a fault took {journey.took:.0f} s: a timeout freed it")
        for shell in self.shells:
            engine = shell.engine
            name = engine.instance
            if shell.streams:
                raise Violation(f"{name}: streams are left: {list(shell.streams)}")
            if not engine.core.idle():
                raise Violation(f"{name}: a state without an exit")
            usage = engine.kv.usage()
            if usage.free + usage.cached != usage.total:
                raise Violation(f"{name}: blocks are lost: {usage}")
            if not engine.settled:
                raise Violation(f"{name}: work is left")
        for call in self.calls:
            if not call.over:
                raise Violation(f"call {call.name} is left open")


def run_seed(
    seed: int,
    *,
    make_core: Callable[..., Any] = EngineCore,
    make_kv: Callable[..., Any] = KVCacheManager,
    trace: bool = False,
) -> Failure | None:
    """Runs one seed. A failure is run again with its trace, and returned."""
    world = World(seed, make_core=make_core, make_kv=make_kv, trace=trace)
    try:
        world.run()
    except Exception as exc:  # noqa: BLE001 - whatever breaks is a finding
        if not trace:
            return run_seed(seed, make_core=make_core, make_kv=make_kv, trace=True)
        where = traceback.extract_tb(exc.__traceback__)[-1]
        message = f"{type(exc).__name__}: {exc} ({where.filename.rsplit('/', 1)[-1]}:{where.lineno})"
        return Failure(seed, message, tuple(world.trace or ()))
    return None


def record(seed: int) -> tuple[str, ...]:
    """The trace of a seed that keeps the rules."""
    world = World(seed, make_core=EngineCore, make_kv=KVCacheManager, trace=True)
    world.run()
    return tuple(world.trace or ())


def explore(
    seeds: Iterable[int], *, make_core: Callable[..., Any] = EngineCore, make_kv: Callable[..., Any] = KVCacheManager
) -> Failure | None:
    """Runs seeds until one fails; returns it, or None."""
    for seed in seeds:
        failure = run_seed(seed, make_core=make_core, make_kv=make_kv)
        if failure is not None:
            return failure
    return None
