"""Which rows a request goes to, and what is said when there are none."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_core.lifecycle.membership import MembershipState
from engine_core.types.errors import ContextLengthError, UnavailableError
from engine_core.types.ids import RankCoord
from engine_core.types.kv import fingerprint_of
from engine_core.types.request import Role
from services.config import PlacementPolicy
from services.router.routing.placement import Placement, Signals, beside, choose, largest_limit, placeable
from services.wire.bootstrap import InstanceSpec, RankRow
from services.wire.common import Load

DIGEST = "tokenizer"
PARTS = {"config": "c0", "rope": "r0"}


def row(name: str, role: Role, incarnation: int, **kwargs: Any) -> RankRow:
    parts = kwargs.pop("parts", PARTS)
    spec = InstanceSpec(
        name=name,
        role=role,
        fingerprint=fingerprint_of(parts),
        fingerprint_parts=parts,
        tokenizer_digest=kwargs.pop("digest", DIGEST),
        max_model_len=kwargs.pop("max_model_len", 1000),
        kv_capacity_tokens=kwargs.pop("kv", 5000),
        dp_size=8,
        tp_size=8,
    )
    found = RankRow(spec, RankCoord(), f"host:{incarnation}", incarnation, state=MembershipState.READY)
    return msgspec.structs.replace(found, **kwargs)


def prefill(i: int, **kwargs: Any) -> RankRow:
    return row(f"prefill-{i}", Role.PREFILL, 100 + i, **kwargs)


def decode(i: int, **kwargs: Any) -> RankRow:
    return row(f"decode-{i}", Role.DECODE, 200 + i, **kwargs)


def pick(
    rows: Sequence[RankRow],
    policy: PlacementPolicy = PlacementPolicy.LEAST_LOAD,
    room: int = 1,
    turn: int = 0,
    seed: int = 0,
    **kwargs: Any,
) -> Placement:
    return choose(policy, room, rows, tokenizer_digest=DIGEST, turn=turn, rng=random.Random(seed), **kwargs)


def names(placement: Placement) -> tuple[str, ...]:
    return tuple(r.instance.name for r in placement.rows)


def test_room_hash_takes_the_room_modulo_each_role() -> None:
    rows = [decode(1), prefill(0), decode(0), prefill(2), prefill(1)]
    found = [names(pick(rows, PlacementPolicy.ROOM_HASH, room)) for room in range(6)]
    assert found == [(f"prefill-{r % 3}", f"decode-{r % 2}") for r in range(6)]


def test_round_robin_takes_turns() -> None:
    rows = [prefill(0), decode(0), decode(1)]
    found = [names(pick(rows, PlacementPolicy.ROUND_ROBIN, turn=t))[1] for t in range(4)]
    assert found == ["decode-0", "decode-1", "decode-0", "decode-1"]


def test_round_robin_forms_every_pair_and_balances_both_roles() -> None:
    rows = [prefill(0), prefill(1), decode(0), decode(1)]
    found = [names(pick(rows, PlacementPolicy.ROUND_ROBIN, turn=t)) for t in range(4)]
    assert len(set(found)) == 4
    assert [p for p, _ in found].count("prefill-0") == 2
    one = [names(pick([prefill(0), prefill(1), decode(0)], PlacementPolicy.ROUND_ROBIN, turn=t))[0] for t in range(4)]
    assert one == ["prefill-0", "prefill-1", "prefill-0", "prefill-1"]


def test_least_load_counts_the_table_and_the_routers_own() -> None:
    busy = decode(0, load=Load(running=2, queued=1))
    rows = [prefill(0), busy, decode(1)]
    assert {names(pick(rows, seed=s))[1] for s in range(20)} == {"decode-1"}
    own = Signals(in_flight={decode(1).incarnation: 9})
    assert {names(pick(rows, seed=s, signals=own))[1] for s in range(20)} == {"decode-0"}


def test_a_mixed_row_serves_alone_and_competes_with_decode_rows() -> None:
    mixed = row("mixed", Role.MIXED, 300)
    assert names(pick([mixed])) == ("mixed",)
    rows = [mixed, prefill(0), decode(0, load=Load(running=5))]
    assert names(pick(rows)) == ("mixed",)
    assert names(pick([msgspec.structs.replace(mixed, load=Load(running=9)), *rows[1:]])) == ("prefill-0", "decode-0")


def test_lost_rows_come_last_and_others_never() -> None:
    lost = decode(0, state=MembershipState.LOST)
    assert {names(pick([prefill(0), lost, decode(1)], seed=s))[1] for s in range(10)} == {"decode-1"}
    assert names(pick([prefill(0), lost])) == ("prefill-0", "decode-0")
    for state in (MembershipState.DRAINING, MembershipState.JOINING):
        with pytest.raises(UnavailableError, match="no decode worker is ready"):
            pick([prefill(0), decode(0, state=state)])


def test_those_that_failed_are_avoided_while_there_are_others() -> None:
    rows = [prefill(0), prefill(1), decode(0)]
    avoid = Signals(avoid={prefill(0).incarnation})
    assert {names(pick(rows, seed=s, signals=avoid))[0] for s in range(10)} == {"prefill-1"}
    assert names(pick([prefill(0), decode(0)], signals=avoid)) == ("prefill-0", "decode-0")
    # A READY row that failed goes before a LOST one.
    rows = [prefill(0), prefill(1, state=MembershipState.LOST), decode(0)]
    assert names(pick(rows, signals=avoid)) == ("prefill-0", "decode-0")


def test_only_leaders_are_chosen() -> None:
    follower = msgspec.structs.replace(decode(0), coord=RankCoord(tp=1), incarnation=999)
    assert pick([prefill(0), follower, decode(0)]).decode.incarnation == decode(0).incarnation


def test_a_mismatch_names_the_part_that_differs() -> None:
    other = {"config": "c0", "rope": "r1"}
    with pytest.raises(UnavailableError, match="rope is r0 at prefill-0 and r1 at decode-0") as caught:
        pick([prefill(0), decode(0, parts=other)])
    assert (caught.value.field, caught.value.reason) == ("rope", "FINGERPRINT_MISMATCH")
    assert caught.value.retry_after > 0
    assert names(pick([prefill(0), decode(0, parts=other), prefill(1, parts=other)])) == ("prefill-1", "decode-0")


def test_another_tokenizer_is_another_model() -> None:
    with pytest.raises(UnavailableError, match="tokenizer differs: decode-0") as caught:
        pick([prefill(0), decode(0, digest="other")])
    assert caught.value.field == "tokenizer"


def test_what_is_missing_is_named() -> None:
    with pytest.raises(UnavailableError, match="no decode worker is ready"):
        pick([])
    with pytest.raises(UnavailableError, match="no prefill worker is ready"):
        pick([decode(0)])


def test_rows_that_cannot_hold_the_prompt_are_left_out() -> None:
    rows = [prefill(0), decode(0, kv=50), decode(1, max_model_len=500)]
    assert {names(pick(rows, seed=s, prompt_tokens=60))[1] for s in range(10)} == {"decode-1"}
    with pytest.raises(ContextLengthError, match="hold 500 tokens"):
        pick(rows, prompt_tokens=500)
    assert pick([prefill(0, kv=300), decode(0)]).token_limit == 300
    assert largest_limit(rows, DIGEST) == 500
    assert largest_limit([], DIGEST) == 0


def test_a_later_attempt_keeps_to_its_fingerprint() -> None:
    old = {"config": "old"}
    rows = [prefill(0), decode(0), prefill(1, parts=old), decode(1, parts=old)]
    assert names(pick(rows, fingerprint=fingerprint_of(old))) == ("prefill-1", "decode-1")
    with pytest.raises(UnavailableError):
        pick(rows[:2], fingerprint=fingerprint_of(old))


_ROWS = st.lists(
    st.builds(
        lambda role, i, state, part, digest: row(
            f"{role.value}-{i}", role, i, state=state, parts={"config": part}, digest=digest
        ),
        st.sampled_from(list(Role)),
        st.integers(1, 50),
        st.sampled_from(list(MembershipState)),
        st.sampled_from("ab"),
        st.sampled_from([DIGEST, "other"]),
    ),
    max_size=8,
    unique_by=lambda r: r.incarnation,
)


@given(_ROWS, st.sampled_from(list(PlacementPolicy)), st.integers(0, 2**63 - 1), st.sets(st.integers(1, 50)))
def test_every_placement_is_a_legal_pair(
    rows: list[RankRow], policy: PlacementPolicy, room: int, avoid: set[int]
) -> None:
    try:
        placement = pick(rows, policy, room, signals=Signals(avoid=avoid))
    except UnavailableError as exc:
        assert not placeable(rows, DIGEST)
        assert exc.message
        return
    states = {r.state for r in placement.rows}
    assert states <= {MembershipState.READY, MembershipState.LOST}
    assert all(r.instance.tokenizer_digest == DIGEST for r in placement.rows)
    if placement.prefill is None:
        assert placement.decode.instance.role is Role.MIXED
    else:
        assert placement.decode.instance.role is Role.DECODE
        assert placement.prefill.instance.role is Role.PREFILL
        assert placement.prefill.instance.fingerprint == placement.decode.instance.fingerprint
    if MembershipState.LOST in states:
        assert not placeable(rows, DIGEST)


# ---- beside another sample ---------------------------------------------------------------------------

NEAR = Placement(decode(0), prefill(0))


def near(chosen: Placement, placed: Placement = NEAR, *changed: RankRow, tokens: int = 100, **more: Any) -> Any:
    """Where a further sample goes; `changed` are rows of the first one's as they are now."""
    table = {r.key: r for r in (*placed.rows, *changed)}
    fingerprint = more.pop("fingerprint", "")
    return names(beside(chosen, placed, table.get, signals=Signals(**more), tokens=tokens, fingerprint=fingerprint))


