"""A prefill and a decode worker's services over fake engines: real processes, real gRPC on loopback, no
Bootstrap (each knows the other's row)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from engine_core.lifecycle.membership import MembershipState
from engine_core.types.ids import RankCoord, mint_incarnation
from engine_core.types.request import Role
from pdmesh.common.v1 import generation_pb2, identity_pb2
from pdmesh.decode.v1 import decode_service_pb2, decode_service_pb2_grpc
from pdmesh.prefill.v1 import prefill_service_pb2_grpc
from pdmesh.transfer.v1 import transfer_service_pb2_grpc
from services.decode.peers import PrefillPeers
from services.decode.servicer import DecodeServicer
from services.prefill.links import PrefillLinks
from services.prefill.peers import DecodePeers
from services.prefill.servicer import PrefillServicer
from services.prefill.transfer_servicer import TransferServicer
from services.runtime.channels import ChannelPool
from services.runtime.server import GrpcServer
from services.runtime.tasks import TaskOwner
from services.wire.bootstrap import InstanceSpec, RankRow
from services.worker.engine_client import EngineClient
from services.worker.identity import WorkerIdentity
from services.worker.links import DecodeLinks
from services.worker.sessions import SessionTable
from tests.support import fake_engine

PROMPT = (11, 12, 13, 14)


async def until(condition: Callable[[], bool], seconds: float = 15.0) -> None:
    """Waits for a condition that must come true."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  # conditions of other processes have no event
            await asyncio.sleep(0.01)


@dataclass
class Worker:
    """One worker's parts."""

    identity: WorkerIdentity
    engine: EngineClient
    sessions: SessionTable
    session_tasks: TaskOwner
    tasks: TaskOwner
    server: GrpcServer
    journal: Path
    links: Any = None

    def row(self) -> RankRow:
        """Its line of the rank table."""
        spec = InstanceSpec(
            name=self.identity.instance,
            role=self.identity.role,
            fingerprint=self.identity.fingerprint,
            fingerprint_parts=self.identity.ready.fingerprint_parts,
        )
        return RankRow(
            spec, RankCoord(), self.server.endpoint, self.identity.incarnation, state=MembershipState.READY
        )  # fmt: skip

    def frames(self) -> Counter[str]:
        """Frames that its engine got, by name."""
        return Counter(line.split()[0] for line in self.journal.read_text().splitlines())

    def ends(self) -> list[str]:
        """Sessions that were ended, in order."""
        lines = [line.split() for line in self.journal.read_text().splitlines()]
        return [words[1] for words in lines if words[0] == "EndSession"]

    def settled(self) -> bool:
        """True when it is idle and its engine was told the end of each session that it was to open."""
        frames = self.frames()
        told = frames["EndSession"] == frames["Open"] + frames["OpenPrefill"]
        return self.idle() and (told or self.engine.death is not None)

    def idle(self) -> bool:
        """True when nothing of any session is left, here and in the engine."""
        stats = self.engine.stats
        quiet = self.engine.death is not None or (stats is not None and stats.sessions == 0)
        return quiet and len(self.sessions) == 0 and self.engine.open_sessions == 0 and self.session_tasks.count == 0


@dataclass
class Pair:
    """A prefill and a decode worker."""

    prefill: Worker
    decode: Worker
    channels: ChannelPool
    rows: list[RankRow] = field(default_factory=list)
    peers: PrefillPeers | None = None
    client: Any = None

    def request(self, room: int, request_id: str = "", max_tokens: int = 6, **more: Any) -> Any:
        """A GenerateRequest for this pair."""
        attempt = more.pop("attempt", 0)
        generation = generation_pb2.GenerationRequest(
            session=identity_pb2.SessionId(room=room, attempt=attempt),
            request_id=request_id,
            prompt_token_ids=more.pop("prompt", PROMPT),
            emitted_token_ids=more.pop("emitted", ()),
            sampling=generation_pb2.SamplingParams(max_tokens=max_tokens, seed=1, **more.pop("sampling", {})),
            arrival_unix_ms=1,
            fingerprint=more.pop("fingerprint", ""),
        )
        prefill = identity_pb2.PeerRef(
            endpoint=self.prefill.server.endpoint, incarnation=self.prefill.identity.incarnation
        )
        fields = {"decode_incarnation": self.decode.identity.incarnation, "prefill": prefill} | more
        return decode_service_pb2.GenerateRequest(request=generation, **fields)

    def stub(self) -> Any:
        """A client of the decode worker."""
        return decode_service_pb2_grpc.DecodeServiceStub(self.channels.get(self.decode.server.endpoint))

    async def generate(self, request: Any, timeout: float = 20.0) -> tuple[list[int], Any]:
        """All tokens, and the Finished message."""
        tokens: list[int] = []
        last = None
        async for message in self.stub().Generate(request, timeout=timeout):
            if message.prompt_logprobs:
                assert not tokens and not message.token_ids
                continue
            assert message.first_index == len(request.request.emitted_token_ids) + len(tokens)
            tokens.extend(message.token_ids)
            last = message
        return tokens, last.finished if last is not None and last.HasField("finished") else None

    async def failure(self, request: Any, timeout: float = 20.0) -> grpc.aio.AioRpcError:
        """The error that a request ends in."""
        try:
            await self.generate(request, timeout)
        except grpc.aio.AioRpcError as exc:
            return exc
        raise AssertionError("the request did not fail")

    async def settled(self) -> None:
        """Waits until nothing is left of any session, then checks the books: one end per open."""
        await until(lambda: self.prefill.settled() and self.decode.settled())
        for side in (self.prefill, self.decode):
            assert len(side.ends()) == len(set(side.ends()))


