"""Which workers a sample goes to. Pure: rows in, a placement out.

    leaders of one tokenizer ─▶ that hold the request ─▶ the best rank there is
        ─▶ a decode (or MIXED) row by policy ─▶ a prefill row of its fingerprint by policy

A MIXED row serves alone. Further samples of a prompt go beside() the first, whose blocks are there. A rank is the
sum of what speaks against a row, so that the worse is taken only where there is nobody better:

    1  avoided: it has failed this very request        4  LOST: its lease has lapsed
    2  it holds less than the whole request may need   8  its breaker, or its pair's, is open
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence

import msgspec

from engine_core.lifecycle.membership import MembershipState
from engine_core.types.errors import ContextLengthError, Leg, UnavailableError
from engine_core.types.request import Role
from services.config import PlacementPolicy
from services.wire.bootstrap import RankRow, RowKey, differing_parts

_RETRY_AFTER = 2.0
_STATES = (MembershipState.READY, MembershipState.LOST)
_AVOIDED, _SHORT, _LOST, _BROKEN = 1, 2, 4, 8


class Placement(msgspec.Struct, frozen=True):
    """Where one attempt runs; `prefill` is None when `decode` is a MIXED row."""

    decode: RankRow
    prefill: RankRow | None = None

    @property
    def rows(self) -> tuple[RankRow, ...]:
        """The rows that take part."""
        return (self.decode,) if self.prefill is None else (self.prefill, self.decode)

    @property
    def token_limit(self) -> int:
        """Tokens, prompt and output, that fit the context and both pools."""
        return min(map(row_limit, self.rows))


class Signals(msgspec.Struct, frozen=True):
    """What the router knows beside the table: its own samples in flight per incarnation, whom to avoid, which
    breakers are open (of an incarnation, or of a (prefill, decode) pair), and who is no choice at all."""

    in_flight: Mapping[int, int] = {}
    avoid: Collection[int] = frozenset()
    broken: Collection[Hashable] = frozenset()
    barred: Collection[int] = frozenset()


_NO_SIGNALS = Signals()


def row_limit(row: RankRow) -> int:
    """Tokens that a worker can hold for one request; 0 in the table means not known."""
    spec = row.instance
    return min(spec.max_model_len or 2**31, spec.kv_capacity_tokens or 2**31)


def choose(
    policy: PlacementPolicy,
    room: int,
    rows: Sequence[RankRow],
    *,
    tokenizer_digest: str,
    turn: int,
    rng: random.Random,
    signals: Signals = _NO_SIGNALS,
    prompt_tokens: int = 0,
    whole_tokens: int = 0,
    fingerprint: str = "",
    patient: bool = False,
) -> Placement:
    """Returns where an attempt of `room` runs. `turn` counts calls, for round_robin. `prompt_tokens` are those
    that must be held with one more; rows that hold `whole_tokens` are preferred. `fingerprint`, when set, is
    the one that an earlier attempt ran under.

    Raises UnavailableError when no pair can be formed: it names what is missing, or the fingerprint part
    that differs (`field`); `patient` callers also get it (BREAKER_OPEN) rather than a row whose breaker is open.
    Raises ContextLengthError when no pair that there is holds prompt_tokens + 1.
    """
    usable = [r for r in rows if r.is_leader and r.state in _STATES and r.instance.tokenizer_digest == tokenizer_digest]
    if fingerprint:
        usable = [r for r in usable if r.instance.fingerprint == fingerprint]
    pairs = _partners(usable, prompt_tokens)
    if not pairs:
        known = _partners(usable, 0)
        if known:
            raise _too_long(prompt_tokens, max(_pair_limit(d, ps) for d, ps in known))
        raise _nobody(rows, tokenizer_digest)
    if signals.barred:
        pairs = _unbarred(pairs, signals.barred)
        if not pairs:
            raise UnavailableError(
                "all workers have a suspect of a crash", leg=Leg.ROUTER, reason="SUSPECT", retry_after=_RETRY_AFTER
            )
    ranks = _Ranks(signals, whole_tokens)
    ranked = [(ranks.of_pair(d, ps), d) for d, ps in pairs]
    best = min(rank for rank, _ in ranked)
    if patient and max(best) >= _BROKEN:
        raise UnavailableError(
            "the breakers of all workers are open", leg=Leg.ROUTER, reason="BREAKER_OPEN", retry_after=_RETRY_AFTER
        )
    decodes = [d for rank, d in ranked if rank == best]
    decode = _pick(policy, room, decodes, turn, rng, signals)
    prefills = next(ps for d, ps in pairs if d is decode)
    if not prefills:
        return Placement(decode)
    prefills = ranks.best_prefills(decode, prefills)
    if math.gcd(len(decodes), len(prefills)) > 1:
        # One common turn would always form the same pairs: shift by one whenever they have all been formed.
        turn += turn // math.lcm(len(decodes), len(prefills))
    return Placement(decode, _pick(policy, room, prefills, turn, rng, signals))


def beside(
    chosen: Placement,
    near: Placement,
    row_of: Callable[[RowKey], RankRow | None],
    *,
    signals: Signals,
    tokens: int,
    fingerprint: str = "",
) -> Placement:
    """Where the prompt's blocks are: `near` has computed them. Its prefill row, or its MIXED one, takes the place of
    the chosen one unless anything speaks against it for this request, which needs `tokens` in all. The decode row
    stays the chosen one where that can be: it computes no prompt."""

    def well(row: RankRow) -> RankRow | None:
        now = row_of(row.key)
        if now is None or now.incarnation != row.incarnation or now.state is not MembershipState.READY:
            return None
        spoken_against = any(row.incarnation in who for who in (signals.avoid, signals.broken, signals.barred))
        return None if spoken_against or row_limit(now) < tokens else now

    if fingerprint and near.decode.instance.fingerprint != fingerprint:
        return chosen
    if near.prefill is None:
        mixed = well(near.decode)
        return chosen if mixed is None else Placement(mixed)
    prefill = well(near.prefill)
    partner = chosen.prefill is not None and chosen.decode.instance.fingerprint == near.prefill.instance.fingerprint
    decode = chosen.decode if partner else well(near.decode)
    if prefill is None or decode is None or (prefill.incarnation, decode.incarnation) in signals.broken:
        return chosen
    return Placement(decode, prefill)


class _Ranks:
    """What speaks against rows and pairs, for one request."""

    def __init__(self, signals: Signals, whole_tokens: int) -> None:
        self._signals, self._whole = signals, whole_tokens
        self._pairs_broken = any(isinstance(key, tuple) for key in signals.broken)
        self._least: dict[int, int] = {}
        """The best prefill's rank, by id of a list that several decode rows share."""

    def of(self, row: RankRow) -> int:
        """The rank of one row."""
        signals, incarnation = self._signals, row.incarnation
        return (
            _AVOIDED * (incarnation in signals.avoid)
            + _SHORT * (row_limit(row) < self._whole)
            + _LOST * (row.state is MembershipState.LOST)
            + _BROKEN * (incarnation in signals.broken)
        )

    def _of_prefill(self, decode: RankRow, prefill: RankRow) -> int:
        rank = self.of(prefill)
        if rank < _BROKEN and self._pairs_broken and (prefill.incarnation, decode.incarnation) in self._signals.broken:
            rank += _BROKEN
        return rank

    def of_pair(self, decode: RankRow, prefills: list[RankRow]) -> tuple[int, int]:
        """The worse of both, then their sum."""
        if self._pairs_broken:
            least = min((self._of_prefill(decode, p) for p in prefills), default=0)
        else:
            found = self._least.get(id(prefills))
            least = min(map(self.of, prefills), default=0) if found is None else found
            self._least[id(prefills)] = least
        own = self.of(decode)
        return max(own, least), own + least

    def best_prefills(self, decode: RankRow, prefills: list[RankRow]) -> list[RankRow]:
        """Those of the least rank beside this decode row."""
        ranks = [self._of_prefill(decode, p) for p in prefills]
        return [p for p, rank in zip(prefills, ranks, strict=True) if rank == min(ranks)]


