"""What operators see: status, explain, metrics, health, reflection, profiles."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from pdmesh.common.v1 import worker_pb2, worker_pb2_grpc
from tests.mesh.conftest import BLOCK_BYTES, Scripted, Served
from tests.support.asking import TIMEOUT, random_prompt, until_async
from tests.support.mesh import Mesh
from tests.support.reflected import Reflected

pytestmark = pytest.mark.asyncio(loop_scope="session")

WORKERS = {"prefill-0": "PREFILL", "prefill-1": "PREFILL", "decode-0": "DECODE"}
KV = ("free", "used", "cached", "pinned", "quarantined")
HEALTH = "grpc.health.v1.Health"
REFLECTION = "grpc.reflection.v1alpha.ServerReflection"
SERVICES = {
    "bootstrap": "pdmesh.bootstrap.v1.BootstrapService",
    "prefill-0": "pdmesh.prefill.v1.PrefillService",
    "decode-0": "pdmesh.decode.v1.DecodeService",
}
BUF = Path(__file__).parents[2] / "node_modules/.bin/buf"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def http(llama: Served) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=llama.mesh.url, timeout=60.0, trust_env=False) as client:
        yield client


async def run(*command: str | Path) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(60.0):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def pdmesh(mesh: Mesh, *arguments: str) -> tuple[int, str, str]:
    """The command itself, against this mesh's Bootstrap."""
    return await run(sys.executable, "-m", "services.cli.main", *arguments, "--bootstrap", mesh.bootstrap)


# ---- pdmesh status ------------------------------------------------------------------------------------


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


async def test_status_as_json(llama: Served) -> None:
    mesh = llama.mesh
    before = {rank["instance"]: rank["pairs"] for rank in await mesh.quiet()}
    for turn in (1, 2):  # one request over each prefill worker, of five blocks
        await llama.asker.generate(random_prompt(80, turn), max_tokens=4)
    await mesh.quiet()
    code, out, err = await pdmesh(mesh, "status", "--json")
    assert (code, err) == (0, "")
    status = json.loads(out)
    assert set(status) == {"bootstrap", "revision", "ranks", "services"}
    assert status["bootstrap"] == mesh.bootstrap
    assert status["revision"]["table_epoch"] > 0 and status["revision"]["n"] >= 6  # JOINING and READY each

    ranks = {rank["instance"]: rank for rank in status["ranks"]}
    assert {name: rank["role"] for name, rank in ranks.items()} == WORKERS
    for name, rank in ranks.items():
        assert (rank["dp"], rank["cp"], rank["tp"]) == (0, 0, 0)
        assert (rank["endpoint"], rank["pid"], rank["host"]) == (
            mesh.endpoint(name),
            mesh.pid(name),
            socket.gethostname(),
        )
        assert parent_of(rank["engine_pid"]) == rank["pid"]
        assert type(rank["incarnation"]) is int and rank["incarnation"] > 2**52  # holds the time in milliseconds
        assert (rank["state"], rank["table_state"], rank["health"]) == ("READY", "READY", "SERVING")
        assert (rank["answers"], rank["error"]) == (True, "")
        assert rank["load"] == {"running": 0, "queued": 0, "queued_tokens": 0}
        kv = rank["kv"]
        assert set(kv) == {"total", *KV} and all(type(n) is int and n >= 0 for n in kv.values())
        assert kv["total"] == sum(kv[state] for state in KV) == 16384 // 16
        assert kv["cached"] >= 5 and kv["used"] == kv["pinned"] == kv["quarantined"] == 0
        assert (rank["sessions"], rank["streams"], rank["tasks"]) == (0, 0, 0)
        assert rank["uptime_seconds"] > 0 and 0 <= rank["loop_lag_p99_seconds"] < 10
        assert rank["counters"]["sessions_opened"] >= 1 and rank["counters"]["steps"] >= 1
        assert rank["max_model_len"] == 4096 and rank["models"] == [llama.model.name]
    assert len({rank["incarnation"] for rank in ranks.values()}) == 3
    assert len({rank["fingerprint"] for rank in ranks.values()}) == 1

    for name, transport in (("prefill-0", "shm"), ("prefill-1", "tcp")):
        (pair,) = ranks[name]["pairs"]
        assert (pair["peer_instance"], pair["peer_incarnation"]) == ("decode-0", ranks["decode-0"]["incarnation"])
        assert (pair["transport"], pair["up"]) == (transport, True)
        # What other tests have cancelled counts as failed, and may have moved parts of blocks.
        earlier = before[name][0] if before[name] else {"failures": 0, "bytes": 0, "seconds": 0.0}
        assert pair["failures"] == earlier["failures"] and pair["seconds"] > earlier["seconds"]
        assert pair["bytes"] == earlier["bytes"] + 5 * BLOCK_BYTES
        assert pair["reason"].startswith(f"{transport}: ")
    assert {p["peer_instance"]: p["transport"] for p in ranks["decode-0"]["pairs"]} == {
        "prefill-0": "shm",
        "prefill-1": "tcp",
    }

    services = {service["instance"] or service["name"]: service for service in status["services"]}
    assert {name: service["pid"] for name, service in services.items()} == mesh.pids
    assert {name: service["name"] for name, service in services.items()} == {
        "bootstrap": "bootstrap", "router": "router",
        "prefill-0": "prefill", "prefill-1": "prefill", "decode-0": "decode",
    }  # fmt: skip
    assert all(service["host"] == socket.gethostname() for service in services.values())
    assert services["router"]["endpoint"] == mesh.url.removeprefix("http://")