@asynccontextmanager
async def worker(role: Role, folder: Path, channels: ChannelPool, **script: Any) -> AsyncIterator[Worker]:
    """One worker; `script` goes to its engine. `peers` and `watchdog` are for the services."""
    name = f"{role.value.lower()}-0"
    rows: list[RankRow] = script.pop("rows", [])
    watchdog: float = script.pop("watchdog", 30.0)
    stall: float = script.pop("stall", 30.0)
    wait: float = script.pop("wait", 0.3)
    journal = folder / f"{name}.journal"
    journal.touch()
    leg = WorkerIdentity(name, role, mint_incarnation(), None).leg  # type: ignore[arg-type]
    incarnation = mint_incarnation()
    engine = EngineClient(
        {},
        incarnation,
        name,
        leg=leg,
        command=fake_engine.command(
            journal=str(journal), socket=str(folder / f"{name}.sock"), drop=str(folder / "drop"), **script
        ),
        watchdog_timeout=watchdog,
        ready_timeout=30.0,
    )
    session_tasks, tasks = TaskOwner(f"{name}-sessions"), TaskOwner(name)
    sessions = SessionTable(leg, incarnation)
    server = None
    try:
        identity = WorkerIdentity(name, role, incarnation, await engine.start())
        peers, links = None, None

        def add(grpc_server: grpc.aio.Server) -> None:
            nonlocal peers, links
            if role is Role.PREFILL:
                links = PrefillLinks(engine, tasks, 2.0)
                known = DecodePeers(lambda peer: next((r for r in rows if r.incarnation == peer), None), wait)
                prefill = PrefillServicer(engine, identity, sessions, links, known, session_tasks)
                prefill_service_pb2_grpc.add_PrefillServiceServicer_to_server(prefill, grpc_server)
                transfer = TransferServicer(engine, identity, links, known)
                transfer_service_pb2_grpc.add_TransferServiceServicer_to_server(transfer, grpc_server)
            else:
                if role is Role.DECODE:
                    peers = PrefillPeers(identity, lambda: rows, wait)
                    links = DecodeLinks(engine, identity, channels, tasks, connect_timeout=2.0)
                decode = DecodeServicer(
                    engine, identity, sessions, session_tasks, channels, peers=peers, links=links,
                    token_stall_timeout=stall,
                )  # fmt: skip
                decode_service_pb2_grpc.add_DecodeServiceServicer_to_server(decode, grpc_server)

        server = await GrpcServer.start("127.0.0.1:0", add, (), leg=leg)
        made = Worker(identity, engine, sessions, session_tasks, tasks, server, journal, links)
        made.peers = peers  # type: ignore[attr-defined]
        yield made
        await until(made.settled)
    finally:
        if server is not None:
            await server.stop(0)
        await tasks.close()
        await session_tasks.close()
        await engine.close()
        assert tasks.count == 0 and session_tasks.count == 0 and len(sessions) == 0


@asynccontextmanager
async def pair(folder: Path, **options: Any) -> AsyncIterator[Pair]:
    """Both workers. Options `prefill` and `decode` are scripts of their engines."""
    async with AsyncExitStack() as stack:
        channels = ChannelPool(connect_timeout=2.0)
        stack.push_async_callback(channels.close)
        rows: list[RankRow] = []
        prefill = await stack.enter_async_context(
            worker(Role.PREFILL, folder, channels, rows=rows, **options.get("prefill", {}))
        )
        decode = await stack.enter_async_context(
            worker(Role.DECODE, folder, channels, rows=rows, **options.get("decode", {}))
        )
        rows += [prefill.row(), decode.row()]
        made = Pair(prefill, decode, channels, rows, decode.peers)  # type: ignore[attr-defined]
        yield made
        await made.settled()


def stub_of(cls: Any, channels: ChannelPool, made: Worker) -> Any:
    """A client stub of a worker."""
    return cls(channels.get(made.server.endpoint))


__all__ = ["PROMPT", "Pair", "Worker", "pair", "stub_of", "until", "worker", "prefill_service_pb2_grpc"]
