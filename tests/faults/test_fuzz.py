"""Random and mutated bytes to every gRPC service and transfer socket of a running mesh, by strangers and insiders.

No process dies or logs a traceback, nothing is left of any call or link, and no block is written that the session
does not own. Seed 0 runs always; others, and more of each, among the slow tests.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio

from engine_core.kv.storage import KvRegion
from engine_core.transfer.handshake import (
    CHALLENGE_BYTES,
    CLAIM_BYTES,
    VERDICT_BYTES,
    Challenger,
    LinkSecrets,
    verdict,
)
from engine_core.transfer.wire import Abort, Data, Quiet, Ready, Received, Welcome, encode
from engine_core.types.ids import SessionId
from pdmesh.bootstrap.v1 import bootstrap_service_pb2 as pb
from pdmesh.bootstrap.v1 import rank_table_pb2
from pdmesh.common.v1 import worker_pb2
from pdmesh.transfer.v1 import transfer_service_pb2
from tests.support.asking import Asker, random_prompt
from tests.support.certificates import Files
from tests.support.fuzzing import (
    FalsePrefill,
    connected,
    hang_up,
    mutated,
    no_descriptor_left,
    passed,
    pool_digest,
    say,
)
from tests.support.mesh import Mesh
from tests.support.models import tiny_model
from tests.support.raw import TIMEOUT, Raw, descriptor, session, unharmed
from tests.support.transfer import PAIR_SECRET

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKEN = "a-token-of-this-mesh"
LONG = (pytest.mark.slow, pytest.mark.timeout(900))
SEEDS = [pytest.param(0, 1, id="seed-0"), *(pytest.param(s, 8, id=f"seed-{s}", marks=LONG) for s in range(1, 5))]
"""(seed, how many times as much)."""

FINE = {
    "OK", "INVALID_ARGUMENT", "FAILED_PRECONDITION", "UNAVAILABLE", "NOT_FOUND", "OUT_OF_RANGE", "RESOURCE_EXHAUSTED",
    "DEADLINE_EXCEEDED",
}  # fmt: skip
AT_ONCE = 8
PATIENCE = 1.0
"""Seconds after which a peer that lies hangs up: another try costs less than the greeting's own limit."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def raw(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Raw]:
    """A pair over tcp whose pools hold 256 tokens, and a caller that has the mesh's token."""
    files = Files(tmp_path_factory.mktemp("keys"))
    files.tokens(TOKEN)
    options = {**files.token_options, "kv_tokens": 256}
    mesh = Mesh(tiny_model("llama"), options=options, overrides={"prefill": {"transfer_backend": "tcp"}})
    async with mesh, Raw.of(mesh) as made:
        await serves(mesh)  # all channels and links of the mesh itself are there
        yield made
        await serves(mesh)


async def serves(mesh: Mesh) -> None:
    """Asserts that a prompt goes the whole way."""
    async with Asker(mesh) as asker:
        answer = await asker.generate(random_prompt(90, 3), max_tokens=8, ignore_eos=True)
        assert (answer.path, answer.transport, len(answer.ids)) == ("pd", "tcp", 8)


async def engine_pool(raw: Raw) -> str:
    """What decode-0's pool holds."""
    return pool_digest((await raw.mesh.rank("decode-0"))["engine_pid"])


# ---- gRPC -------------------------------------------------------------------------------------------


