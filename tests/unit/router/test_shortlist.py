"""The short way of placement never answers otherwise than the long one could."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_core.lifecycle.membership import MembershipState
from engine_core.types.ids import RankCoord
from engine_core.types.request import Role
from services.config import PlacementPolicy
from services.router.routing.placement import Placement, Signals, _Ranks, choose
from services.router.routing.shortlist import Shortlist
from services.wire.bootstrap import InstanceSpec, Load, RankRow, RowKey

READY, LOST, DRAINING = MembershipState.READY, MembershipState.LOST, MembershipState.DRAINING


def row(i: int, role: Role, fingerprint: str = "f", **more: object) -> RankRow:
    limit = more.pop("limit", 1000)
    assert isinstance(limit, int)
    spec = InstanceSpec(f"{role}-{i}", role, fingerprint, tokenizer_digest="t", kv_capacity_tokens=limit)
    plain = RankRow(spec, RankCoord(), f"h:{i}", 100 * (1 + list(Role).index(role)) + i, state=READY)
    return msgspec.structs.replace(plain, **more)


def short(rows: list[RankRow], policy: PlacementPolicy, seed: int = 0, **asked: object) -> Placement | None:
    known: dict[RowKey, RankRow] = {r.key: r for r in rows}
    full = {"room": 5, "turn": 3, "signals": Signals(), "prompt_tokens": 10, "whole_tokens": 20, **asked}
    room = full.pop("room")
    return Shortlist(rows, "t", known.get).choose(policy, room, rng=random.Random(seed), **full)  # type: ignore[arg-type]


@st.composite
def tables(draw: st.DrawFn) -> list[RankRow]:
    rows = []
    for i in range(draw(st.integers(0, 8))):
        role = draw(st.sampled_from([Role.PREFILL, Role.DECODE, Role.DECODE, Role.MIXED]))
        rows.append(
            row(
                i,
                role,
                draw(st.sampled_from(["f", "f", "g"])),
                limit=draw(st.sampled_from([15, 1000, 1000, 1000])),
                state=draw(st.sampled_from([READY, READY, READY, LOST, DRAINING])),
                load=Load(running=draw(st.integers(0, 3))),
            )
        )
    return rows


@settings(max_examples=250, deadline=None)
@given(tables(), st.data())
def test_what_it_chooses_the_long_way_could_have_chosen(rows: list[RankRow], data: st.DataObject) -> None:
    ids = [r.incarnation for r in rows] or [1]
    some = st.frozensets(st.sampled_from(ids), max_size=2)
    signals = Signals(dict.fromkeys(data.draw(some), 2), data.draw(some), data.draw(some))
    policy = data.draw(st.sampled_from(list(PlacementPolicy)))
    room, turn = data.draw(st.integers(0, 50)), data.draw(st.integers(0, 50))
    fingerprint = data.draw(st.sampled_from(["", "f"]))
    found = short(rows, policy, room=room, turn=turn, signals=signals, fingerprint=fingerprint)
    if found is None:
        return
    options = {
        "tokenizer_digest": "t", "turn": turn, "signals": signals, "prompt_tokens": 10, "whole_tokens": 20,
        "fingerprint": fingerprint,
    }  # fmt: skip
    if policy is not PlacementPolicy.LEAST_LOAD:
        assert found == choose(policy, room, rows, rng=random.Random(0), **options)  # type: ignore[arg-type]
        return
    # Nothing speaks against it, and by itself it is a placement.
    prefills = [] if found.prefill is None else [found.prefill]
    assert _Ranks(signals, 20).of_pair(found.decode, prefills) == (0, 0)
    assert choose(policy, room, list(found.rows), rng=random.Random(0), **options) == found  # type: ignore[arg-type]


def test_it_answers_while_all_is_well() -> None:
    rows = [row(i, role) for role in (Role.PREFILL, Role.DECODE) for i in range(4)]
    for policy in PlacementPolicy:
        assert short(rows, policy) is not None
    blamed = Signals(avoid={rows[0].incarnation, rows[4].incarnation})
    counts: Counter[int] = Counter()
    for seed in range(300):
        placement = short(rows, PlacementPolicy.LEAST_LOAD, seed, signals=blamed)
        if placement is not None:
            counts.update(r.incarnation for r in placement.rows)
    assert counts.keys() == {r.incarnation for r in rows} - set(blamed.avoid)
    assert min(counts.values()) > 0.7 * max(counts.values())


def test_it_goes_by_loads_of_now() -> None:
    rows = [row(0, Role.PREFILL), row(0, Role.DECODE), row(1, Role.DECODE)]
    known = {r.key: r for r in rows}
    listed = Shortlist(rows, "t", known.get)

    def decode() -> str:
        found = listed.choose(
            PlacementPolicy.LEAST_LOAD,
            1,
            turn=0,
            rng=random.Random(1),
            signals=Signals(),
            prompt_tokens=1,
            whole_tokens=1,
        )
        return "" if found is None else found.decode.instance.name

    for busy, other in ((1, 0), (0, 1)):
        for i in (0, 1):
            known[rows[1 + i].key] = msgspec.structs.replace(rows[1 + i], load=Load(running=9 * (i == busy)))
        assert decode() == f"DECODE-{other}"
    for changed in (msgspec.structs.replace(rows[1], state=DRAINING), msgspec.structs.replace(rows[1], incarnation=9)):
        known[rows[1].key] = changed  # the table moves on before the list is made anew
        assert decode() == ""


def test_the_long_way_has_to_look() -> None:
    rows = [row(0, Role.PREFILL), row(0, Role.DECODE)]
    least = PlacementPolicy.LEAST_LOAD
    assert short([], least) is None
    assert short(rows[:1], least) is None
    assert short([msgspec.structs.replace(r, state=LOST) for r in rows], least) is None
    assert short(rows, least, fingerprint="g") is None
    assert short(rows, least, whole_tokens=1001) is None
    assert short(rows, least, signals=Signals(barred={1})) is None
    for speaks in (rows[0].incarnation, rows[1].incarnation, (rows[0].incarnation, rows[1].incarnation)):
        assert short(rows, least, signals=Signals(broken={speaks})) is None
