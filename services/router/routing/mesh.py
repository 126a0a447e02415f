"""What all journeys of a router share."""

from __future__ import annotations

import random
import time
from collections import Counter

from services.config import PlacementPolicy
from services.router.metrics import RouterMetrics
from services.router.routing.breaker import Breakers, Key
from services.router.routing.history import History
from services.router.routing.live import LiveRequests
from services.router.routing.placement import Placement, Signals, beside, choose
from services.router.routing.poison import Convicted, SuspectGate
from services.router.routing.probe import Prober
from services.router.routing.retry import RetryBudget
from services.router.routing.retry_metrics import RetryMetrics
from services.router.routing.rooms import RoomRecorder
from services.router.routing.shortlist import Shortlist
from services.router.routing.table import WatchedTable
from services.router.text.tokenizer import RouterTokenizer
from services.runtime.channels import ChannelPool
from services.wire.bootstrap import RankRow


class Mesh:
    """The table, channels, and what this router knows of the workers beyond the table."""

    def __init__(
        self,
        table: WatchedTable,
        pool: ChannelPool,
        tokenizer: RouterTokenizer,
        digest: str,
        *,
        policy: PlacementPolicy,
        recorder: RoomRecorder,
        metrics: RouterMetrics,
        max_attempts: int = 5,
        peer_wait: float = 1.0,
        budget: RetryBudget | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.table, self.pool, self.tokenizer, self.digest = table, pool, tokenizer, digest
        self.policy, self.recorder, self.metrics = policy, recorder, metrics
        self.max_attempts, self.peer_wait = max_attempts, peer_wait
        self.rng = rng or random.Random()
        self.live = LiveRequests()
        self.history = History()
        self.in_flight: Counter[int] = Counter()
        self._turn = 0
        self._listed_version, self._listed = -1, Shortlist((), digest, table.roster.get)
        self.breakers = Breakers()
        self.prober = Prober(self.breakers, table, pool)
        self.budget = budget or RetryBudget()
        self.gate, self.convicted = SuspectGate(), Convicted()
        self.retry_metrics = RetryMetrics(metrics.registry, table.rows, self.breakers)

    def place(
        self,
        room: int,
        prompt_tokens: int,
        avoid: set[int],
        fingerprint: str,
        *,
        whole_tokens: int = 0,
        patient: bool = False,
        alone: bool = False,
        near: Placement | None = None,
    ) -> Placement:
        """Raises UnavailableError or ContextLengthError; see placement.choose. `alone` keeps away from workers
        that have a suspect; `near` is where the same prompt was computed."""
        now = time.monotonic()
        self._turn += 1
        barred = frozenset(self.gate.held) if alone else frozenset[int]()
        signals = Signals(self.in_flight, avoid, self.breakers.blocked(now), barred)
        turn = self._turn - 1
        placement = self._shortlist().choose(
            self.policy,
            room,
            turn=turn,
            rng=self.rng,
            signals=signals,
            prompt_tokens=prompt_tokens,
            whole_tokens=whole_tokens,
            fingerprint=fingerprint,
        ) or choose(
            self.policy,
            room,
            self.table.rows(),
            tokenizer_digest=self.digest,
            turn=turn,
            rng=self.rng,
            signals=signals,
            prompt_tokens=prompt_tokens,
            whole_tokens=whole_tokens,
            fingerprint=fingerprint,
            patient=patient,
        )
        if near is not None:
            tokens = max(prompt_tokens + 1, whole_tokens)
            row_of = self.table.roster.get
            placement = beside(placement, near, row_of, signals=signals, tokens=tokens, fingerprint=fingerprint)
        self.breakers.begin_trials(breaker_keys(placement), now)
        return placement

    def _shortlist(self) -> Shortlist:
        roster = self.table.roster
        if self._listed_version != roster.version:
            self._listed_version, self._listed = roster.version, Shortlist(roster.rows(), self.digest, roster.get)
        return self._listed

    def succeeded(self, *keys: Key) -> None:
        """A request has succeeded there; those that wait for a closed breaker look again."""
        if self.breakers.success(*keys):
            self.table.notify()

    def end_trials(self, placement: Placement) -> None:
        """An attempt is over; where it was a trial that said nothing, those that wait try."""
        if self.breakers.end_trials(breaker_keys(placement)):
            self.table.notify()

    def release_suspect(self, incarnations: list[int]) -> None:
        """A suspect has left these workers; those that wait for their turn look again."""
        self.gate.leave(incarnations)
        self.table.notify()

    def enter(self, row: RankRow) -> None:
        """One more sample is with that worker."""
        self.in_flight[row.incarnation] += 1

    def leave(self, row: RankRow) -> None:
        """One less."""
        self.in_flight[row.incarnation] -= 1
        if self.in_flight[row.incarnation] <= 0:
            del self.in_flight[row.incarnation]


def breaker_keys(placement: Placement) -> tuple[Key, ...]:
    """The breakers that a request of this placement passes."""
    decode = placement.decode.incarnation
    if placement.prefill is None:
        return (decode,)
    prefill = placement.prefill.incarnation
    return (decode, prefill, (prefill, decode))
