"""What Bootstrap tells Prometheus of its table."""

from __future__ import annotations

from prometheus_client import generate_latest

from engine_core.types.ids import RankCoord
from engine_core.types.request import Role
from services.bootstrap.metrics import BootstrapMetrics, TableMoves
from services.bootstrap.rank_table import RankTable
from services.bootstrap.rooms import RoomBook
from services.runtime.telemetry import LoopLagMonitor
from services.wire.bootstrap import InstanceSpec, Load, RankRow, RoomRoute
from tests.support.scraping import parse, run_promtool, value


def row(name: str, role: Role, incarnation: int) -> RankRow:
    return RankRow(InstanceSpec(name=name, role=role, fingerprint="f"), RankCoord(), "h:1", incarnation)


async def test_rows_leases_and_moves() -> None:
    moves, rooms, now = TableMoves(), RoomBook(), 100.0
    table = RankTable(3, ttl=15.0, renew=5.0, move_log=moves.log)
    metrics = BootstrapMetrics(table, moves, rooms, lambda: 4, LoopLagMonitor(), clock=lambda: now)
    table.register_rank(row("prefill-0", Role.PREFILL, 1), 0.0, now)
    grant = table.register_rank(row("decode-0", Role.DECODE, 2), 0.0, now)
    rooms.record([RoomRoute(room=9)])
    now = 104.0
    table.renew(grant.lease_id, 2, Load(running=1), now)

    text = generate_latest(metrics.registry).decode()
    code, said = await run_promtool("check", "metrics", text=text)
    assert (code, said) == (0, ""), said
    got = parse(text)
    assert value(got, "pdmesh_bootstrap_rows", role="PREFILL", state="READY") == 1
    assert value(got, "pdmesh_bootstrap_rows", role="DECODE", state="READY") == 1
    assert value(got, "pdmesh_bootstrap_rows", state="LOST") == 0
    remaining = {labels["worker"]: v for labels, v in got["pdmesh_bootstrap_lease_remaining_seconds"]}
    assert remaining == {"prefill-0": 11.0, "decode-0": 15.0}
    assert value(got, "pdmesh_bootstrap_watchers") == 4 and value(got, "pdmesh_bootstrap_rooms") == 1
    assert value(got, "pdmesh_bootstrap_load_reports_total") == 1
    assert value(got, "pdmesh_bootstrap_table_revision") == table.revision.n

    now = 116.0
    table.expire(now)
    table.register_rank(row("prefill-0", Role.PREFILL, 5), 0.0, now)
    got = parse(generate_latest(metrics.registry).decode())
    assert value(got, "pdmesh_bootstrap_lease_lapses_total") == 1, "prefill-0 was silent for 15 s"
    assert value(got, "pdmesh_bootstrap_takeovers_total") == 1, "and came back in a new life"
    assert value(got, "pdmesh_bootstrap_moves_total", state="LEFT") == 1
    assert value(got, "pdmesh_bootstrap_rows", role="PREFILL", state="READY") == 1
