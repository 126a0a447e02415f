"""Requests that crash engines, told from those that were only there. Pure.

Evidence is an engine's end by its own doing (a fault signal, an exception, the kernel's out-of-memory killer, a
step that never ended) with the request in the step that was executing: reason ENGINE_CRASHED. A kill from
outside, a stop, a lost machine are none (ENGINE_DIED): whoever kills processes convicts nobody.

    strike       one such end. The count starts over with an attempt that brought two new tokens: prefill gives one
                 without decode having computed anything.
    suspect      a request with a strike. Until its attempt has brought two tokens it has a prefill worker (one
                 token) and a decode worker to itself, as far as suspects go: of those that were in one step with
                 a poison only it can earn a second strike. The others wait their turn; their deadline bounds it.
    guilty       two strikes, or four crashes in all. The request is given up; it has cost that many engines. Asked
                 again (clients do), it is refused for a while without touching a worker.

The suspects of several routers don't know of each other: two of them may share a step.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence

from engine_core.types.errors import InternalError, Leg, PdmeshError

CRASHED = "ENGINE_CRASHED"
STRIKES = 2
CRASHES = 4
"""In all, whatever came in between: a request that brings tokens before each crash is no less to blame."""
CLEARED_AFTER = 2
"""New tokens of one attempt that clear a suspect."""
REMEMBERED_SECONDS = 600.0
REMEMBERED = 1024
GREEDY = -1
"""Stands for the seed where nothing is drawn."""


class PoisonError(InternalError):
    """The request has crashed the engines that worked on it."""

    reason = "POISON"


class Evidence:
    """What speaks against one sample."""

    def __init__(self) -> None:
        self.strikes = self.crashes = 0
        self.crashed: list[str] = []
        """Names of the workers whose engines crashed with it."""

    def failed(self, exc: PdmeshError, new_tokens: int, worker: str) -> None:
        """An attempt has ended in `exc` after so many new tokens; `worker` is whom it is blamed on."""
        if new_tokens >= CLEARED_AFTER:
            self.strikes = 0
        if exc.reason == CRASHED:
            self.strikes += 1
            self.crashes += 1
            self.crashed.append(worker)

    @property
    def suspect(self) -> bool:
        """True while the next attempt has to be kept apart."""
        return self.strikes > 0

    @property
    def guilty(self) -> bool:
        """True when there must be no further attempt."""
        return self.strikes >= STRIKES or self.crashes >= CRASHES

    def verdict(self, leg: Leg) -> PoisonError:
        """What the client is told."""
        return PoisonError(
            f"the request crashed {self.crashes} engines ({', '.join(self.crashed)}) and was given up",
            leg=leg,
        )


class SuspectGate:
    """Workers (incarnations) that have a suspect now."""

    def __init__(self) -> None:
        self._held: Counter[int] = Counter()

    @property
    def held(self) -> Collection[int]:
        """Whom another suspect must not go to."""
        return self._held.keys()

    def enter(self, incarnations: Iterable[int]) -> None:
        """A suspect goes there."""
        self._held.update(incarnations)

    def leave(self, incarnations: Iterable[int]) -> None:
        """It has left them, or is cleared."""
        self._held.subtract(incarnations)
        self._held = +self._held


class Convicted:
    """Requests that were found guilty, for REMEMBERED_SECONDS.

    One that never had a token is known by its prompt; one that had some by its prompt and seed, since another
    draw may not meet what crashed the engine; of greedy ones, whose seed means nothing, as GREEDY.
    """

    def __init__(self) -> None:
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def add(self, prompt: Sequence[int], seed: int | None, now: float) -> None:
        """Remembers one; `seed` None: whatever its draws are."""
        self._until[_digest(prompt, seed)] = now + REMEMBERED_SECONDS
        while len(self._until) > REMEMBERED:
            self._until.popitem(last=False)

    def check(self, prompt: Sequence[int], seed: int, now: float) -> None:
        """Raises PoisonError for what was found guilty lately."""
        if not self._until:
            return
        for key in (_digest(prompt, None), _digest(prompt, seed)):
            until = self._until.get(key)
            if until is not None and until <= now:
                del self._until[key]
            elif until is not None:
                raise PoisonError(
                    f"this request has crashed engines lately; it is refused for {until - now:.0f} s more",
                    leg=Leg.ROUTER,
                )


def _digest(prompt: Sequence[int], seed: int | None) -> bytes:
    head = b"any" if seed is None else seed.to_bytes(9, "little", signed=True)
    return hashlib.sha256(head + array("I", prompt).tobytes()).digest()