async def test_status_for_people_and_without_a_bootstrap(llama: Served) -> None:
    (code, out, _), gone = await asyncio.gather(
        pdmesh(llama.mesh, "status"),
        run(sys.executable, "-m", "services.cli.main", "status", "--bootstrap", "127.0.0.1:9", "--query-timeout", "1"),
    )
    assert code == 0
    for name, role in WORKERS.items():
        assert any(line.split()[:4] == [name, role, "0.0.0", "READY"] for line in out.splitlines()), out
    assert "nonce read back" in out and "tcp: connected to" in out  # why each pair uses what it uses
    code, out, err = gone
    assert (code, out) == (1, "") and err.startswith("pdmesh: error: Bootstrap at 127.0.0.1:9 does not answer"), err


async def test_status_is_live(llama: Served) -> None:
    await llama.mesh.quiet()
    asking = llama.asker.start(random_prompt(40, 1), max_tokens=3000, ignore_eos=True)
    await asking.tokens(8)
    rank = await llama.mesh.rank("decode-0")
    assert (rank["load"]["running"], rank["streams"], rank["sessions"]) == (1, 1, 1)
    assert rank["kv"]["used"] >= 3
    await asking.disconnect()
    await llama.mesh.quiet()


# ---- pdmesh explain -----------------------------------------------------------------------------------


def way(moves: list[dict[str, Any]], process: str, machine: str) -> list[str]:
    """The states that one machine went through."""
    found = [move for move in moves if (move["process"], move["machine"]) == (process, machine)]
    assert all(after["from"] == before["to"] for before, after in zip(found, found[1:], strict=False)), found
    return [move["to"] for move in found]


def when(moves: list[dict[str, Any]], process: str, machine: str, state: str) -> int:
    """Place in the timeline."""
    return next(i for i, m in enumerate(moves) if (m["process"], m["machine"], m["to"]) == (process, machine, state))