def placeable(rows: Sequence[RankRow], tokenizer_digest: str) -> bool:
    """True when a READY pair, or a READY MIXED row, could serve."""
    ready = [
        r
        for r in rows
        if r.is_leader and r.state is MembershipState.READY and r.instance.tokenizer_digest == tokenizer_digest
    ]
    return bool(_partners(ready, 0))


def largest_limit(rows: Sequence[RankRow], tokenizer_digest: str) -> int:
    """Tokens that the roomiest pair can hold; 0 when there is none."""
    usable = [r for r in rows if r.is_leader and r.state in _STATES and r.instance.tokenizer_digest == tokenizer_digest]
    return max((_pair_limit(d, ps) for d, ps in _partners(usable, 0)), default=0)


def only_fingerprint(rows: Sequence[RankRow], tokenizer_digest: str) -> str:
    """The one fingerprint of all ready workers of this tokenizer; empty when they have several, or there are none."""
    found = {
        r.instance.fingerprint
        for r in rows
        if r.is_leader and r.state is MembershipState.READY and r.instance.tokenizer_digest == tokenizer_digest
    }
    return found.pop() if len(found) == 1 else ""


def _partners(usable: Sequence[RankRow], prompt_tokens: int) -> list[tuple[RankRow, list[RankRow]]]:
    """Rows that can generate, each with the prefill rows it may use (none for MIXED). Decode rows of one
    fingerprint share one list."""
    fitting = [r for r in usable if row_limit(r) > prompt_tokens]
    prefills: dict[str, list[RankRow]] = {}
    for row in fitting:
        if row.instance.role is Role.PREFILL:
            prefills.setdefault(row.instance.fingerprint, []).append(row)
    out: list[tuple[RankRow, list[RankRow]]] = []
    for row in fitting:
        if row.instance.role is Role.MIXED:
            out.append((row, []))
        elif row.instance.role is Role.DECODE and row.instance.fingerprint in prefills:
            out.append((row, prefills[row.instance.fingerprint]))
    return out


