"""What /sd lists."""

from __future__ import annotations

import msgspec

from engine_core.lifecycle.membership import MembershipState
from engine_core.types.ids import RankCoord
from engine_core.types.request import Role
from services.router.ops.discovery import targets
from services.wire.bootstrap import InstanceSpec, RankRow, WatchedService


def row(name: str, role: Role, metrics: str, state: MembershipState = MembershipState.READY) -> RankRow:
    spec = InstanceSpec(name=name, role=role, fingerprint="f", tp_size=2)
    return RankRow(spec, RankCoord(), "h:1", 5, state=state, host="machine", metrics_endpoint=metrics)


def test_workers_services_and_what_has_no_metrics() -> None:
    lost = row("decode-0", Role.DECODE, "h:9102", MembershipState.LOST)
    other_rank = msgspec.structs.replace(lost, coord=RankCoord(tp=1), metrics_endpoint="h:9999")
    rows = [row("prefill-0", Role.PREFILL, "h:9101"), lost, other_rank, row("mixed-0", Role.MIXED, "h:9103"),
            row("quiet", Role.DECODE, "")]  # fmt: skip
    services = [
        WatchedService("bootstrap", 1, "b", metrics_endpoint="b:9100"),
        WatchedService("router", 2, "r", http_endpoint="https://r:8000", metrics_endpoint="https://r:8000"),
        WatchedService("prefill", 3, "machine"),
    ]
    found = {group["targets"][0]: group["labels"] for group in targets(rows, services)}
    assert {address: labels["job"] for address, labels in found.items()} == {
        "b:9100": "pdmesh-bootstrap", "r:8000": "pdmesh-router", "h:9101": "pdmesh-prefill", "h:9102": "pdmesh-decode",
        "h:9103": "pdmesh-decode",
    }  # fmt: skip
    assert found["h:9102"] == {
        "job": "pdmesh-decode", "__meta_pdmesh_host": "machine", "__meta_pdmesh_instance": "decode-0",
    }  # fmt: skip
    assert found["r:8000"]["__scheme__"] == "https" and "__scheme__" not in found["b:9100"]