def messages(raw: Raw) -> list[tuple[str, str, str, bytes]]:
    """(process, method, kind, a good message) of all that an insider may call without changing the mesh."""
    row = rank_table_pb2.RankRow()
    row.CopyFrom(raw.row)
    row.instance.name, row.instance.fingerprint, row.instance.tokenizer_digest = "spoilt", "raw", "raw"
    row.incarnation, row.endpoint = 5, "127.0.0.1:1"
    load = worker_pb2.Load(running=1, kv=worker_pb2.KvUsage(total=1))
    announced = pb.RegisterInstanceRequest(instance=row.instance, incarnation=5)
    after, route = rank_table_pb2.Revision(n=1), rank_table_pb2.RoomRoute(room=5)
    boot, worker = "bootstrap.v1.BootstrapService", "common.v1.WorkerService"
    prefill, transfer = "prefill.v1.PrefillService", "transfer.v1.TransferService"
    calls: list[tuple[str, str, str, Any]] = [
        ("decode-0", "decode.v1.DecodeService/Generate", "unary_stream", raw.generate()),
        ("prefill-0", f"{prefill}/Prefill", "stream_stream", raw.open()),
        ("prefill-0", f"{prefill}/Prefill", "stream_stream", raw.ticket()),
        ("prefill-0", f"{transfer}/NegotiateLayout", "unary_unary", raw.negotiate()),
        ("prefill-0", f"{transfer}/Quiesce", "unary_unary", transfer_service_pb2.QuiesceRequest(sessions=[session(5)])),
        ("decode-0", f"{worker}/Explain", "unary_unary", worker_pb2.ExplainRequest(rooms=[5])),
        ("prefill-0", f"{worker}/GetStats", "unary_unary", worker_pb2.GetStatsRequest()),
        ("bootstrap", f"{boot}/RegisterRank", "unary_unary", pb.RegisterRankRequest(row=row, ttl_seconds=1.0)),
        ("bootstrap", f"{boot}/RegisterInstance", "unary_unary", announced),
        ("bootstrap", f"{boot}/RenewLease", "unary_unary", pb.RenewLeaseRequest(lease_id=5, incarnation=5, load=load)),
        ("bootstrap", f"{boot}/Drain", "unary_unary", pb.DrainRequest(lease_id=5, incarnation=5)),
        ("bootstrap", f"{boot}/Deregister", "unary_unary", pb.DeregisterRequest(lease_id=5, incarnation=5)),
        ("bootstrap", f"{boot}/WatchRankTable", "unary_stream", pb.WatchRankTableRequest(after=after)),
        ("bootstrap", f"{boot}/RecordRooms", "unary_unary", pb.RecordRoomsRequest(rooms=[route])),
        ("bootstrap", f"{boot}/LookupRooms", "unary_unary", pb.LookupRoomsRequest(rooms=[5], request_ids=["x"])),
        ("bootstrap", f"{boot}/RouteRoom", "unary_unary", pb.RouteRoomRequest(room=5)),
    ]  # fmt: skip
    return [(process, method, kind, message.SerializeToString()) for process, method, kind, message in calls]


async def outcome(raw: Raw, process: str, method: str, kind: str, data: bytes, first: bytes = b"") -> str:
    """How a call with these bytes ends."""
    call: Any = getattr(raw.channels[process], kind)(f"/pdmesh.{method}")
    if kind == "stream_stream":
        return await raw.outcome(raw.stream(*([first] if first else []), data, after_start=bool(first), stub=call))
    if not method.endswith("WatchRankTable"):
        return await raw.outcome(call(data, timeout=TIMEOUT))
    watch = call(data, timeout=TIMEOUT)  # has no end of its own
    ended = await raw.outcome(watch.read())
    watch.cancel()
    return ended


@pytest.mark.parametrize(("seed", "times"), SEEDS)
async def test_grpc_services_take_any_bytes(raw: Raw, seed: int, times: int) -> None:
    rng, gate, seen = random.Random(seed), asyncio.Semaphore(AT_ONCE), dict.fromkeys(FINE, 0)
    good = messages(raw)

    async def one(number: int) -> None:
        process, method, kind, data = good[number % len(good)]
        is_ticket = kind == "stream_stream" and data == raw.ticket().SerializeToString()
        bad = rng.randbytes(rng.randint(0, 300)) if rng.random() < 0.2 else mutated(rng, data)
        async with gate:
            ended = await outcome(raw, process, method, kind, bad, raw.open().SerializeToString() if is_ticket else b"")
        assert ended in FINE, f"{method} with {bad.hex()} ended in {ended}"
        seen[ended] += 1

    async with unharmed(raw.mesh), no_descriptor_left(raw), Asker(raw.mesh) as asker:
        prompt = random_prompt(100, seed)
        before = await asker.generate(prompt, cache_salt="kept")
        await asyncio.gather(*(one(number) for number in range(12 * times * len(good))))
        assert (await asker.generate(prompt, cache_salt="kept")).ids == before.ids
    assert seen["INVALID_ARGUMENT"] > 20 and seen["OK"] > 5  # both sides of the checks were reached
    assert not raw.own.pool.any()


async def test_strangers_get_no_further_than_the_token(raw: Raw) -> None:
    """Not even as far as being read: bytes that are no message are refused for the token."""
    rng = random.Random(1)
    async with unharmed(raw.mesh, untouched=True), no_descriptor_left(raw):
        for name, method, kind, data in messages(raw):
            await refused_for_the_token(raw, name, method, kind, (data, mutated(rng, data), rng.randbytes(50)))


