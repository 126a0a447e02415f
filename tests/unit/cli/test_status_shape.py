"""What `pdmesh status --json` holds, for a worker that answers and for one that does not."""

from __future__ import annotations

import io

from rich.console import Console

from pdmesh.bootstrap.v1 import rank_table_pb2
from pdmesh.common.v1 import identity_pb2, worker_pb2
from services.cli.explain import show as show_timeline
from services.cli.status import show
from services.worker.survey import rank_as_data, router_move

KV = worker_pb2.KvUsage(total=64, free=60, used=1, cached=3)


def row() -> rank_table_pb2.RankRow:
    return rank_table_pb2.RankRow(
        instance=rank_table_pb2.InstanceSpec(name="decode-0", role=identity_pb2.ROLE_DECODE, served_model_names=["m"]),
        endpoint="127.0.0.1:8100",
        incarnation=11,
        state=rank_table_pb2.MEMBERSHIP_STATE_LOST,
        load=worker_pb2.Load(running=1, kv=KV),
        host="h",
        pid=5,
        engine_pid=6,
    )


def live() -> worker_pb2.GetStatsResponse:
    return worker_pb2.GetStatsResponse(
        role=identity_pb2.ROLE_DECODE,
        incarnation=12,
        pid=7,
        engine_pid=8,
        host="h",
        state="READY",
        load=worker_pb2.Load(running=2, queued=3, kv=KV),
        pairs=[worker_pb2.TransferPair(peer_instance="prefill-0", transport="shm", reason="same host", up=True)],
    )


def test_a_rank_that_answers_is_shown_as_it_says() -> None:
    rank = rank_as_data(row(), live())
    expected = {
        "instance": "decode-0", "role": "DECODE", "dp": 0, "cp": 0, "tp": 0, "endpoint": "127.0.0.1:8100",
        "incarnation": 12, "pid": 7, "engine_pid": 8, "host": "h", "state": "READY", "table_state": "LOST",
        "answers": True,
    }  # fmt: skip
    assert expected.items() <= rank.items()
    assert {"running": 2, "queued": 3}.items() <= rank["load"].items()
    assert rank["kv"] == {"total": 64, "free": 60, "used": 1, "cached": 3, "pinned": 0, "quarantined": 0}
    assert rank["pairs"][0]["transport"] == "shm" and rank["pairs"][0]["reason"] == "same host"


def test_a_rank_that_does_not_answer_is_shown_as_the_table_has_it() -> None:
    rank = rank_as_data(row(), None, "UNAVAILABLE: gone")
    assert (rank["state"], rank["incarnation"], rank["pid"], rank["answers"]) == ("LOST", 11, 5, False)
    assert (rank["error"], rank["health"], rank["kv"]["total"]) == ("UNAVAILABLE: gone", "NO ANSWER", 64)


def test_tables_name_what_matters() -> None:
    out = io.StringIO()
    status = {
        "bootstrap": "127.0.0.1:18800",
        "revision": {"table_epoch": 4, "n": 2},
        "ranks": [rank_as_data(row(), live()), rank_as_data(row(), None, "UNAVAILABLE: gone")],
        "services": [
            {
                "name": "router",
                "instance": "",
                "pid": 3,
                "host": "h",
                "endpoint": "127.0.0.1:8000",
                "metrics": "127.0.0.1:9100",
                "answers": True,
                "error": "",
            }
        ],
    }
    show(status, Console(file=out, width=200))
    for text in (
        "4/2",
        "decode-0",
        "same host",
        "router",
        "127.0.0.1:9100",
        "decode-0 does not answer: UNAVAILABLE: gone",
    ):
        assert text in out.getvalue()


def test_a_timeline_counts_from_its_first_move() -> None:
    out = io.StringIO()
    first = router_move({"unix_seconds": 100.0, "room": 5, "to_state": "PLANNED"})
    later = router_move(
        {"unix_seconds": 100.25, "room": 5, "from_state": "PLANNED", "to_state": "DONE", "reason": "stop"}
    )
    timeline = {
        "request_id": "r", "rooms": [5], "moves": [first, later], "silent": [{"process": "decode-0", "error": "gone"}],
        "routes": [{"room": 5, "attempt": 0, "prefill_instance": "p", "decode_instance": "d"}],
    }  # fmt: skip
    show_timeline(timeline, Console(file=out, width=200))
    for text in ("0.0", "250.0", "PLANNED → DONE", "prefill p, decode d", "decode-0 does not answer: gone"):
        assert text in out.getvalue()