async def test_explain_a_finished_request(llama: Served) -> None:
    answer = await llama.asker.generate(random_prompt(100, 5), max_tokens=6, ignore_eos=True)
    timeline: dict[str, Any] = {}

    async def recorded() -> bool:  # routers do so once a second
        code, out, err = await pdmesh(llama.mesh, "explain", answer.request_id, "--json")
        assert (code, err) == (0, "")
        timeline.update(json.loads(out))
        return bool(timeline["routes"])

    await until_async(recorded, TIMEOUT)
    assert timeline["request_id"] == answer.request_id and timeline["silent"] == []
    (room,), (route,) = timeline["rooms"], timeline["routes"]
    assert route == {"room": room, "attempt": 0, "prefill_instance": answer.prefill, "decode_instance": "decode-0"}
    moves = timeline["moves"]
    assert [m["unix_seconds"] for m in moves] == sorted(m["unix_seconds"] for m in moves)
    assert {(m["room"], m["attempt"]) for m in moves} == {(room, 0)}
    assert all(m["seconds"] >= 0 for m in moves)

    assert way(moves, "router", "router_request") == ["QUEUED", "PLACED", "SENT", "FIRST_TOKEN", "FINISHED"]
    assert way(moves, "decode-0", "decode_request") == [
        "QUEUED", "AWAITING_START", "AWAITING_KV", "READY", "DECODING", "FINISHED",
    ]  # fmt: skip
    assert way(moves, answer.prefill, "prefill_request") == ["QUEUED", "COMPUTING", "COMPUTED", "PUSHING", "FINISHED"]
    for process in ("decode-0", answer.prefill):
        states = way(moves, process, "transfer_session")
        assert states[0] == "TICKETED" and states[-2:] == ["DELIVERED", "RELEASED"]
    order = [
        ("router", "router_request", "PLACED"),
        ("decode-0", "decode_request", "QUEUED"),
        (answer.prefill, "prefill_request", "QUEUED"),
        (answer.prefill, "prefill_request", "COMPUTING"),
        ("decode-0", "decode_request", "AWAITING_KV"),
        (answer.prefill, "transfer_session", "TICKETED"),
        (answer.prefill, "transfer_session", "DELIVERED"),
        ("decode-0", "transfer_session", "DELIVERED"),
        ("decode-0", "decode_request", "READY"),
        ("decode-0", "decode_request", "FINISHED"),
        ("router", "router_request", "FINISHED"),
    ]
    places = [when(moves, *step) for step in order]
    assert places == sorted(places), [(order[i], place) for i, place in enumerate(places)]


async def test_explain_for_people(llama: Served) -> None:
    reply = await llama.asker.post("/v1/completions", {"model": "default", "prompt": [5, 6, 7], "max_tokens": 2})
    (code, out, _), unknown = await asyncio.gather(
        pdmesh(llama.mesh, "explain", reply["id"]), pdmesh(llama.mesh, "explain", "nobody")
    )
    assert code == 0 and reply["id"] in out
    for words in (
        "decode-0",
        "AWAITING_KV → READY",
        "COMPUTED → PUSHING",
        "DELIVERED → RELEASED",
        "FIRST_TOKEN → FINISHED",
    ):
        assert words in out, out
    code, out, err = unknown
    assert (code, out, err) == (1, "", "pdmesh: error: nobody knows a request nobody\n")


async def test_explain_a_failed_attempt(scripted: Scripted) -> None:
    """The request goes on; what became of its first attempt can still be told."""
    scripted.script.on("fail")
    asking = scripted.asker.start(random_prompt(40, 1), max_tokens=8, ignore_eos=True)

    async def tried_again() -> bool:
        return any(move["attempt"] > 0 for move in await scripted.asker.moves(asking.request_id))

    await until_async(tried_again, TIMEOUT, lambda: str(asking.answer))
    scripted.script.release()
    assert (await asking.whole()).ok, asking.answer
    code, out, _ = await pdmesh(scripted.mesh, "explain", asking.request_id, "--json")
    moves = json.loads(out)["moves"]
    assert code == 0 and [m["unix_seconds"] for m in moves] == sorted(m["unix_seconds"] for m in moves)
    moves = [m for m in moves if m["attempt"] == 0]
    last = {machine: [m for m in moves if m["machine"] == machine][-1] for machine in {m["machine"] for m in moves}}
    assert {last[name]["to"] for name in ("decode_request", "prefill_request")} == {"FAILED"}
    assert last["router_request"]["to"] in ("REPLANNED", "RESUMING")
    for name in ("router_request", "decode_request", "prefill_request"):
        assert "push failed" in last[name]["reason"], last[name]
    assert last["transfer_session"]["to"] == "QUIET"
    assert when(moves, "prefill-0", "prefill_request", "FAILED") < when(moves, "decode-0", "decode_request", "FAILED")
    assert way(moves, "decode-0", "transfer_session")[-2:] == ["ABORTING", "QUIET"]


# ---- metrics and health -------------------------------------------------------------------------------


