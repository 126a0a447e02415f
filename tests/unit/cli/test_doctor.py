"""What doctor makes of what it sees: of this machine, and of meshes in good and in bad shape."""

from __future__ import annotations

import importlib.metadata
import io
import json
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from engine_core.lifecycle.membership import MembershipState
from engine_core.types.request import Role
from pdmesh.common.v1 import worker_pb2
from services.cli.doctor import machine
from services.cli.doctor.command import show
from services.cli.doctor.findings import Finding, Level, worst
from services.cli.doctor.mesh import Seen, Worker, judge
from services.cli.main import run
from services.cli.routers import Trouble
from services.config import QueryConfig
from tests.support.rows import instance_spec, rank_row

READY = MembershipState.READY


def levels(findings: Iterable[Finding]) -> list[tuple[str, str]]:
    return [(f.level.value, f.what) for f in findings]


def bad(findings: Iterable[Finding]) -> list[str]:
    found = [f for f in findings if f.level is not Level.OK]
    assert all(f.advice for f in found), found
    return [f.what for f in found]


class TestMachine:
    def test_packages(self) -> None:
        there = {"grpcio": "1.85.0", "torch": "2.13.0+cpu", "torch_npu": "2.12.0"}

        def version(name: str) -> str:
            if name not in there:
                raise importlib.metadata.PackageNotFoundError(name)
            return there[name]

        wanted = ["grpcio>=1.85,<2", "protobuf>=7", "torch==2.13.0", "aiohttp>=9; extra == 'dev'"]
        found = bad(machine.packages(wanted, version))
        assert found == ["protobuf is not installed", "torch_npu 2.12.0 beside torch 2.13.0+cpu"]
        there |= {"protobuf": "6.1", "torch_npu": "2.13.0.post2"}
        assert bad(machine.packages(wanted, version)) == ["protobuf is 6.1; pdmesh needs >=7"]

    def test_what_this_environment_has_is_what_pdmesh_needs(self) -> None:
        assert bad(machine.packages()) == []

    def test_kernels(self, tmp_path: Path) -> None:
        info = tmp_path / "cpuinfo"
        info.write_text("flags: fpu avx512f")
        assert bad(machine.kernels(lambda name: "/bin/g++" if name == "g++" else None, info)) == []
        info.write_text("flags: fpu avx2")
        assert bad(machine.kernels(lambda _name: None, info)) == ["there is no C++ compiler", "the CPU has no AVX-512"]

    def test_sockets_and_limits_and_clock(self, tmp_path: Path) -> None:
        assert bad(machine.sockets(str(tmp_path))) == []
        assert bad(machine.sockets(str(tmp_path / "none"))) == [
            f"{tmp_path / 'none'} is no directory that can be written"
        ]
        deep = tmp_path / ("x" * 100)
        deep.mkdir()
        assert bad(machine.sockets(str(deep))) == [f"{deep} is too long a path for unix sockets"]
        assert bad(machine.limits(1024)) == ["1024 open files per process"]
        assert bad(machine.limits(4096)) == bad(machine.limits(-1)) == []
        assert [len(bad(machine.clock(state))) for state in (True, False, None)] == [0, 1, 1]

    def test_ports(self) -> None:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            sock.listen()
            port = sock.getsockname()[1]
            (taken,) = machine.ports({port: "router"}, machine._listens)
        assert taken.what.startswith(f"{port} (router) is taken by ") and "pid" in taken.what
        (free,) = machine.ports({port: "router"}, machine._listens)
        assert free.what == f"{port} (router) is free"

    def test_security(self, tmp_path: Path) -> None:
        token = tmp_path / "token"
        config = QueryConfig(mesh_token_file=str(token))
        assert "token" in bad(machine.security(config))[0]
        token.write_text("a-secret-of-some-length\n")
        token.chmod(0o644)
        assert bad(machine.security(config)) == [f"{token} can be read by every user"]
        token.chmod(0o600)
        assert bad(machine.security(config)) == bad(machine.security(QueryConfig())) == []

    def test_model(self, tmp_path: Path) -> None:
        assert bad(machine.model_files(str(tmp_path / "none")))[0].endswith("does not exist")
        (tmp_path / "config.json").write_text("{}")
        assert bad(machine.model_files(str(tmp_path))) == [f"{tmp_path} lacks tokenizer.json, *.safetensors"]
        (tmp_path / "tokenizer.json").write_text("{}")
        with (tmp_path / "model.safetensors").open("wb") as file:
            file.truncate(2**20)
        assert bad(machine.model_files(str(tmp_path))) == []
        with (tmp_path / "model.safetensors").open("wb") as file:
            file.truncate(2**42)
        assert bad(machine.model_files(str(tmp_path)))[0].startswith(f"{tmp_path.name}: 4096.0 GiB of weights")

    def test_devices(self, tmp_path: Path) -> None:
        assert levels(machine.devices(tmp_path)) == [("ok", "no accelerator: models run on the CPU")]
        (tmp_path / "dev").mkdir()
        for name in ("davinci0", "davinci1"):
            (tmp_path / "dev" / name).touch()
        port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text("1: DOWN\n")
        assert bad(machine.devices(tmp_path)) == [
            "/dev/davinci_manager is not there",
            "/etc/hccn.conf is not there",
            "torch_npu is not installed",
            "RDMA mlx5_0 port 1 is 1: DOWN",
        ]
        (port / "state").write_text("4: ACTIVE\n")
        assert ("ok", "RDMA mlx5_0 port 1 is 4: ACTIVE") in levels(machine.devices(tmp_path))

    def test_a_check_that_fails_hides_no_other(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: 1 / 0)
        found = machine.examine(QueryConfig(), "", "")
        assert any(f.area == "memory" and "ZeroDivisionError" in f.what for f in found)
        assert {"packages", "sockets", "devices"} <= {f.area for f in found}


