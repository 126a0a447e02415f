"""Faults: cancels, kills, stops, broken calls and links, damaged pushes, leaps of time; each within a budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.support.explorer.links import Link, PushRun
from tests.support.explorer.shells import Shell
from tests.support.explorer.symbols import Content
from tests.support.explorer.wires import Call

if TYPE_CHECKING:
    from tests.support.explorer.journey import Journey
    from tests.support.explorer.world import World

KEEPALIVE = 10.0
"""Seconds after which a call to a stopped process breaks."""

_BUDGETS = ("cancels", "kills", "stops", "breaks", "link_breaks", "short_pushes", "corruptions", "jumps")
# Chance per action that a fault of the kind is among what may happen next.
_CHANCES = {"cancels": 0.06, "kills": 0.03, "stops": 0.04, "breaks": 0.05, "link_breaks": 0.03, "jumps": 0.04}
_CONTINUES = (0.005, 0.02, 0.1)

Action = tuple[str, Callable[..., None], tuple[Any, ...]]


class Faults:
    """What may go wrong in one run."""

    def __init__(self, world: World) -> None:
        self._world, self._rng = world, world.rng
        self._continues = self._rng.choice(_CONTINUES)
        self.left = {name: getattr(world.scenario, name) for name in _BUDGETS}

    def actions(self) -> list[Action]:
        """Faults that may happen next."""
        actions: list[Action] = []
        for shell in self._world.shells:
            for process in (shell, shell.engine):
                if process.stopped and self._rng.random() < self._continues:
                    actions.append(("fault.continue", self.resume, (process,)))
        for kind, chance in _CHANCES.items():
            if self.left[kind] and self._rng.random() < chance * self._temptation(kind):
                actions += self._of(kind)
        return actions

    def _temptation(self, kind: str) -> float:
        """Faults come where they hurt: stops in the middle of a copy, leaps of time while somebody is stopped."""
        if kind == "stops" and any(link.pushes for link in self._world.links):
            return 5.0
        if kind == "jumps" and any(s.stopped or s.engine.stopped for s in self._world.shells):
            return 5.0
        return 1.0

    def _of(self, kind: str) -> list[Action]:
        world = self._world
        match kind:
            case "cancels":
                return [("fault.cancel", self._cancel, (j,)) for j in world.journeys if not j.over]
            case "kills":
                both = [s for s in world.shells if s.alive and s.engine.alive]
                return [("fault.kill", self._kill, (s, what)) for s in both for what in ("service", "engine")]
            case "stops":
                ends: list[Any] = [e for s in world.shells for e in (s, s.engine) if e.alive and not e.stopped]
                ends += [link.writer for link in world.links if link.pushes and link.writer.running] * 4
                return [("fault.stop", self._stop, (end,)) for end in ends]
            case "breaks":
                return [("fault.break", self._break, (call,)) for call in world.calls]
            case "link_breaks":
                up = [link for link in world.links if link.writer_up and link.reader_up]
                return [("fault.cut", self._cut, (link,)) for link in up]
            case _:
                return [("fault.jump", self._jump, ())]

    def _cancel(self, journey: Journey) -> None:
        self.left["cancels"] -= 1
        journey.cancel()

    def _kill(self, shell: Shell, what: str) -> None:
        self.left["kills"] -= 1
        if what == "service":
            self._world.kill_shell(shell)
        else:
            self._world.kill_engine(shell.engine)

    def _stop(self, process: Any) -> None:
        self.left["stops"] -= 1
        process.stopped = True

    def resume(self, process: Any) -> None:
        """SIGCONT."""
        process.stopped = False

    def _break(self, call: Call) -> None:
        self.left["breaks"] -= 1
        call.lose()

    def _cut(self, link: Link) -> None:
        self.left["link_breaks"] -= 1
        link.cut()

    def _jump(self) -> None:
        self.left["jumps"] -= 1
        seconds = self._rng.choice((1.0, 5.0, 16.0, 61.0))
        self._world.clock.advance(seconds)
        if seconds > KEEPALIVE:
            self.break_stopped()

    def break_stopped(self) -> None:
        """Keepalive found that the other end does not answer."""
        for call in self._world.calls:
            if any(end.alive and not end.running for end in (call.client, call.server)):
                call.lose()

    def heal(self) -> None:
        """No more faults; what is stopped is continued, or killed by its supervisor."""
        for name in self.left:
            self.left[name] = 0
        for shell in self._world.shells:
            for process in (shell, shell.engine):
                if not process.stopped:
                    continue
                if self._rng.random() < 0.7:
                    process.stopped = False
                elif process is shell:
                    self._world.kill_shell(shell)
                else:
                    self._world.kill_engine(shell.engine)

    # ---- damage ----

    def damage(self, content: Content | None) -> Content | None:
        """May corrupt a slot on its way."""
        if content is not None and self.left["corruptions"] and self._rng.random() < 0.2:
            self.left["corruptions"] -= 1
            return (content[0], content[1] ^ 1)
        return content

    def shorten(self, run: PushRun) -> None:
        """May lose the last block of a push; the receiver's count says so."""
        if self.left["short_pushes"] and self._rng.random() < 0.3:
            self.left["short_pushes"] -= 1
            run.arrived -= self._world.scenario.prefill_config.block_size
