"""The policy of roles by a virtual clock: what moves a worker, and that nothing moves one back and forth."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_core.lifecycle.membership import MembershipState
from engine_core.types.kv import KvUsage
from engine_core.types.request import Role
from services.bootstrap.auto_role import AutoRole, AutoRoleSettings, RoleChange, pressure_by_role
from services.wire.bootstrap import Load, RankRow
from tests.support.rows import instance_spec, rank_row

ROOM, FULL = KvUsage(total=100, free=90, used=10), KvUsage(total=100, free=5, used=95)
SETTINGS = AutoRoleSettings(high=4.0, low=1.0, hold=10.0, cooldown=60.0)


def row(name: str, role: Role, fingerprint: str = "fp", *, incarnation: int = 1, **load: object) -> RankRow:
    return rank_row(
        incarnation=incarnation,
        spec=instance_spec(name, role, fingerprint, max_running=8),
        endpoint=f"{name}:1",
        state=MembershipState.READY,
        load=Load(**{"kv": ROOM, **load}),  # type: ignore[arg-type]
    )


def pool(prefills: int, decodes: int, *, prompts: int = 0, waiting: int = 0, fingerprint: str = "fp") -> list[RankRow]:
    """Workers among which so many requests wait for prefill, and so many for decode."""
    rows = [row(f"p{i}", Role.PREFILL, fingerprint, queued=prompts // prefills) for i in range(prefills)]
    full = {"queued": waiting // max(decodes, 1), "kv": FULL} if waiting else {}
    return rows + [row(f"d{i}", Role.DECODE, fingerprint, **full) for i in range(decodes)]


def run(policy: AutoRole, rows: list[RankRow], start: float, end: float) -> list[RoleChange]:
    found = [policy.step(rows, float(now)) for now in range(int(start), int(end))]
    return [change for change in found if change is not None]


def test_a_need_that_lasts_moves_the_least_busy_worker() -> None:
    rows = [*pool(1, 2, prompts=8), row("idle", Role.DECODE), row("busy", Role.DECODE, running=3)]
    rows[1] = row("d0", Role.DECODE, running=1)
    rows[2] = row("d1", Role.DECODE, running=2)
    policy = AutoRole(SETTINGS)
    assert run(policy, rows, 0, 10) == []
    change = policy.step(rows, 10.0)
    assert change is not None and (change.row.instance.name, change.role) == ("idle", Role.PREFILL)
    assert change.reason == "8 requests wait for 1 PREFILL workers, 0 for 4 DECODE workers"
    assert policy.changing and run(policy, rows, 11, 300) == []


def test_a_need_that_breaks_off_starts_over() -> None:
    policy, needy, calm = AutoRole(SETTINGS), pool(1, 3, prompts=8), pool(1, 3)
    assert run(policy, needy, 0, 9) == []
    assert policy.step(calm, 9.0) is None
    assert run(policy, needy, 10, 20) == []
    assert policy.step(needy, 20.0) is not None


def test_a_pool_that_was_gone_starts_over() -> None:
    policy, needy, other = AutoRole(SETTINGS), pool(1, 3, prompts=8), pool(1, 3, fingerprint="other")
    assert run(policy, [*needy, *other], 0, 9) == []
    assert run(policy, other, 9, 50) == []
    assert run(policy, [*needy, *other], 50, 60) == []
    assert policy.step([*needy, *other], 60.0) is not None


def test_the_next_change_waits_for_the_first_and_for_the_cooldown() -> None:
    policy, rows = AutoRole(SETTINGS), pool(1, 4, prompts=30)
    (change,) = run(policy, rows, 0, 11)
    rows = [r for r in rows if r is not change.row]
    assert run(policy, rows, 11, 100) == [] and policy.changing
    rows.append(row(change.row.instance.name, Role.PREFILL, incarnation=2))
    assert policy.step(rows, 100.0) is None and not policy.changing
    assert run(policy, rows, 101, 160) == []
    assert len(run(policy, rows, 160, 171)) == 1


def test_a_change_that_fails_or_never_comes_about_is_given_up() -> None:
    policy, rows = AutoRole(SETTINGS), pool(1, 3, prompts=30)
    assert len(run(policy, rows, 0, 11)) == 1
    policy.failed(11.0)
    assert run(policy, rows, 12, 71) == [] and len(run(policy, rows, 71, 82)) == 1
    assert run(policy, rows, 82, 380) == [] and policy.changing
    assert run(policy, rows, 380, 440) == [] and not policy.changing


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(pool(1, 1, prompts=100), id="the last decode worker"),
        pytest.param(pool(1, 2, prompts=100, waiting=100), id="both are short"),
        pytest.param(pool(1, 2, prompts=3), id="below high"),
        pytest.param([*pool(1, 1, prompts=100), *pool(1, 2, fingerprint="other")], id="another pool has plenty"),
        pytest.param([*pool(1, 1, prompts=100), row("m", Role.MIXED)], id="a MIXED one does not count"),
    ],
)
def test_nobody_moves(rows: list[RankRow]) -> None:
    assert run(AutoRole(SETTINGS), rows, 0, 1000) == []


def test_decode_is_short_only_where_it_is_full() -> None:
    prefill = row("p", Role.PREFILL, running=5, queued=2, queued_tokens=900)
    waits = row("d", Role.DECODE, running=3, queued=7)
    pressures = pressure_by_role([prefill, waits])
    assert (pressures[Role.PREFILL].waiting, pressures[Role.DECODE].waiting) == (4 + 7, 0)
    full = msgspec.structs.replace(waits, load=Load(running=8, queued=7, kv=ROOM))
    done = msgspec.structs.replace(prefill, load=Load(running=5, kv=ROOM))
    pressures = pressure_by_role([done, full])
    assert (pressures[Role.PREFILL].waiting, pressures[Role.DECODE].waiting) == (0, 7)
    lost = msgspec.structs.replace(prefill, state=MembershipState.LOST)
    assert pressure_by_role([lost])[Role.PREFILL].workers == 0


def test_low_must_be_below_high() -> None:
    with pytest.raises(ValueError, match="low must be in"):
        AutoRoleSettings(high=1.0, low=1.0)


class Simulated:
    """Workers by name; one that changes is away for `delay` seconds. The load stays as it is."""

    def __init__(self, prefills: int, decodes: int, prompts: int, waiting: int) -> None:
        self.roles = {f"p{i}": Role.PREFILL for i in range(prefills)} | {f"d{i}": Role.DECODE for i in range(decodes)}
        self.load = {Role.PREFILL: prompts, Role.DECODE: waiting}
        self.away: tuple[str, Role, float] | None = None

    def rows(self, now: float) -> list[RankRow]:
        """Everybody who is there."""
        if self.away is not None and now >= self.away[2]:
            self.roles[self.away[0]] = self.away[1]
            self.away = None
        rows = []
        for role, total in self.load.items():
            names = sorted(name for name, r in self.roles.items() if r is role)
            for i, name in enumerate(names):
                queued = total // len(names) + (i < total % len(names))
                rows.append(row(name, role, queued=queued, kv=FULL if role is Role.DECODE and total else ROOM))
        return rows

    def change(self, change: RoleChange, until: float) -> None:
        """It leaves, and comes back as the other."""
        assert self.away is None, "two changes at once"
        assert self.roles.pop(change.row.instance.name) is not change.role
        assert set(self.roles.values()) == {Role.PREFILL, Role.DECODE}, "a role was left empty"
        self.away = (change.row.instance.name, change.role, until)


@settings(deadline=None)
@given(
    st.integers(1, 5), st.integers(1, 5), st.integers(0, 60), st.integers(0, 60), st.integers(0, 40), st.integers(0, 30)
)
def test_under_a_load_that_stays_nobody_moves_back(
    prefills: int, decodes: int, prompts: int, waiting: int, delay: int, hold: int
) -> None:
    settings = AutoRoleSettings(high=4.0, low=1.0, hold=hold, cooldown=60.0)
    policy, mesh = AutoRole(settings), Simulated(prefills, decodes, prompts, waiting)
    changes: list[tuple[float, Role]] = []
    for now in map(float, range(0, 600, 2)):
        change = policy.step(mesh.rows(now), now)
        if change is not None:
            mesh.change(change, now + delay)
            changes.append((now, change.role))
    assert len({role for _, role in changes}) <= 1, "it moved back"
    times = [at for at, _ in changes]
    assert all(b - a >= 60 for a, b in zip(times, times[1:], strict=False))


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), min_size=1, max_size=40), st.integers(0, 20))
def test_under_any_load_changes_keep_their_distance(loads: list[tuple[int, int]], delay: int) -> None:
    policy, mesh = AutoRole(SETTINGS), Simulated(3, 3, 0, 0)
    times: list[float] = []
    for i, (prompts, waiting) in enumerate(loads):
        mesh.load = {Role.PREFILL: prompts, Role.DECODE: waiting}
        for now in map(float, range(15 * i, 15 * i + 15)):
            change = policy.step(mesh.rows(now), now)
            if change is not None:
                mesh.change(change, now + delay)
                times.append(now)
    assert all(b - a >= SETTINGS.cooldown + SETTINGS.hold for a, b in zip(times, times[1:], strict=False))
