"""Placement without a look at every row: what nearly all requests need while the mesh is well. Pure.

placement.choose() ranks all rows for each request, which in a mesh of thousands of workers is milliseconds. Made
once per change of the table, a Shortlist holds the READY rows by fingerprint, and draws from them: rows against
which anything speaks for this request are drawn again, and when that does not help, choose() has to look.

Where it answers, it answers as choose() would: the same row by room or by turn, or for least_load the less
loaded of two drawn at random among the same rows.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from engine_core.lifecycle.membership import MembershipState
from engine_core.types.request import Role
from services.config import PlacementPolicy
from services.router.routing.placement import Placement, Signals, busyness, row_limit
from services.wire.bootstrap import RankRow, RowKey

_DRAWS = 4
"""Draws of two rows before choose() has to look at all."""


class _Group:
    """Rows of one kind, ordered as choose() orders them, and what the smallest of them holds."""

    def __init__(self, rows: Sequence[RankRow]) -> None:
        self.rows = sorted(rows, key=lambda r: (r.instance.name, r.coord, r.incarnation))
        self.limit = min(map(row_limit, rows), default=0)


class Shortlist:
    """READY leaders of one tokenizer. `row_of` gives a row as it is now, with its latest load."""

    def __init__(
        self, rows: Sequence[RankRow], tokenizer_digest: str, row_of: Callable[[RowKey], RankRow | None]
    ) -> None:
        self._row_of = row_of
        ready = [
            r
            for r in rows
            if r.is_leader and r.state is MembershipState.READY and r.instance.tokenizer_digest == tokenizer_digest
        ]
        prefills: dict[str, list[RankRow]] = {}
        for row in ready:
            if row.instance.role is Role.PREFILL:
                prefills.setdefault(row.instance.fingerprint, []).append(row)
        generating = [
            r
            for r in ready
            if r.instance.role is Role.MIXED or (r.instance.role is Role.DECODE and r.instance.fingerprint in prefills)
        ]
        by_fingerprint: dict[str, list[RankRow]] = {"": generating}
        for row in generating:
            by_fingerprint.setdefault(row.instance.fingerprint, []).append(row)
        self._generating = {fingerprint: _Group(found) for fingerprint, found in by_fingerprint.items()}
        self._prefills = {fingerprint: _Group(found) for fingerprint, found in prefills.items()}

    def choose(
        self,
        policy: PlacementPolicy,
        room: int,
        *,
        turn: int,
        rng: random.Random,
        signals: Signals,
        prompt_tokens: int,
        whole_tokens: int,
        fingerprint: str = "",
    ) -> Placement | None:
        """As placement.choose(); None when that has to look."""
        tokens = max(prompt_tokens + 1, whole_tokens)
        group = self._generating.get(fingerprint)
        if group is None or not group.rows or signals.barred:
            return None
        if policy is not PlacementPolicy.LEAST_LOAD:
            return self._by_number(policy, room, group, turn, signals, tokens)
        decode = self._draw(group, rng, signals, tokens)
        if decode is None or decode.instance.role is Role.MIXED:
            return None if decode is None else Placement(decode)
        prefill = self._draw(self._prefills[decode.instance.fingerprint], rng, signals, tokens)
        if prefill is None or (prefill.incarnation, decode.incarnation) in signals.broken:
            return None
        return Placement(decode, prefill)

    def _by_number(
        self, policy: PlacementPolicy, room: int, group: _Group, turn: int, signals: Signals, tokens: int
    ) -> Placement | None:
        """The row that the room or the turn means, when nothing speaks against any."""
        if signals.avoid or signals.broken or group.limit < tokens:
            return None
        number = room if policy is PlacementPolicy.ROOM_HASH else turn
        decode = self._now(group.rows[number % len(group.rows)])
        if decode is None or decode.instance.role is Role.MIXED:
            return None if decode is None else Placement(decode)
        prefills = self._prefills[decode.instance.fingerprint]
        if prefills.limit < tokens:
            return None
        decodes, count = len(group.rows), len(prefills.rows)
        if policy is PlacementPolicy.ROUND_ROBIN and math.gcd(decodes, count) > 1:
            number += number // math.lcm(decodes, count)
        prefill = self._now(prefills.rows[number % count])
        return None if prefill is None else Placement(decode, prefill)

    def _draw(self, group: _Group, rng: random.Random, signals: Signals, tokens: int) -> RankRow | None:
        rows = group.rows
        for _ in range(_DRAWS):
            drawn = [self._now(row) for row in (rows if len(rows) == 1 else rng.sample(rows, 2))]
            good = [
                row
                for row in drawn
                if row is not None
                and row.incarnation not in signals.avoid
                and row.incarnation not in signals.broken
                and row_limit(row) >= tokens
            ]
            if len(good) == len(drawn):
                return min(good, key=lambda row: busyness(row, signals))
        return None

    def _now(self, row: RankRow) -> RankRow | None:
        now = self._row_of(row.key)
        alive = now is not None and now.incarnation == row.incarnation and now.state is MembershipState.READY
        return now if alive else None
