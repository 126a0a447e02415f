"""What all journeys of a router share."""

from __future__ import annotations

import random
import time
from collections import Counter

from services.config import PlacementPolicy
from services.router.history import History
from services.router.live import LiveRequests
from services.router.metrics import RouterMetrics
from services.router.placement import Placement, Signals, choose
from services.router.rooms import RoomRecorder
from services.router.table import WatchedTable
from services.router.tokenizer import RouterTokenizer
from services.runtime.channels import ChannelPool
from services.wire.bootstrap import RankRow

_SUSPECT_SECONDS = 3.0


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
        rng: random.Random | None = None,
    ) -> None:
        self.table, self.pool, self.tokenizer, self.digest = table, pool, tokenizer, digest
        self.policy, self.recorder, self.metrics = policy, recorder, metrics
        self.max_attempts, self.peer_wait = max_attempts, peer_wait
        self.rng = rng or random.Random()
        self.live = LiveRequests()
        self.history = History()
        self.in_flight: Counter[int] = Counter()
        self._suspects: dict[int, float] = {}
        self._turn = 0

    def place(
        self, room: int, prompt_tokens: int, avoid: set[int], fingerprint: str, *, whole_tokens: int = 0
    ) -> Placement:
        """Raises UnavailableError or ContextLengthError; see placement.choose."""
        now = time.monotonic()
        for incarnation in [i for i, until in self._suspects.items() if until <= now]:
            del self._suspects[incarnation]
        self._turn += 1
        return choose(
            self.policy,
            room,
            self.table.rows(),
            tokenizer_digest=self.digest,
            turn=self._turn - 1,
            rng=self.rng,
            signals=Signals(self.in_flight, avoid | self._suspects.keys()),
            prompt_tokens=prompt_tokens,
            whole_tokens=whole_tokens,
            fingerprint=fingerprint,
        )

    def suspect(self, incarnation: int) -> None:
        """New samples avoid this worker for a moment: its connection failed, the table will say more."""
        self._suspects[incarnation] = time.monotonic() + _SUSPECT_SECONDS

    def enter(self, row: RankRow) -> None:
        """One more sample is with that worker."""
        self.in_flight[row.incarnation] += 1

    def leave(self, row: RankRow) -> None:
        """One less."""
        self.in_flight[row.incarnation] -= 1
        if self.in_flight[row.incarnation] <= 0:
            del self.in_flight[row.incarnation]
