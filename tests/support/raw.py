"""Raw stubs of every service of a mesh, well-formed messages to spoil, and what must hold after nonsense.

To prefill it is a decode worker of its own: with a row in the rank table, of a fingerprint that nobody is paired with,
a pool in this process, and a link to it. So what it says is heard as an insider's, by who knows all that one can.

async with Raw.of(mesh) as raw:
    error = await raw.refused(raw.decode.Generate(raw.generate(prefill=None)))
    async with unharmed(mesh, untouched=True):
        ...
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc_status import rpc_status

from engine_core.transfer.base import ExpectLink, LinkOpened
from engine_core.types.digest import session_proof
from engine_core.types.errors import PdmeshError
from engine_core.types.ids import Incarnation
from pdmesh.bootstrap.v1 import bootstrap_service_pb2, bootstrap_service_pb2_grpc, rank_table_pb2
from pdmesh.common.v1 import generation_pb2, identity_pb2, worker_pb2_grpc
from pdmesh.decode.v1 import decode_service_pb2, decode_service_pb2_grpc
from pdmesh.prefill.v1 import prefill_service_pb2, prefill_service_pb2_grpc
from pdmesh.transfer.v1 import kv_layout_pb2, ticket_pb2, transfer_service_pb2, transfer_service_pb2_grpc
from services.runtime.channels import channel_options
from services.runtime.errors import from_rich_status
from services.runtime.streams import Duplex
from services.wire.transfer import descriptor_to_proto, layout_from_proto
from tests.support.mesh import Mesh
from tests.support.transfer import PAIR_SECRET, Endpoint, Setup

TIMEOUT = 60.0
"""Seconds for what comes at once on a machine with time."""


@asynccontextmanager
async def unharmed(mesh: Mesh, *, untouched: bool = False) -> AsyncIterator[None]:
    """Asserts that every process lives on as before, that all is quiet, and that no traceback was logged.

    With `untouched` no session was opened either, and no step computed.
    """
    before = _lives(mesh, await mesh.quiet(), untouched=untouched)
    yield
    assert _lives(mesh, await mesh.quiet(), untouched=untouched) == before
    for name in ("bootstrap", "router", *before):
        traces = [line for line in mesh.lines(name) if "Traceback" in line]
        assert not traces, f"{name} logged {traces}"


def _lives(mesh: Mesh, ranks: list[dict[str, Any]], *, untouched: bool) -> dict[str, Any]:
    lives = {}
    for rank in ranks:
        if rank["instance"] not in mesh.pids:
            continue  # registered by a test, perhaps with a real worker's endpoint
        lives[rank["instance"]] = [rank[name] for name in ("pid", "engine_pid", "incarnation", "state", "health")]
        if untouched:
            lives[rank["instance"]] += [rank["counters"]["sessions_opened"], rank["counters"]["steps"], rank["kv"]]
    return lives


@dataclass(frozen=True)
class Refusal:
    """How a call ended: its status, and the error that came along."""

    code: str
    error: PdmeshError

    @property
    def short(self) -> tuple[str, str]:
        """Status code, and the field or else the reason."""
        return self.code, self.error.field or self.error.reason


@dataclass
class Raw:
    """Stubs and templates of one mesh with prefill-0 and decode-0."""

    mesh: Mesh
    channels: dict[str, grpc.aio.Channel]
    row: Any
    """Decode's row."""
    prefill_ref: identity_pb2.PeerRef
    own: Endpoint
    """The pool to which prefill pushes for this caller; nothing is granted there but by tests."""
    link_id: int = 0
    rooms: itertools.count[int] = field(default_factory=lambda: itertools.count(time.time_ns() >> 2))
    leases: list[tuple[int, int]] = field(default_factory=list)
    """Of rows that were registered by hand, and their incarnations."""

    @classmethod
    @asynccontextmanager
    async def of(cls, mesh: Mesh) -> AsyncIterator[Raw]:
        """Connects, and asks for what a caller can know: rows, and the link of the pair."""
        names = ("bootstrap", "prefill-0", "decode-0")
        security = mesh.security
        channels = {name: security.channel(mesh.endpoint(name), channel_options(2.0)) for name in names}
        own: Endpoint | None = None
        try:
            bootstrap = bootstrap_service_pb2_grpc.BootstrapServiceStub(channels["bootstrap"])
            table = await bootstrap.GetRankTable(bootstrap_service_pb2.GetRankTableRequest(), timeout=TIMEOUT)
            rows = {row.instance.name: row for row in table.rows}
            prefill = rows["prefill-0"]
            ref = identity_pb2.PeerRef(endpoint=prefill.endpoint, incarnation=prefill.incarnation)
            layout = layout_from_proto(rows["decode-0"].layout)
            own = Endpoint(Setup(accept=True, layout=layout, tokens=security.link_secrets))
            own.submit(ExpectLink(Incarnation(prefill.incarnation), PAIR_SECRET))
            raw = cls(mesh, channels, rows["decode-0"], ref, own)
            await raw.join("raw", own.setup.incarnation)
            raw.link_id = (await raw.transfer.NegotiateLayout(raw.negotiate(), timeout=TIMEOUT)).link_id
            own.wait(LinkOpened, link_id=raw.link_id)
            yield raw
            await raw.give_back()
        finally:
            if own is not None:
                own.close()
            for channel in channels.values():
                await channel.close()

    # ---- stubs --------------------------------------------------------------------------------------

    @property
    def bootstrap(self) -> Any:
        """BootstrapService."""
        return bootstrap_service_pb2_grpc.BootstrapServiceStub(self.channels["bootstrap"])

    @property
    def decode(self) -> Any:
        """DecodeService of decode-0."""
        return decode_service_pb2_grpc.DecodeServiceStub(self.channels["decode-0"])

    @property
    def prefill(self) -> Any:
        """PrefillService of prefill-0."""
        return prefill_service_pb2_grpc.PrefillServiceStub(self.channels["prefill-0"])

    @property
    def transfer(self) -> Any:
        """TransferService of prefill-0."""
        return transfer_service_pb2_grpc.TransferServiceStub(self.channels["prefill-0"])

    def worker(self, name: str) -> Any:
        """WorkerService of either."""
        return worker_pb2_grpc.WorkerServiceStub(self.channels[name])

    # ---- messages, each as it should be but for what is given ----------------------------------------

    def request(self, **spoilt: Any) -> generation_pb2.GenerationRequest:
        """A prompt of three tokens in a room of its own."""
        good = {
            "session": session(next(self.rooms)),
            "prompt_token_ids": [5, 6, 7],
            "sampling": sampling(),
        }
        return generation_pb2.GenerationRequest(**{**good, **spoilt})

    def generate(self, **spoilt: Any) -> decode_service_pb2.GenerateRequest:
        """For the pair."""
        good = {"request": self.request(), "prefill": self.prefill_ref}
        return decode_service_pb2.GenerateRequest(**{**good, **spoilt})

    def open(self, **spoilt: Any) -> prefill_service_pb2.PrefillRequest:
        """The first message of a prefill stream."""
        good = {
            "request": self.request(),
            "link_id": self.link_id,
            "decode_incarnation": self.own.setup.incarnation,
            **spoilt,
        }
        asked = good["request"].session if good["request"] is not None else session(0)
        proof = session_proof(PAIR_SECRET, max(good["link_id"], 0), max(asked.room, 0), max(asked.attempt, 0))
        good.setdefault("link_proof", proof)
        return prefill_service_pb2.PrefillRequest(open=prefill_service_pb2.OpenPrefill(**good))

    def ticket(self, *blocks: int, **spoilt: Any) -> prefill_service_pb2.PrefillRequest:
        """The second, for a prompt of three tokens; `blocks` instead of block 1."""
        good = {"link_id": self.link_id, "num_tokens": 3, "shards": [shard(*(blocks or (1,)))]}
        return prefill_service_pb2.PrefillRequest(ticket=ticket_pb2.Ticket(**{**good, **spoilt}))

    def negotiate(self, **spoilt: Any) -> transfer_service_pb2.NegotiateLayoutRequest:
        """As a decode worker asks, for the pool in this process."""
        descriptors = [descriptor_to_proto(descriptor) for descriptor in self.own.descriptors()]
        rank = transfer_service_pb2.RankEndpoint(layout=self.row.layout, descriptors=descriptors)
        good = {
            "decode_instance": "raw",
            "decode_incarnation": self.own.setup.incarnation,
            "fingerprint": self.row.instance.fingerprint,
            "ranks": [rank],
            "pair_secret": PAIR_SECRET,
        }
        return transfer_service_pb2.NegotiateLayoutRequest(**{**good, **spoilt})

    # ---- calls --------------------------------------------------------------------------------------

    async def join(self, name: str, incarnation: int) -> None:
        """Puts a decode worker into the rank table that no router sends anything to."""
        row = rank_table_pb2.RankRow()
        row.CopyFrom(self.row)
        row.instance.name, row.instance.fingerprint, row.incarnation = name, "raw", incarnation
        row.instance.tokenizer_digest, row.endpoint = "raw", "127.0.0.1:1"
        await self.register(bootstrap_service_pb2.RegisterRankRequest(row=row, ttl_seconds=600.0))

    async def register(self, request: Any) -> None:
        """A row, under a lease that give_back() ends; it may be one of hours."""
        grant = await self.bootstrap.RegisterRank(request, timeout=TIMEOUT)
        self.leases.append((grant.lease_id, request.row.incarnation))

    async def leave(self, incarnation: int) -> None:
        """Takes the rows of one incarnation out of the table."""
        kept = [lease for lease in self.leases if lease[1] != incarnation]
        self.leases, gone = [lease for lease in self.leases if lease[1] == incarnation], kept
        await self.give_back()
        self.leases = gone

    async def give_back(self) -> None:
        """Takes all rows out of the table that register() has put there and nobody replaced."""
        for lease, incarnation in self.leases:
            request = bootstrap_service_pb2.DeregisterRequest(lease_id=lease, incarnation=incarnation)
            ended = await self.outcome(self.bootstrap.Deregister(request, timeout=TIMEOUT))
            assert ended in ("OK", "NOT_FOUND", "FAILED_PRECONDITION"), ended
        self.leases.clear()

    async def stream(self, *messages: Any, after_start: bool = False, still: int = 0, stub: Any = None) -> list[Any]:
        """A whole prefill stream: what prefill answered. The messages behind the first wait for STARTED if told to;
        then the process `still` stands still until the end."""
        call: Duplex[Any, Any] = Duplex((stub or self.prefill.Prefill)(timeout=TIMEOUT))
        answers: list[Any] = []
        with ExitStack() as stack:
            for i, message in enumerate(messages):
                if i == 1 and after_start:
                    answers.append(await call.read())
                    if still:
                        stack.callback(os.kill, still, signal.SIGCONT)
                        os.kill(still, signal.SIGSTOP)
                await call.write(message)
            await call.done_writing()
            return answers + [answer async for answer in call]

    async def refused(self, call: Awaitable[Any] | AsyncIterator[Any]) -> Refusal:
        """The error of a call that must fail, with its details. Raises AssertionError when it does not."""
        try:
            answer = await call if isinstance(call, Awaitable) else [part async for part in call]
        except grpc.aio.AioRpcError as exc:
            status = rpc_status.from_call(exc)  # type: ignore[arg-type]
            error = from_rich_status(status) if status is not None else None
            assert error is not None, f"{exc.code()} {exc.details()} has no details"
            return Refusal(exc.code().name, error)
        raise AssertionError(f"it was answered: {answer}")

    async def outcome(self, call: Awaitable[Any] | AsyncIterator[Any]) -> str:
        """The status code, however the call ends. A failure must have details."""
        try:
            await call if isinstance(call, Awaitable) else [part async for part in call]
        except grpc.aio.AioRpcError as exc:
            status = rpc_status.from_call(exc)  # type: ignore[arg-type]
            assert status is not None and from_rich_status(status) is not None, exc
            return exc.code().name
        return "OK"


def coord(tp: int) -> identity_pb2.RankCoord:
    """A rank."""
    return identity_pb2.RankCoord(tp=tp)


def shard(*blocks: int, group: int = 0, tp: int = 0) -> ticket_pb2.ShardTicket:
    """One rank's blocks."""
    groups = [ticket_pb2.GroupBlocks(group_id=group, block_ids=blocks)]
    return ticket_pb2.ShardTicket(coord=coord(tp), groups=groups)


def session(room: int, attempt: int = 0) -> identity_pb2.SessionId:
    """A session's name."""
    return identity_pb2.SessionId(room=room, attempt=attempt)


def sampling(**spoilt: Any) -> generation_pb2.SamplingParams:
    """Two greedy tokens."""
    return generation_pb2.SamplingParams(**{"max_tokens": 2, **spoilt})


def descriptor(transport: str, address: str = "", nonce: bytes = b"") -> kv_layout_pb2.TransferDescriptor:
    """A way to a pool."""
    return kv_layout_pb2.TransferDescriptor(transport=transport, address=address, nonce=nonce)