async def refused_for_the_token(raw: Raw, name: str, method: str, kind: str, sent: Sequence[bytes]) -> None:
    async with grpc.aio.insecure_channel(raw.mesh.endpoint(name)) as channel:
        call: Any = getattr(channel, kind)(f"/pdmesh.{method}")
        for data in sent:
            made = call(timeout=TIMEOUT) if kind == "stream_stream" else call(data, timeout=TIMEOUT)
            refusal = await raw.refused(made if kind != "unary_unary" else _awaited(made))
            assert (refusal.code, refusal.error.reason) == ("UNAUTHENTICATED", "TOKEN_MISSING")


async def _awaited(call: Awaitable[Any]) -> Any:
    return await call


# ---- sockets that take links --------------------------------------------------------------------------


def handshakes(insider: FalsePrefill, rng: random.Random, kind: str, sock: socket.socket) -> None:
    """One spoilt way through the handshake; it may be in order up to any point."""
    link_id = rng.randrange(1, 1 << 62)
    claimant = insider.claimant(link_id)
    match rng.randrange(6):
        case 0:
            say(sock, rng.randbytes(rng.randint(0, 2 * CLAIM_BYTES)))
        case 1:
            say(sock, mutated(rng, claimant.answer(sock.recv(CHALLENGE_BYTES, socket.MSG_WAITALL))))
        case 2:
            claim = claimant.answer(sock.recv(CHALLENGE_BYTES, socket.MSG_WAITALL))
            say(sock, claim[: rng.randrange(len(claim))])
        case 3:  # everything at once, without waiting for an answer
            claim = claimant.answer(sock.recv(CHALLENGE_BYTES, socket.MSG_WAITALL))
            say(sock, claim + mutated(rng, encode(insider.hello(kind, link_id)) + encode(Ready("x"))))
        case 4:
            passed(sock, claimant.answer(sock.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)))
        case _:
            say(sock, claimant.answer(sock.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)))
            claimant.check(sock.recv(VERDICT_BYTES, socket.MSG_WAITALL))
            say(sock, mutated(rng, encode(insider.hello(kind, link_id))))
    hang_up(sock)


def frames(rng: random.Random, sessions: list[SessionId], pool_bytes: int) -> bytes:
    """A frame of a writer: for blocks of anybody, and mostly with a mistake."""
    target = rng.choice(sessions)
    if rng.random() < 0.2:
        return mutated(rng, encode(rng.choice((Quiet(target), Abort(target), Received(target, 1, 5), Welcome(7)))))
    pieces = rng.randint(0, 4)
    offsets = np.array([rng.choice((0, 4096, pool_bytes - 64, pool_bytes, -64, 1 << 62)) for _ in range(pieces)], "<i8")
    sizes = np.array([rng.choice((0, 64, 4096, -1, 1 << 40)) for _ in range(pieces)], "<i8")
    total = int(sizes.sum())
    data = Data(target, rng.randrange(4), rng.random() < 0.5, total, offsets.tobytes(), sizes.tobytes())
    frame = encode(data) + rng.randbytes(min(max(total, 0), 10_000))
    return frame if rng.random() < 0.5 else mutated(rng, frame)


@pytest.mark.parametrize("kind", ["tcp", "shm"])
@pytest.mark.parametrize(("seed", "times"), SEEDS)
async def test_link_sockets_take_any_bytes_and_write_none(raw: Raw, kind: str, seed: int, times: int) -> None:
    rng = random.Random(f"{seed} {kind}")
    sessions = [SessionId(1), SessionId((1 << 63) - 1, 5), SessionId(next(raw.rooms))]
    async with no_descriptor_left(raw), FalsePrefill.of(raw) as insider, unharmed(raw.mesh):
        before = await engine_pool(raw)

        def attack() -> None:
            for _ in range(40 * times):
                with connected(insider.descriptor(kind)) as sock:
                    handshakes(insider, rng, kind, sock)
            for _ in range(20 * times):
                with insider.link(kind, rng.randrange(1, 1 << 62)) as sock:
                    for _ in range(rng.randint(1, 6)):
                        say(sock, frames(rng, sessions, raw.row.layout.region_bytes))
                    hang_up(sock)

        await asyncio.to_thread(attack)
        await raw.mesh.quiet()
        assert await engine_pool(raw) == before
        await raw.leave(insider.incarnation)