async def scrape(http: httpx.AsyncClient) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Samples by name."""
    response = await http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(response.text):
        assert family.documentation and family.type in ("counter", "gauge", "histogram"), family
        for sample in family.samples:
            found.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    return found


async def test_metrics(llama: Served, http: httpx.AsyncClient) -> None:
    def value(samples: dict[str, list[tuple[dict[str, str], float]]], name: str, **labels: str) -> float:
        return sum(v for found, v in samples.get(name, []) if labels.items() <= found.items())

    await llama.mesh.quiet()
    await llama.asker.router_idle()
    before = await scrape(http)
    for turn, stream in ((1, True), (2, False)):
        await llama.asker.complete(random_prompt(50, turn), max_tokens=5, ignore_eos=True, stream=stream)
    assert (await http.post("/v1/completions", json={"model": "default", "prompt": []})).status_code == 400
    pairs_now = {rank["instance"]: rank["pairs"][0] for rank in await llama.mesh.quiet() if rank["role"] == "PREFILL"}
    bytes_now, failures_now = ({name: p[what] for name, p in pairs_now.items()} for what in ("bytes", "failures"))

    async def asked_anew() -> bool:  # workers are asked every two seconds
        after.update(await scrape(http))
        return all(value(after, "pdmesh_transfer_bytes_total", worker=n) == b for n, b in bytes_now.items())

    after: dict[str, list[tuple[dict[str, str], float]]] = {}
    await until_async(asked_anew, TIMEOUT, lambda: f"{after.get('pdmesh_transfer_bytes_total')}, {bytes_now} were due")

    def grown(name: str, **labels: str) -> float:
        return value(after, name, **labels) - value(before, name, **labels)

    assert grown("pdmesh_router_requests_total", path="/v1/completions", end="ok") == 2
    assert grown("pdmesh_router_requests_total", path="/v1/completions", end="invalid") == 1
    assert grown("pdmesh_router_samples_total", finish_reason="length", path="pd") == 2
    assert grown("pdmesh_router_prompt_tokens_total") == 100
    assert grown("pdmesh_router_output_tokens_total") == 10
    for name, count in (("time_to_first_token", 2), ("inter_token_latency", 8), ("request", 2)):
        assert grown(f"pdmesh_router_{name}_seconds_count") == count, name
        assert grown(f"pdmesh_router_{name}_seconds_sum") > 0
        assert grown(f"pdmesh_router_{name}_seconds_bucket", le="+Inf") == count
    assert value(after, "pdmesh_router_in_flight") == value(after, "pdmesh_router_queued") == 0
    for name, role in WORKERS.items():
        own = {"worker": name, "role": role, "dp": "0"}
        assert value(after, "pdmesh_worker_up", **own) == 1
        for gauge in ("running", "queued", "sessions"):
            assert ({**own}, 0.0) in after[f"pdmesh_worker_{gauge}"]
        states = {labels["state"]: v for labels, v in after["pdmesh_kv_blocks"] if labels["worker"] == name}
        assert set(states) == set(KV) and sum(states.values()) == 1024
    for name, transport in (("prefill-0", "shm"), ("prefill-1", "tcp")):
        pair = {"worker": name, "peer": "decode-0", "transport": transport}
        assert value(after, "pdmesh_transfer_bytes_total", **pair) == bytes_now[name]
        assert value(after, "pdmesh_transfer_seconds_total", **pair) > 0
        assert value(after, "pdmesh_transfer_failures_total", **pair) == failures_now[name]


async def test_small_routes(llama: Served, http: httpx.AsyncClient) -> None:
    async def get(path: str) -> Any:
        response = await http.get(path)
        assert response.status_code == 200
        return response.json()

    assert await get("/health") == await get("/liveness") == {"status": "ok"}
    assert await get("/readiness") == {"status": "ready"}
    assert set(await get("/version")) == {"version"}
    await llama.asker.router_idle()
    models = await get("/v1/models")
    (card,) = models["data"]
    assert models["object"] == "list" and (card["id"], card["object"]) == (llama.model.name, "model")
    assert card["max_model_len"] == 4096 and type(card["created"]) is int
    assert await get(f"/v1/models/{card['id']}") == card
    workers = await get("/workers")
    assert workers["synced"] and workers["in_contact"] and workers["revision"]["n"] > 0
    ranks = {rank["instance"]: rank for rank in (await llama.mesh.status())["ranks"]}
    assert {w["instance"] for w in workers["workers"]} == set(ranks)
    for worker in workers["workers"]:
        rank = ranks[worker["instance"]]
        for name in (
            "role",
            "dp",
            "cp",
            "tp",
            "endpoint",
            "incarnation",
            "pid",
            "engine_pid",
            "host",
            "state",
            "fingerprint",
        ):
            assert worker[name] == rank[name], name
        assert set(worker["load"]) == set(rank["load"]) and set(worker["kv"]) == set(rank["kv"])
        assert worker["in_flight"] == 0
    described = await get("/openapi.json")
    assert {"/v1/completions", "/v1/chat/completions", "/generate", "/metrics"} <= set(described["paths"])


# ---- gRPC without protos ------------------------------------------------------------------------------


def look(mesh: Mesh, process: str) -> None:
    """Health and reflection of one process, as a client sees it that has no protos."""
    main = SERVICES[process]
    with Reflected(mesh.endpoint(process)) as server:
        names = server.services()
        assert {main, HEALTH, REFLECTION} <= names
        for name in names:
            assert server.methods(name), name
        for name in (*(names - {REFLECTION, HEALTH}), ""):
            assert server.call(HEALTH, "Check", {"service": name}) == {"status": "SERVING"}, name
        with pytest.raises(grpc.RpcError) as caught:
            server.call(HEALTH, "Check", {"service": "nobody"})
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        if process == "bootstrap":
            table = server.call(main, "GetRankTable")
            assert {row["instance"]["name"] for row in table["rows"]} == set(WORKERS)
        else:
            stats = server.call("pdmesh.common.v1.WorkerService", "GetStats")
            assert (stats["instance"], stats["pid"]) == (process, mesh.pid(process))


@pytest.mark.parametrize("process", SERVICES)
async def test_health_and_reflection(llama: Served, process: str) -> None:
    await asyncio.to_thread(look, llama.mesh, process)
    if BUF.exists():  # what the README shows; `make check` installs it
        endpoint = f"http://{llama.mesh.endpoint(process)}"
        options = ("curl", "--protocol", "grpc", "--http2-prior-knowledge")
        check = ("-d", json.dumps({"service": SERVICES[process]}), f"{endpoint}/{HEALTH}/Check")
        listed, checked = await asyncio.gather(
            run(BUF, *options, "--list-services", endpoint), run(BUF, *options, *check)
        )
        assert listed[0] == 0 and {SERVICES[process], HEALTH} <= set(listed[1].split()), listed
        assert json.loads(checked[1]) == {"status": "SERVING"}, checked


# ---- profiles -----------------------------------------------------------------------------------------


async def test_a_profile_of_some_steps(llama: Served) -> None:
    async with grpc.aio.insecure_channel(llama.mesh.endpoint("decode-0")) as channel:
        stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)
        path = Path((await stub.StartProfile(worker_pb2.StartProfileRequest(steps=3), timeout=20.0)).path)
        try:
            await llama.asker.generate(random_prompt(30, 1), max_tokens=8, ignore_eos=True)

            async def written() -> bool:
                return path.exists() and path.stat().st_size > 0

            await until_async(written, TIMEOUT, lambda: f"{path} is not there")
            stopped = await stub.StopProfile(worker_pb2.StopProfileRequest(), timeout=20.0)
            assert stopped.path == str(path) and os.path.basename(path).startswith("decode-0-")
            await llama.mesh.quiet()  # the engine answers again: the file is whole
            events = json.loads(path.read_text())["traceEvents"]
            assert sum(event.get("cat") == "cpu_op" for event in events) > 30
        finally:
            shutil.rmtree(path.parent)


async def test_doctor(llama: Served) -> None:
    await llama.asker.generate(random_prompt(20, 77), max_tokens=2)  # a pair has met
    code, out, err = await pdmesh(llama.mesh, "doctor", "--json")
    report = json.loads(out)
    of_mesh = [f for f in report["findings"] if f["area"] in ("bootstrap", "workers", "versions", "pairs", "router")]
    assert (code, err, {f["level"] for f in of_mesh}) == (0, "", {"ok"}), of_mesh
    told = [f["what"] for f in of_mesh]
    assert told[0] == f"{llama.mesh.bootstrap} answers and knows 3 workers"
    assert told[-1] == f"{llama.mesh.url.removeprefix('http://')} is ready"