def _unbarred(
    pairs: Sequence[tuple[RankRow, list[RankRow]]], barred: Collection[int]
) -> list[tuple[RankRow, list[RankRow]]]:
    left = [(d, [p for p in ps if p.incarnation not in barred], bool(ps)) for d, ps in pairs]
    return [(d, ps) for d, ps, needs in left if d.incarnation not in barred and (ps or not needs)]


def _pair_limit(decode: RankRow, prefills: Sequence[RankRow]) -> int:
    return min(row_limit(decode), max(map(row_limit, prefills), default=2**31))


def _pick(
    policy: PlacementPolicy, room: int, rows: list[RankRow], turn: int, rng: random.Random, signals: Signals
) -> RankRow:
    if len(rows) == 1:
        return rows[0]
    ordered = sorted(rows, key=lambda r: (r.instance.name, r.coord, r.incarnation))
    if policy is PlacementPolicy.ROOM_HASH:
        return ordered[room % len(ordered)]
    if policy is PlacementPolicy.ROUND_ROBIN:
        return ordered[turn % len(ordered)]

    return min(rng.sample(ordered, 2), key=lambda row: busyness(row, signals))


def busyness(row: RankRow, signals: Signals) -> tuple[int, int]:
    """What least_load compares: requests there, by the last report and of this router, then tokens that wait."""
    own = signals.in_flight.get(row.incarnation, 0)
    return row.load.running + row.load.queued + own, row.load.queued_tokens


def _too_long(prompt_tokens: int, limit: int) -> ContextLengthError:
    return ContextLengthError(
        f"this model's workers hold {limit} tokens per request; the prompt has {prompt_tokens}, "
        "which leaves no room for one token",
        field="prompt",
        leg=Leg.ROUTER,
    )


def _nobody(rows: Sequence[RankRow], tokenizer_digest: str) -> UnavailableError:
    """Says what is missing, or which part of the fingerprint keeps the workers apart."""

    def error(message: str, reason: str = "NO_WORKER", field: str = "") -> UnavailableError:
        return UnavailableError(message, leg=Leg.ROUTER, reason=reason, field=field, retry_after=_RETRY_AFTER)

    alive = [r for r in rows if r.is_leader and r.state in _STATES]
    strangers = [r for r in alive if r.instance.tokenizer_digest != tokenizer_digest]
    mine = [r for r in alive if r.instance.tokenizer_digest == tokenizer_digest]
    if strangers and not (_by_role(mine, Role.MIXED) or (_by_role(mine, Role.DECODE) and _by_role(mine, Role.PREFILL))):
        names = ", ".join(sorted({r.instance.name for r in strangers}))
        return error(
            f"the tokenizer differs: {names} serve another model than this router", "FINGERPRINT_MISMATCH", "tokenizer"
        )
    decodes, prefills = _by_role(mine, Role.DECODE), _by_role(mine, Role.PREFILL)
    if not decodes:
        return error("no decode worker is ready")
    if not prefills:
        return error("no prefill worker is ready")
    parts, prefill, decode = min(
        ((differing_parts(p.instance, d.instance), p, d) for p in prefills for d in decodes),
        key=lambda found: (len(found[0]), found[1].instance.name, found[2].instance.name),
    )
    if not parts:  # they fit each other, but not the fingerprint that this request began under
        return error("no pair of the fingerprint that this request began under is ready", "FINGERPRINT_MISMATCH")
    ours, theirs = prefill.instance.fingerprint_parts, decode.instance.fingerprint_parts
    told = "; ".join(
        f"{part} is {ours.get(part, 'unknown')} at {prefill.instance.name} and {theirs.get(part, 'unknown')} "
        f"at {decode.instance.name}"
        for part in parts
    )
    return error(f"no prefill and decode worker can be paired: {told}", "FINGERPRINT_MISMATCH", parts[0])


def _by_role(rows: Sequence[RankRow], role: Role) -> list[RankRow]:
    return [r for r in rows if r.instance.role is role]
