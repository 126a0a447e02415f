"""What only a broken or hostile peer says: gRPC by hand to workers and Bootstrap.

Each call ends with a status and details, or in order; engines, blocks and the pair's link are as before.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_core.transfer.handshake import CHALLENGE_BYTES
from pdmesh.bootstrap.v1 import bootstrap_service_pb2 as pb
from pdmesh.bootstrap.v1 import rank_table_pb2
from pdmesh.common.v1 import identity_pb2, worker_pb2
from pdmesh.prefill.v1 import prefill_service_pb2
from pdmesh.transfer.v1 import kv_layout_pb2, ticket_pb2, transfer_service_pb2
from tests.support.asking import Asker, random_prompt, until_async
from tests.support.bad_requests import VOCABULARY
from tests.support.mesh import Mesh
from tests.support.raw import TIMEOUT, Raw, coord, descriptor, sampling, session, shard, unharmed
from tests.support.spoilt import spoilt

pytestmark = pytest.mark.asyncio(loop_scope="session")

POOL_TOKENS = 256
"""Of small_mesh."""

INVALID, FENCED, GONE, UNKNOWN = "INVALID_ARGUMENT", "FAILED_PRECONDITION", "UNAVAILABLE", "NOT_FOUND"
NAN = float("nan")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def raw(small_mesh: Mesh) -> AsyncIterator[Raw]:
    async with Raw.of(small_mesh) as made:
        yield made


async def test_generate_refuses_nonsense(small_mesh: Mesh, raw: Raw) -> None:
    ref = raw.prefill_ref
    requests: list[tuple[dict[str, Any], str]] = [
        ({"session": None}, "request.session.room"),
        ({"session": session(-1)}, "request.session.room"),
        ({"session": session(5, -1)}, "request.session.attempt"),
        ({"prompt_token_ids": []}, "request.prompt_token_ids"),
        ({"prompt_token_ids": [5, -1]}, "request.prompt_token_ids"),
        ({"prompt_token_ids": [VOCABULARY]}, "prompt_token_ids"),
        ({"prompt_token_ids": [5] * (POOL_TOKENS + 1)}, "prompt_token_ids"),
        ({"prompt_token_ids": [5] * 500_000}, "prompt_token_ids"),
        ({"emitted_token_ids": [2**31 - 1]}, "emitted_token_ids"),
        ({"emitted_token_ids": [5, 5]}, "request.emitted_token_ids"),
        ({"arrival_unix_ms": -1}, "request.arrival_unix_ms"),
        ({"request_id": "x" * 513}, "request.request_id"),
        ({"cache_salt": "x" * 257}, "request.cache_salt"),
        ({"prompt_token_ids": bytes(2**22 + 1)}, "request.prompt_token_ids"),
        ({"sampling": sampling(stop_token_ids=bytes(4097))}, "request.sampling.stop_token_ids"),
        ({"sampling": None}, "request.sampling.max_tokens"),
        ({"sampling": sampling(max_tokens=-5)}, "request.sampling.max_tokens"),
        ({"sampling": sampling(min_tokens=3)}, "request.sampling.min_tokens"),
        ({"sampling": sampling(temperature=NAN)}, "request.sampling.temperature"),
        ({"sampling": sampling(temperature=float("inf"))}, "request.sampling.temperature"),
        ({"sampling": sampling(top_p=NAN)}, "request.sampling.top_p"),
        ({"sampling": sampling(top_k=-1)}, "request.sampling.top_k"),
        ({"sampling": sampling(min_p=NAN)}, "request.sampling.min_p"),
        ({"sampling": sampling(stop_token_ids=[-1])}, "request.sampling.stop_token_ids"),
        ({"sampling": sampling(min_tokens=2, stop_token_ids=range(VOCABULARY))}, "stop_token_ids"),
        ({"sampling": sampling(logprobs=21)}, "request.sampling.logprobs"),
        ({"sampling": sampling(prompt_logprobs=-1)}, "request.sampling.prompt_logprobs"),
        ({"sampling": sampling(logit_bias={-5: 1.0})}, "request.sampling.logit_bias"),
        ({"sampling": sampling(logit_bias={VOCABULARY: 1.0})}, "logit_bias"),
        ({"sampling": sampling(repetition_penalty=0.0)}, "request.sampling.repetition_penalty"),
        ({"sampling": sampling(frequency_penalty=NAN)}, "request.sampling.frequency_penalty"),
        ({"sampling": sampling(grammar={"kind": 9, "text": "x"})}, "request.sampling.grammar.kind"),
        ({"sampling": sampling(grammar={"kind": 1})}, "request.sampling.grammar.text"),
        ({"sampling": sampling(grammar={"kind": 2, "text": "("})}, "grammar"),
    ]
    async with unharmed(small_mesh):
        for spoilt, field in requests:
            refusal = await raw.refused(
                raw.decode.Generate(raw.generate(request=raw.request(**spoilt)), timeout=TIMEOUT)
            )
            assert refusal.short == (INVALID, field), spoilt
        calls: list[tuple[dict[str, Any], str, str]] = [
            ({"request": None}, INVALID, "request.session.room"),
            ({"request": raw.request(fingerprint="x")}, FENCED, "fingerprint"),
            ({"decode_incarnation": -5}, FENCED, "INCARNATION_MISMATCH"),
            ({"prefill": None}, INVALID, "prefill"),
            ({"prefill": identity_pb2.PeerRef()}, INVALID, "prefill.incarnation"),
            (
                {"prefill": identity_pb2.PeerRef(endpoint="x" * 100_000, incarnation=ref.incarnation)},
                INVALID,
                "prefill.endpoint",
            ),
            ({"prefill": identity_pb2.PeerRef(endpoint="x" * 512, incarnation=ref.incarnation)}, GONE, "PEER_UNKNOWN"),
            ({"prefill": identity_pb2.PeerRef(endpoint=ref.endpoint, incarnation=77)}, FENCED, "INCARNATION_MISMATCH"),
        ]
        refusals = await asyncio.gather(
            *(raw.refused(raw.decode.Generate(raw.generate(**spoilt), timeout=TIMEOUT)) for spoilt, _, _ in calls)
        )
        assert [refusal.short for refusal in refusals] == [(code, why) for _, code, why in calls]
        twice = raw.generate()
        assert [part async for part in raw.decode.Generate(twice, timeout=TIMEOUT)][-1].HasField("finished")
        assert (await raw.refused(raw.decode.Generate(twice, timeout=TIMEOUT))).short == (FENCED, "STALE_ATTEMPT")


async def test_prefill_streams_out_of_order(small_mesh: Mesh, raw: Raw) -> None:
    alone = {"without_transfer": True}
    cases: list[tuple[list[Any], str, str]] = [
        ([], INVALID, "open"),
        ([prefill_service_pb2.PrefillRequest()], INVALID, "open"),
        ([raw.ticket()], INVALID, "open"),
        ([raw.open(request=None)], INVALID, "request.session.room"),
        ([raw.open(prefill_incarnation=5)], FENCED, "INCARNATION_MISMATCH"),
        ([raw.open(decode_incarnation=5)], GONE, "PEER_UNKNOWN"),
        ([raw.open(decode_incarnation=raw.row.incarnation)], FENCED, "LINK_OF_OTHER_PEER"),
        ([raw.open(link_proof=bytes(32))], FENCED, "link_proof"),
        ([raw.open(link_id=0)], GONE, "LINK_DOWN"),
        ([raw.open(link_id=-1)], GONE, "LINK_DOWN"),
        ([raw.open(request=raw.request(prompt_token_ids=[VOCABULARY]), **alone)], INVALID, "prompt_token_ids"),
        (
            [raw.open(request=raw.request(sampling=sampling(grammar={"kind": 2, "text": "("})), **alone)],
            INVALID,
            "grammar",
        ),
        ([raw.open(), raw.open()], INVALID, "open"),
        ([raw.open()], INVALID, "ticket"),
        ([raw.open(), prefill_service_pb2.PrefillRequest()], INVALID, "empty"),
    ]
    async with unharmed(small_mesh):
        for messages, code, why in cases:
            refusal = await raw.refused(raw.stream(*messages, after_start=len(messages) > 1))
            assert refusal.short == (code, why), messages
        # The engine must not find out about the first ticket before the second is read.
        engine = (await small_mesh.rank("prefill-0"))["engine_pid"]
        twice = raw.stream(raw.open(), raw.ticket(100), raw.ticket(), after_start=True, still=engine)
        assert (await raw.refused(twice)).short == (INVALID, "ticket")
        silent = raw.prefill.Prefill()
        late = raw.prefill.Prefill(timeout=0.2)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await late.read()
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        silent.cancel()
        waiting = raw.prefill.Prefill(timeout=TIMEOUT)  # STARTED, and then nothing
        await waiting.write(raw.open())
        assert (await waiting.read()).HasField("started")
        waiting.cancel()


async def test_tickets_are_not_believed(small_mesh: Mesh, raw: Raw) -> None:
    blocks = "ticket.shards[0].groups[0].block_ids"
    tickets: list[tuple[Any, str, str]] = [
        (prefill_service_pb2.PrefillRequest(ticket=ticket_pb2.Ticket()), INVALID, "ticket.num_tokens"),
        (raw.ticket(shards=[]), INVALID, "ticket"),
        (raw.ticket(link_id=raw.link_id + 1), INVALID, "ticket"),
        (raw.ticket(0), INVALID, blocks),
        (raw.ticket(-7), INVALID, blocks),
        (raw.ticket(5, 5), INVALID, blocks),
        (raw.ticket(5, 6), INVALID, "ticket"),
        (raw.ticket(*range(1, 300_000)), INVALID, "ticket"),
        (raw.ticket(POOL_TOKENS // 16 + 1), GONE, "PUSH_FAILED"),
        (raw.ticket(2**31 - 1), GONE, "PUSH_FAILED"),
        (raw.ticket(shards=[shard(5), shard(6, tp=1)]), INVALID, "ticket"),
        (raw.ticket(shards=[shard(5), shard(6)]), INVALID, "ticket.shards"),
        (raw.ticket(shards=[shard(5, group=1)]), INVALID, "ticket"),
        (raw.ticket(shards=[shard(5, group=-1)]), INVALID, "ticket.shards[0].groups[0].group_id"),
        (raw.ticket(shards=[shard(5, tp=-1)]), INVALID, "ticket.shards[0].coord.tp"),
        (raw.ticket(first_token=-16), INVALID, "ticket.first_token"),
        (raw.ticket(first_token=16), INVALID, "ticket.first_token"),
        (raw.ticket(first_token=1), INVALID, "ticket"),
        (raw.ticket(first_token=3), INVALID, "ticket"),
        (raw.ticket(num_tokens=4), INVALID, "ticket"),
    ]
    async with unharmed(small_mesh):
        for ticket, code, why in tickets:
            refusal = await raw.refused(raw.stream(raw.open(), ticket, after_start=True))
            assert refusal.short == (code, why), str(ticket)[:200]


async def test_blocks_of_others_are_not_written(small_mesh: Mesh, raw: Raw) -> None:
    """Tickets that decode never sent name all its blocks, cached ones too: their text stays what it was.

    What comes over the caller's own link goes to the caller's own pool, and nowhere else.
    """
    prompt, count = random_prompt(100, 7), POOL_TOKENS // 16
    async with unharmed(small_mesh), Asker(small_mesh) as asker:
        first = await asker.generate(prompt, cache_salt="kept")
        theft = raw.request(prompt_token_ids=random_prompt(POOL_TOKENS - 1, 8))
        as_decode = raw.open(request=theft, decode_incarnation=raw.row.incarnation)
        assert (await raw.refused(raw.stream(as_decode))).error.reason == "LINK_OF_OTHER_PEER"
        ticket = raw.ticket(*range(1, count + 1), num_tokens=POOL_TOKENS - 1)
        refusal = await raw.refused(raw.stream(raw.open(request=theft), ticket, after_start=True))
        assert refusal.short == (GONE, "PUSH_FAILED") and "took 0 of" in refusal.error.message
        assert not raw.own.pool.any()
        before = await asker.counters("decode-0")
        again = await asker.generate(prompt, cache_salt="kept")
        hits = (await asker.counters("decode-0"))["prefix_hit_tokens"] - before["prefix_hit_tokens"]
        assert (hits, again.ids) == (96, first.ids)  # decode took them from its cache


async def test_negotiation_refuses_nonsense(small_mesh: Mesh, raw: Raw) -> None:
    good, numbers = raw.row.layout, iter(range(1000, 1060))

    def rank(*descriptors: Any, **spoilt: Any) -> dict[str, Any]:
        layout = kv_layout_pb2.KvLayout()
        layout.CopyFrom(good)
        for name, value in spoilt.items():
            setattr(layout if name in ("region_bytes", "tp_size", "cp_size") else layout.groups[0], name, value)
        offered = descriptors or raw.row.descriptors
        endpoint = transfer_service_pb2.RankEndpoint(coord=coord(0), layout=layout, descriptors=offered)
        return {"ranks": [endpoint], "decode_incarnation": next(numbers)}

    for number in range(1000, 1060):  # each a worker with no link yet
        await raw.join(f"raw-{number}", number)

    where = "ranks[0].layout"
    grpc_port = raw.row.endpoint
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"decode_incarnation": 0}, INVALID, "decode_incarnation"),
        ({"decode_incarnation": -5}, INVALID, "decode_incarnation"),
        ({"decode_instance": ""}, INVALID, "decode_instance"),
        ({"decode_instance": "x" * 300}, INVALID, "decode_instance"),
        ({"prefill_incarnation": 5}, FENCED, "INCARNATION_MISMATCH"),
        ({"fingerprint": ""}, INVALID, "fingerprint"),
        ({"pair_secret": b""}, INVALID, "pair_secret"),
        ({"pair_secret": bytes(33)}, INVALID, "pair_secret"),
        ({"pair_secret": bytes(32)}, FENCED, "LINK_OF_OTHER_PEER"),
        ({"decode_incarnation": raw.row.incarnation}, FENCED, "LINK_OF_OTHER_PEER"),
        ({"decode_incarnation": 999}, GONE, "PEER_UNKNOWN"),
        ({"fingerprint": "x"}, FENCED, "fingerprint"),
        ({"transport": "x" * 33}, INVALID, "transport"),
        ({"transport": "pigeon", **rank()}, GONE, "LINK_DOWN"),
        ({"ranks": []}, INVALID, "ranks"),
        ({"ranks": rank()["ranks"] * 9}, INVALID, "ranks"),
        ({"ranks": [transfer_service_pb2.RankEndpoint()]}, INVALID, "ranks[0].descriptors"),
        (rank(*[descriptor("shm")] * 17), INVALID, "ranks[0].descriptors"),
        (rank(descriptor("")), INVALID, "ranks[0].descriptors[0].transport"),
        (rank(descriptor("tcp", "x:1", b"n" * 257)), INVALID, "ranks[0].descriptors[0].nonce"),
        (rank(tp_size=0), INVALID, f"{where}.tp_size"),
        (rank(region_bytes=-1), INVALID, f"{where}.region_bytes"),
        (rank(num_heads=0), INVALID, f"{where}.groups[0].num_heads"),
        (rank(num_blocks=2**62), INVALID, f"{where}.groups[0].num_blocks"),
        (rank(num_blocks=2**31 - 1), INVALID, f"{where}.groups[0]"),
        (rank(offset=2**63 - 1, region_bytes=2**63 - 1), INVALID, f"{where}.groups[0]"),
        (rank(kv_size=3), INVALID, f"{where}.groups[0].kv_size"),
        (rank(dtype="complex1024"), INVALID, f"{where}.groups[0].dtype"),
        (rank(dim_order="X" * 65), INVALID, f"{where}.groups[0].dim_order"),
        (rank(dim_order="HS_NB"), GONE, "LINK_DOWN"),
        (rank(num_layers=2), GONE, "LINK_DOWN"),
        (rank(), GONE, "LINK_DOWN"),  # decode is another incarnation than that
        (rank(descriptor("pigeon", "x")), GONE, "LINK_DOWN"),
        *((rank(descriptor("tcp", f"{host}:{port}")), GONE, "LINK_DOWN") 
          for host in ("127.0.0.1", "a..b", "a\0b", "é" * 99) for port in ("", "-1", "0", "99999", "9" * 300, "x")),
        (rank(descriptor("tcp", grpc_port)), GONE, "LINK_DOWN"),
        (rank(descriptor("shm", "/etc/passwd")), GONE, "LINK_DOWN"),
    ]  # fmt: skip
    async with unharmed(small_mesh):
        for spoilt, code, why in cases:
            refusal = await raw.refused(raw.transfer.NegotiateLayout(raw.negotiate(**spoilt), timeout=TIMEOUT))
            assert refusal.short == (code, why), spoilt
        assert (await raw.transfer.NegotiateLayout(raw.negotiate(), timeout=TIMEOUT)).link_id == raw.link_id
        for spoilt, code, why in (
            ({"link_id": -4}, UNKNOWN, "link_id"),
            ({"sessions": [session(-4)]}, INVALID, "sessions[0].room"),
            ({"sessions": [session(4)] * 100_001}, INVALID, "sessions"),
        ):
            quiesce = transfer_service_pb2.QuiesceRequest(**spoilt)
            assert (await raw.refused(raw.transfer.Quiesce(quiesce, timeout=TIMEOUT))).short == (code, why)


# ---- workers and Bootstrap ----------------------------------------------------------------------------


async def test_workers_and_bootstrap_refuse_nonsense(small_mesh: Mesh, raw: Raw) -> None:
    boot, spec = raw.bootstrap, raw.row.instance
    row = rank_table_pb2.RankRow(instance=spec, endpoint="x:1", incarnation=5)
    huge = rank_table_pb2.InstanceSpec(name="x", role=1, dp_size=4096, cp_size=4096, tp_size=1, fingerprint="f")
    unknown = rank_table_pb2.InstanceSpec(name="x", role=77)
    calls: list[tuple[Any, Any, str, str]] = [
        (boot.RegisterInstance, pb.RegisterInstanceRequest(), INVALID, "incarnation"),
        (boot.RegisterInstance, pb.RegisterInstanceRequest(instance=unknown, incarnation=5), INVALID, "instance.role"),
        (boot.RegisterInstance, pb.RegisterInstanceRequest(instance=huge, incarnation=5), INVALID, "instance"),
        (boot.RegisterRank, pb.RegisterRankRequest(), INVALID, "row.instance.name"),
        (boot.RegisterRank, pb.RegisterRankRequest(row=row), FENCED, "FENCED"),  # decode-0 has it
        (boot.RegisterRank, pb.RegisterRankRequest(row=row, ttl_seconds=NAN), INVALID, "ttl_seconds"),
        (boot.RenewLease, pb.RenewLeaseRequest(lease_id=-1), UNKNOWN, "lease_id"),
        (boot.RenewLease, pb.RenewLeaseRequest(load=worker_pb2.Load(running=-1)), INVALID, "load.running"),
        (boot.Drain, pb.DrainRequest(lease_id=2**63 - 1), UNKNOWN, "lease_id"),
        (boot.Deregister, pb.DeregisterRequest(incarnation=-1), UNKNOWN, "lease_id"),
        (boot.RecordRooms, pb.RecordRoomsRequest(rooms=[rank_table_pb2.RoomRoute()]), INVALID, "rooms[0].room"),
        (boot.RecordRooms, pb.RecordRoomsRequest(rooms=[rank_table_pb2.RoomRoute(room=1)] * 100_001), INVALID, "rooms"),
        (boot.LookupRooms, pb.LookupRoomsRequest(rooms=range(100_001)), INVALID, "rooms"),
        (boot.LookupRooms, pb.LookupRoomsRequest(request_ids=["x", "x" * 513]), INVALID, "request_ids[1]"),
        (boot.RouteRoom, pb.RouteRoomRequest(room=-1), INVALID, "room"),
    ]
    for name in ("prefill-0", "decode-0"):
        stub = raw.worker(name)
        calls += [
            (stub.Explain, worker_pb2.ExplainRequest(rooms=range(10_001)), INVALID, "rooms"),
            (stub.Explain, worker_pb2.ExplainRequest(rooms=[5, -1]), INVALID, "rooms[1]"),
            (stub.StartProfile, worker_pb2.StartProfileRequest(steps=-1), INVALID, "steps"),
            (stub.StartProfile, worker_pb2.StartProfileRequest(steps=2**31 - 1), INVALID, "steps"),
        ]
    after = rank_table_pb2.Revision(table_epoch=-1)
    async with unharmed(small_mesh):
        for method, request, code, why in calls:
            assert (await raw.refused(method(request, timeout=TIMEOUT))).short == (code, why), str(request)[:200]
        watch = boot.WatchRankTable(pb.WatchRankTableRequest(after=after), timeout=TIMEOUT)
        assert (await raw.refused(watch)).short == (INVALID, "after.table_epoch")
        # A revision of another life is answered by a snapshot.
        after = rank_table_pb2.Revision(table_epoch=2**63 - 1, n=2**63 - 1)
        watch = boot.WatchRankTable(pb.WatchRankTableRequest(after=after), timeout=TIMEOUT)
        rows = (await watch.read()).snapshot.rows
        assert {"prefill-0", "decode-0", "raw"} <= {row.instance.name for row in rows}
        watch.cancel()
        # Services that are not there.
        for name, path in (("prefill-0", "pdmesh.decode.v1.DecodeService/Generate"), ("bootstrap", "x/y")):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await raw.channels[name].unary_unary(f"/{path}")(b"", timeout=TIMEOUT)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_garbage_on_the_kv_sockets(small_mesh: Mesh, raw: Raw) -> None:
    addresses = {d.transport: d.address for d in raw.row.descriptors}
    async with unharmed(small_mesh), Asker(small_mesh) as asker:
        for garbage in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100_000, bytes(64)):
            host, _, port = addresses["tcp"].rpartition(":")
            for connect in (
                lambda host=host, port=port: asyncio.open_connection(host, int(port)),
                lambda: asyncio.open_unix_connection(addresses["shm"]),
            ):
                reader, writer = await connect()
                writer.write(garbage)
                with contextlib.suppress(OSError):  # the other end may have closed already
                    writer.write_eof()
                async with asyncio.timeout(TIMEOUT):
                    with contextlib.suppress(ConnectionError):
                        assert len(await reader.read()) == CHALLENGE_BYTES  # all that a stranger is told
                writer.close()
        assert (await asker.generate(random_prompt(40, 1))).transport == "tcp"


# ---- anything -----------------------------------------------------------------------------------------

KEPT = ("prefill", "decode_incarnation", "max_tokens", "decode_instance", "name", "role")
"""Fields that would make a worker wait a second for a peer, compute for long, or take a row that others look at."""

FINE = {"OK", INVALID, FENCED, GONE, UNKNOWN, "OUT_OF_RANGE", "RESOURCE_EXHAUSTED"}


@settings(max_examples=60, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
async def test_spoilt_messages(small_mesh: Mesh, raw: Raw, data: st.DataObject) -> None:
    row = rank_table_pb2.RankRow()
    row.CopyFrom(raw.row)
    row.instance.name, row.incarnation = "spoilt", 5
    boot, worker = raw.bootstrap, raw.worker("decode-0")
    load = worker_pb2.Load(running=1, kv=worker_pb2.KvUsage(total=1))
    adjusted = sampling(
        frequency_penalty=0.5, presence_penalty=0.5, repetition_penalty=1.5, logit_bias={5: 1.0}, logprobs=2,
        prompt_logprobs=1,
    )  # fmt: skip
    good: list[tuple[Any, Any]] = [
        (raw.decode.Generate, raw.generate()),
        (raw.decode.Generate, raw.generate(request=raw.request(sampling=adjusted))),
        (raw.prefill.Prefill, raw.open()),
        (raw.prefill.Prefill, raw.open(request=raw.request(sampling=adjusted), without_transfer=True)),
        (raw.prefill.Prefill, raw.ticket()),
        (raw.transfer.NegotiateLayout, raw.negotiate(decode_incarnation=1059)),
        (raw.transfer.Quiesce, transfer_service_pb2.QuiesceRequest(sessions=[session(5)])),
        (worker.Explain, worker_pb2.ExplainRequest(rooms=[5])),
        (boot.RegisterRank, pb.RegisterRankRequest(row=row, ttl_seconds=1.0)),
        (boot.RegisterInstance, pb.RegisterInstanceRequest(instance=row.instance, incarnation=5)),
        (boot.RenewLease, pb.RenewLeaseRequest(lease_id=5, incarnation=5, load=load)),
        (boot.RecordRooms, pb.RecordRoomsRequest(rooms=[rank_table_pb2.RoomRoute(room=5, request_id="x")])),
        (boot.LookupRooms, pb.LookupRoomsRequest(rooms=[5], request_ids=["x"])),
        (boot.RouteRoom, pb.RouteRoomRequest(room=5)),
    ]
    method, message = data.draw(st.sampled_from(good), "method")
    bad = data.draw(spoilt(message, KEPT), "message")
    if isinstance(bad, prefill_service_pb2.PrefillRequest):
        first = (
            [raw.open()]
            if isinstance(message, prefill_service_pb2.PrefillRequest) and message.HasField("ticket")
            else []
        )
        call: Any = raw.stream(*first, bad, after_start=bool(first))
    elif isinstance(bad, pb.RegisterRankRequest):
        call = raw.register(bad)
    else:
        call = method(bad, timeout=TIMEOUT)
    assert await raw.outcome(call) in FINE


METHODS = [
    ("bootstrap", "bootstrap.v1.BootstrapService", ("RegisterRank", "RenewLease", "RecordRooms"), "unary_unary"),
    ("bootstrap", "bootstrap.v1.BootstrapService", ("WatchRankTable",), "unary_stream"),
    ("prefill-0", "transfer.v1.TransferService", ("NegotiateLayout", "Quiesce"), "unary_unary"),
    ("prefill-0", "prefill.v1.PrefillService", ("Prefill",), "stream_stream"),
    ("decode-0", "decode.v1.DecodeService", ("Generate",), "unary_stream"),
    ("decode-0", "common.v1.WorkerService", ("GetStats", "Explain", "StartProfile"), "unary_unary"),
]


async def test_bytes_that_are_no_messages(small_mesh: Mesh, raw: Raw) -> None:
    garbage = (b"\xff", b"\xff\xff\xff\xff\xff", b"\x0a\xff", b"\x00" * 9, b"GET / HTTP/1.1")
    async with unharmed(small_mesh):
        for process, service, methods, kind in METHODS:
            for path in (f"/pdmesh.{service}/{method}" for method in methods):
                method = getattr(raw.channels[process], kind)(path)
                for data in garbage:
                    call = raw.stream(data, stub=method) if kind == "stream_stream" else method(data, timeout=TIMEOUT)
                    assert (await raw.refused(call)).code == INVALID
        opened = raw.open().SerializeToString()
        prefill = raw.channels["prefill-0"].stream_stream("/pdmesh.prefill.v1.PrefillService/Prefill")
        assert (await raw.refused(raw.stream(opened, b"\xff", stub=prefill))).code == INVALID


async def test_after_all_that_the_mesh_serves(small_mesh: Mesh, raw: Raw) -> None:
    await raw.give_back()

    async def only_real_rows() -> bool:
        ranks = (await small_mesh.status())["ranks"]
        found[:] = [
            r["instance"] for r in ranks if r["table_state"] == "READY" and r["instance"] not in small_mesh.pids
        ]
        return not found

    found: list[str] = []
    await until_async(only_real_rows, 60.0, lambda: f"rows of tests are still READY: {found}")
    async with Asker(small_mesh) as asker:
        answers = [await asker.generate(random_prompt(90, 3), max_tokens=8, ignore_eos=True) for _ in range(2)]
        assert [(a.path, a.transport, a.attempts, len(a.ids)) for a in answers] == [("pd", "tcp", 1, 8)] * 2
        assert answers[0].ids == answers[1].ids
    await small_mesh.quiet()
    for name in ("bootstrap", "prefill-0", "decode-0"):
        assert not [line for line in small_mesh.lines(name) if "Traceback" in line]