async def test_a_claim_is_of_use_on_its_own_connection_alone(raw: Raw) -> None:
    """Recorded from a link that came up, and from one that was refused; sent again on others, to both sockets."""
    async with no_descriptor_left(raw), FalsePrefill.of(raw) as insider, unharmed(raw.mesh):

        def attack() -> list[bytes]:
            with connected(insider.descriptor("tcp")) as sock:
                claimant = insider.claimant(77)
                claim = claimant.answer(sock.recv(CHALLENGE_BYTES, socket.MSG_WAITALL))
                sock.sendall(claim)
                claimant.check(sock.recv(VERDICT_BYTES, socket.MSG_WAITALL))
            answers = []
            for kind in ("tcp", "shm", "tcp"):
                with connected(insider.descriptor(kind)) as sock:
                    sock.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)
                    sock.sendall(claim)
                    answers.append(sock.recv(VERDICT_BYTES, socket.MSG_WAITALL))
                    hang_up(sock)
            return answers

        assert await asyncio.to_thread(attack) == [verdict(3)] * 3
        await raw.leave(insider.incarnation)


# ---- what prefill dials -------------------------------------------------------------------------------


class FalseDecode:
    """A socket that prefill is told to connect to, and that answers as `play` will. Ends with the block."""

    def __init__(self, play: Callable[[socket.socket], None]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._play = play
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._failure: Exception | None = None

    def __enter__(self) -> FalseDecode:
        self._thread.start()
        return self

    @property
    def address(self) -> str:
        """Where it listens."""
        host, port = self._listener.getsockname()
        return f"{host}:{port}"

    def __exit__(self, *exc: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(TIMEOUT)
        assert not self._thread.is_alive()

    def _serve(self) -> None:
        for sock in self._callers():
            with sock:
                sock.settimeout(TIMEOUT)
                try:
                    self._play(sock)
                except Exception as exc:  # without this thread every call would only be slow
                    self._failure = exc
                    return

    def check(self) -> None:
        """Raises what `play` raised."""
        if self._failure is not None:
            raise self._failure

    def _callers(self) -> Iterator[socket.socket]:
        while True:
            try:
                yield self._listener.accept()[0]
            except OSError:
                return


@pytest.mark.parametrize(("seed", "times"), SEEDS)
async def test_prefill_takes_any_answer_to_its_greeting(raw: Raw, seed: int, times: int) -> None:
    rng, incarnation = random.Random(seed), 4_000 + seed
    keys = LinkSecrets((TOKEN.encode(),)).keys(PAIR_SECRET)
    region = raw.row.layout.region_bytes
    reached = 0

    def play(sock: socket.socket) -> None:
        nonlocal reached
        challenger, how = Challenger(), rng.randrange(5)
        say(sock, challenger.challenge() if how else mutated(rng, challenger.challenge()))
        sock.settimeout(PATIENCE)  # who got too short a challenge waits for the rest of it
        try:
            claim = sock.recv(CLAIM_BYTES, socket.MSG_WAITALL)
        except OSError:  # or hangs up at once
            return
        sock.settimeout(TIMEOUT)
        answer = challenger.judge(*challenger.read(claim), keys) if len(claim) == CLAIM_BYTES else None
        if answer is None:
            return
        reached += 1
        say(sock, verdict(0, answer) if how > 1 else mutated(rng, verdict(rng.randrange(5), answer)))
        welcome = encode(Welcome(region))
        say(sock, welcome if how > 2 else mutated(rng, welcome))
        for _ in range(rng.randint(0, 4)):  # up, maybe: what a reader would say
            target = SessionId(next(raw.rooms))
            control = encode(rng.choice((Abort(target), Received(target, 3, 5), Quiet(target), Welcome(1))))
            say(sock, control if how == 4 else mutated(rng, control))
        hang_up(sock)

    await raw.join(f"false-{seed}", incarnation)
    async with unharmed(raw.mesh), no_descriptor_left(raw):
        before = await engine_pool(raw)
        with FalseDecode(play) as decode:
            for _ in range(200 * times):  # one that is up is not dialled anew
                if reached >= 10 * times:
                    break
                rank = transfer_service_pb2.RankEndpoint(
                    layout=raw.row.layout, descriptors=[descriptor("tcp", decode.address, bytes(16))]
                )
                asked = raw.negotiate(decode_incarnation=incarnation, ranks=[rank])
                assert await raw.outcome(raw.transfer.NegotiateLayout(asked, timeout=TIMEOUT)) in ("OK", "UNAVAILABLE")
                decode.check()
                await asyncio.sleep(0.005)
        assert reached >= 10 * times
        assert await engine_pool(raw) == before


async def test_the_pool_can_be_read_so_that_a_write_would_show() -> None:
    region = KvRegion.create(4096)
    before = pool_digest(os.getpid())
    region.buffer[5] = 1
    assert pool_digest(os.getpid()) != before
    region.close()