def worker(name: str, role: Role, *, silent: bool = False, skew: float = 0.0, **more: Any) -> Worker:
    spec_more = {n: more.pop(n) for n in ("version", "kv_capacity_tokens", "fingerprint_parts") if n in more}
    spec = instance_spec(name, role, more.pop("fingerprint", "f"), **{"version": "1", **spec_more})
    row = rank_row(
        name,
        role,
        spec=spec,
        state=more.pop("state", READY),
        host=more.pop("host", "h"),
        **{"incarnation": more.pop("incarnation", 1)},
    )
    stats = None if silent else worker_pb2.GetStatsResponse(unix_seconds=1e9, **more)
    return Worker(row, stats, "UNAVAILABLE: no route" if silent else "", skew)


def seen(*workers: Worker, **more: Any) -> Seen:
    return Seen({"b": [w.row for w in workers]}, list(workers), more.get("routers", {"r:1": None}))


def pair(*more: Worker) -> tuple[Worker, ...]:
    return (worker("p0", Role.PREFILL, incarnation=1), worker("d0", Role.DECODE, incarnation=2), *more)


class TestMesh:
    def test_all_well(self) -> None:
        assert levels(judge(seen(*pair()), "1")) == [
            ("ok", "b answers and knows 2 workers"),
            ("ok", "2 of 2 are ready and answer"),
            ("ok", "all workers' clocks are within 1 s of this one's"),
            ("ok", "all run 1"),
            ("ok", "prefill and decode fit each other"),
            ("ok", "r:1 is ready"),
        ]

    def test_bootstraps(self) -> None:
        nobody = Seen({"a": "Bootstrap at a does not answer"})
        assert bad(judge(nobody, "1")) == ["Bootstrap at a does not answer"]
        p0, d0 = pair()
        unequal = Seen({"a": [p0.row, d0.row], "b": [p0.row]}, [p0, d0], {"r": None})
        assert bad(judge(unequal, "1")) == ["b does not know d0, which others do"]

    def test_workers(self) -> None:
        found = bad(
            judge(
                seen(
                    *pair(
                        worker("d1", Role.DECODE, silent=True),
                        worker("d2", Role.DECODE, state=MembershipState.DRAINING, drain_note="waits for 3 sessions"),
                        worker("d3", Role.DECODE, state=MembershipState.JOINING),
                        worker("d4", Role.DECODE, stalled_seconds=12.0),
                        worker("d5", Role.DECODE, loop_lag_p99_seconds=0.25),
                    )
                ),
                "1",
            )
        )
        assert found == [
            "d1 at d1.0:1 (READY) does not answer: UNAVAILABLE: no route",
            "d2 is draining: waits for 3 sessions",
            "d3 is JOINING",
            "d4 has work but its engine stands still for 12 s",
            "d5's service process lags 250 ms",
        ]

    def test_clocks_and_versions(self) -> None:
        found = list(judge(seen(*pair(worker("d1", Role.DECODE, skew=-2.5, version="2"))), "1"))
        assert bad(found) == ["the clock of d1 (h) is -2.5 s off this one's", "workers run 1 (2), 2 (1)"]
        assert bad(judge(seen(*pair()), "3")) == ["workers run 1, this command 3"]
        far = list(judge(seen(*pair(worker("d1", Role.DECODE, skew=40.0))), "1"))
        assert worst(far) is Level.ERROR

    def test_pairs(self) -> None:
        p0, d0 = pair()
        assert bad(judge(seen(d0), "1")) == ["d0: no prefill worker is ready"]
        assert bad(judge(seen(p0), "1")) == ["p0: no decode worker is ready"]
        other = worker("d1", Role.DECODE, fingerprint="g", fingerprint_parts={"dtype": "bfloat16"})
        mine = worker("p1", Role.PREFILL, fingerprint="f", fingerprint_parts={"dtype": "float32"})
        assert bad(judge(seen(mine, other), "1"))[0] == "p1 and d1 can't be paired: dtype is float32 and bfloat16"
        assert bad(judge(seen(worker("m0", Role.MIXED)), "1")) == []
        assert bad(judge(seen(), "1")) == ["no worker is ready"]

    def test_pools(self) -> None:
        load = worker_pb2.Load(kv=worker_pb2.KvUsage(total=100, quarantined=30))
        small = worker("d1", Role.DECODE, load=load, kv_capacity_tokens=1000)
        large = worker("p1", Role.PREFILL, kv_capacity_tokens=5000)
        assert bad(judge(seen(small, large), "1")) == [
            "30% of d1's KV blocks are quarantined: a peer may still write there",
            "prefill pools hold 5000 tokens, decode pools 1000",
        ]

    def test_transfers(self) -> None:
        links = [
            worker_pb2.TransferPair(
                peer_instance="d0", peer_incarnation=2, transport="tcp", up=True, reason="no socket"
            ),
            worker_pb2.TransferPair(peer_instance="d9", peer_incarnation=9, transport="tcp", up=False),
        ]
        p1 = worker("p1", Role.PREFILL, incarnation=1, pairs=links)
        assert bad(judge(seen(p1, pair()[1]), "1")) == ["p1 → d0 goes by tcp on one machine: no socket"]
        apart = worker("d0", Role.DECODE, incarnation=2, host="other")
        found = list(judge(seen(p1, apart), "1"))
        assert bad(found) == [] and ("ok", "1 pair is linked") in levels(found)

    def test_routers(self) -> None:
        assert bad(judge(seen(*pair(), routers={}), "1")) == ["none watches the rank table"]
        waits, stranger = Trouble("is not ready: no pair"), Trouble("does not answer: whoever", "ask somebody")
        found = list(judge(seen(*pair(), routers={"r:1": waits, "https://r:1": stranger, "r:2": None}), "1"))
        assert bad(found) == ["r:1 is not ready: no pair", "https://r:1 does not answer: whoever"]
        assert [f.advice for f in found if f.level is Level.ERROR] == [
            "see its log, and the findings above",
            "ask somebody",
        ]


def test_the_report() -> None:
    out = io.StringIO()
    show(
        [Finding("a", Level.OK, "is well"), Finding("area", Level.ERROR, "is broken", "mend it")],
        Console(file=out, width=60, highlight=False),
    )
    assert [line.rstrip() for line in out.getvalue().splitlines()] == [
        "ok     a     is well",
        "ERROR  area  is broken",
        "             → mend it",
        "1 error, 0 warnings",
    ]


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    code = run(["doctor", "--json", "--bootstrap", "127.0.0.1:1", "--query-timeout", "0.5"])
    report = json.loads(capsys.readouterr().out)
    assert (code, report["level"]) == (1, "error")
    assert [f["area"] for f in report["findings"] if f["level"] == "error"] == ["bootstrap"]
    assert run(["doctor", "--local"]) == 0