def test_further_samples_go_where_the_prompt_was_computed() -> None:
    assert near(Placement(decode(1), prefill(1))) == ("prefill-0", "decode-1")
    mixed = [row(f"mixed-{i}", Role.MIXED, 300 + i) for i in range(2)]
    assert near(Placement(mixed[1]), Placement(mixed[0])) == ("mixed-0",)
    assert near(Placement(mixed[1])) == ("prefill-0", "decode-0"), "a MIXED one would compute it anew"
    assert near(Placement(decode(1), prefill(1)), Placement(mixed[0])) == ("mixed-0",)


@pytest.mark.parametrize(
    ("now", "more"),
    [
        (prefill(0, state=MembershipState.DRAINING), {}),
        (prefill(0, state=MembershipState.LOST), {}),
        (row("prefill-0", Role.PREFILL, 999), {}),
        (prefill(0, kv=99), {}),
        (prefill(0), {"avoid": {100}}),
        (prefill(0), {"barred": {100}}),
        (prefill(0), {"broken": {100}}),
        (prefill(0), {"broken": {(100, 201)}}),
        (prefill(0), {"fingerprint": "another"}),
    ],
)
def test_unless_anything_speaks_against_it(now: RankRow, more: dict[str, Any]) -> None:
    assert near(Placement(decode(1), prefill(1)), NEAR, now, **more) == ("prefill-1", "decode-1")


def test_a_decode_row_of_another_fingerprint_is_no_partner() -> None:
    other = {"parts": {"config": "c1", "rope": "r0"}}
    chosen = Placement(decode(1, **other), prefill(1, **other))
    assert near(chosen) == ("prefill-0", "decode-0")
    assert near(chosen, NEAR, decode(0, state=MembershipState.LOST)) == ("prefill-1", "decode-1")
