"""PrefillService and TransferService, spoken to directly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest

from engine_core.types.digest import session_proof
from engine_core.types.errors import Leg, PdmeshError
from engine_core.types.ids import RankCoord
from engine_core.types.request import Role
from pdmesh.common.v1 import generation_pb2, identity_pb2
from pdmesh.prefill.v1 import prefill_service_pb2, prefill_service_pb2_grpc
from pdmesh.transfer.v1 import ticket_pb2, transfer_service_pb2, transfer_service_pb2_grpc
from services.runtime.channels import ChannelPool
from services.runtime.errors import from_rpc_error
from services.wire.common import coord_to_proto
from services.wire.transfer import descriptor_to_proto, layout_to_proto
from tests.support import fake_engine
from tests.support.worker_pair import PROMPT, Worker, until, worker

Request = prefill_service_pb2.PrefillRequest
SECRET = b"what this pair of workers shares"


class Side:
    """A prefill worker, its stubs, and the decode engine that it pushes to."""

    def __init__(self, prefill: Worker, decode: Worker, channels: ChannelPool, rows: list[Any]) -> None:
        self.prefill, self.decode, self.rows = prefill, decode, rows
        channel = channels.get(prefill.server.endpoint)
        self.stub: Any = prefill_service_pb2_grpc.PrefillServiceStub(channel)
        self.transfer: Any = transfer_service_pb2_grpc.TransferServiceStub(channel)

    def negotiation(self, **more: Any) -> Any:
        ready = self.decode.identity.ready
        rank = transfer_service_pb2.RankEndpoint(
            coord=coord_to_proto(RankCoord()),
            layout=layout_to_proto(ready.layout),
            descriptors=[descriptor_to_proto(d) for d in ready.descriptors],
        )
        fields = {
            "decode_instance": "decode-0",
            "decode_incarnation": self.decode.identity.incarnation,
            "prefill_incarnation": self.prefill.identity.incarnation,
            "fingerprint": self.decode.identity.fingerprint,
            "ranks": [rank],
            "pair_secret": SECRET,
        }
        return transfer_service_pb2.NegotiateLayoutRequest(**(fields | more))

    async def link(self) -> int:
        return int((await self.transfer.NegotiateLayout(self.negotiation(), timeout=10)).link_id)

    def opening(self, room: int, link_id: int = 0, request_id: str = "", **more: Any) -> Any:
        generation = generation_pb2.GenerationRequest(
            session=identity_pb2.SessionId(room=room, attempt=more.pop("attempt", 0)),
            request_id=request_id,
            prompt_token_ids=PROMPT,
            sampling=generation_pb2.SamplingParams(max_tokens=4),
            fingerprint=more.pop("fingerprint", ""),
        )
        fields = {
            "request": generation,
            "prefill_incarnation": self.prefill.identity.incarnation,
            "decode_incarnation": self.decode.identity.incarnation,
            "link_id": link_id,
            "link_proof": session_proof(SECRET, link_id, room, generation.session.attempt),
        }
        return Request(open=prefill_service_pb2.OpenPrefill(**(fields | more)))

    async def error_of(self, *messages: Any) -> PdmeshError:
        call = self.stub.Prefill(timeout=20)
        try:
            for message in messages:
                await call.write(message)
            await call.done_writing()
            async for _ in call:
                pass
        except grpc.aio.AioRpcError as exc:
            return from_rpc_error(exc, Leg.UNKNOWN)
        except asyncio.InvalidStateError:
            code, details = await call.code(), await call.details()
            exc = grpc.aio.AioRpcError(code, await call.initial_metadata(), await call.trailing_metadata(), details, "")
            return from_rpc_error(exc, Leg.UNKNOWN)
        raise AssertionError("the stream ended well")


def ticket(link_id: int) -> Any:
    shard = ticket_pb2.ShardTicket(
        coord=identity_pb2.RankCoord(), groups=[ticket_pb2.GroupBlocks(group_id=0, block_ids=[1])]
    )
    return Request(ticket=ticket_pb2.Ticket(link_id=link_id, num_tokens=len(PROMPT), shards=[shard]))


@asynccontextmanager
async def side(folder: Path, **script: Any) -> AsyncIterator[Side]:
    channels = ChannelPool()
    rows: list[Any] = []
    async with (
        worker(Role.PREFILL, folder, channels, rows=rows, **script) as prefill,
        worker(Role.DECODE, folder, channels) as decode,
    ):
        rows.append(decode.row())
        yield Side(prefill, decode, channels, rows)
    await channels.close()


async def test_stream_in_order(tmp_path: Path) -> None:
    async with side(tmp_path) as made:
        link_id = await made.link()
        call = made.stub.Prefill(timeout=20)
        await call.write(made.opening(1, link_id))
        assert (await call.read()).WhichOneof("message") == "started"
        await call.write(ticket(link_id))
        token = (await call.read()).first_token
        assert (token.token_id, token.cached_tokens) == (fake_engine.echo(PROMPT, 0), 16)
        assert (token.timings.queued, token.timings.computing) == (0.25, 0.5)
        shards = (await call.read()).delivered.shards
        assert [(s.bytes, s.blocks) for s in shards] == [(4096, 1)]
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK
        session = identity_pb2.SessionId(room=1)
        other = identity_pb2.SessionId(room=2)
        quiet = await made.transfer.Quiesce(
            transfer_service_pb2.QuiesceRequest(link_id=link_id, sessions=[session, other]), timeout=10
        )
        assert list(quiet.quiet) == [session]


async def test_first_message_must_be_open(tmp_path: Path) -> None:
    async with side(tmp_path) as made:
        assert (await made.error_of(ticket(1))).field == "open"
        assert (await made.error_of()).field == "open"
        assert made.prefill.frames()["OpenPrefill"] == 0


async def test_stream_without_ticket_and_second_ticket_fail(tmp_path: Path) -> None:
    async with side(tmp_path) as made:
        link_id = await made.link()
        assert (await made.error_of(made.opening(1, link_id))).field == "ticket"
        error = await made.error_of(made.opening(2, link_id, "hold:p.token"), ticket(link_id), ticket(link_id))
        assert error.field == "ticket"
        bad = ticket(link_id)
        bad.ticket.shards[0].groups[0].block_ids[0] = 0
        error = await made.error_of(made.opening(3, link_id, "hold:p.started"), bad)
        assert error.field == "ticket.shards[0].groups[0].block_ids"


async def test_incarnation_fingerprint_and_link_are_checked(tmp_path: Path) -> None:
    async with side(tmp_path) as made:
        own = made.prefill.identity.incarnation
        error = await made.error_of(made.opening(1, prefill_incarnation=own - 1))
        assert (error.reason, error.peer_incarnation, error.leg) == ("INCARNATION_MISMATCH", own, Leg.PREFILL)
        error = await made.error_of(made.opening(1, fingerprint="0" * 32))
        assert error.reason == "FINGERPRINT_MISMATCH"
        error = await made.error_of(made.opening(1, link_id=99))
        assert (error.reason, error.leg, error.retryable) == ("LINK_DOWN", Leg.TRANSFER, True)
        link_id = await made.link()
        for proof in (b"", bytes(32), session_proof(SECRET, link_id, 2, 0), session_proof(bytes(32), link_id, 1, 0)):
            error = await made.error_of(made.opening(1, link_id, link_proof=proof))
            assert (error.reason, error.field) == ("LINK_OF_OTHER_PEER", "link_proof")
        assert made.prefill.frames()["OpenPrefill"] == 0


async def test_only_decode_workers_of_the_rank_table_are_served(tmp_path: Path) -> None:
    async with side(tmp_path) as made:
        link_id = await made.link()
        for link, alone in ((link_id, False), (0, True)):
            error = await made.error_of(made.opening(1, link, decode_incarnation=5, without_transfer=alone))
            assert (error.reason, error.leg, error.peer_incarnation) == ("PEER_UNKNOWN", Leg.DECODE, 5)
        assert (await made.error_of(made.opening(1, link_id, decode_incarnation=0))).field == "decode_incarnation"
        prefill = made.prefill.identity.incarnation
        made.rows.append(made.prefill.row())  # known, but no decode worker
        assert (await made.error_of(made.opening(1, link_id, decode_incarnation=prefill))).reason == "PEER_UNKNOWN"
        # One that registers while it is waited for is served; its own link it has not.
        other = msgspec.structs.replace(made.decode.row(), incarnation=6)
        late = asyncio.ensure_future(made.error_of(made.opening(1, link_id, decode_incarnation=6)))
        made.rows.append(other)
        assert (await late).reason == "LINK_OF_OTHER_PEER"
        assert made.prefill.frames()["OpenPrefill"] == 0


async def test_a_link_is_its_negotiators_own(tmp_path: Path) -> None:
    async with side(tmp_path) as made:
        link_id = await made.link()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await made.transfer.NegotiateLayout(made.negotiation(pair_secret=bytes(32)), timeout=10)
        assert from_rpc_error(caught.value, Leg.UNKNOWN).reason == "LINK_OF_OTHER_PEER"
        assert await made.link() == link_id


async def test_attempts_are_fenced(tmp_path: Path) -> None:
    async with side(tmp_path) as made:
        link_id = await made.link()
        lower = asyncio.ensure_future(
            made.error_of(made.opening(1, link_id, "hold:p.started", attempt=1), ticket(link_id))
        )
        await until(lambda: made.prefill.frames()["TicketArrived"] == 1)
        assert (await made.error_of(made.opening(1, link_id, attempt=1))).reason == "STALE_ATTEMPT"
        call = made.stub.Prefill(timeout=20)
        await call.write(made.opening(1, attempt=2, without_transfer=True))
        kinds = [message.WhichOneof("message") async for message in call]
        assert kinds == ["started", "first_token"]
        assert (await lower).reason == "SUPERSEDED"


async def test_silent_engine_is_killed_and_its_streams_fail(tmp_path: Path) -> None:
    async with side(tmp_path, watchdog=0.5) as made:
        error = await made.error_of(made.opening(1, request_id="mute:p.open", without_transfer=True))
        assert (error.reason, error.leg, error.retryable) == ("ENGINE_DIED", Leg.PREFILL, True)


async def test_negotiation_is_single_flight_and_reused(tmp_path: Path) -> None:
    async with side(tmp_path) as made:
        links = await asyncio.gather(*(made.link() for _ in range(8)))
        assert len(set(links)) == 1 and links[0] > 0
        assert made.prefill.frames()["ConnectLink"] == 1


async def test_negotiation_refusals(tmp_path: Path) -> None:
    async with side(tmp_path, parts=fake_engine.PARTS | {"model": "other"}) as made:

        async def error(**more: Any) -> PdmeshError:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await made.transfer.NegotiateLayout(made.negotiation(**more), timeout=10)
            return from_rpc_error(caught.value, Leg.UNKNOWN)

        refusal = await error()
        assert refusal.reason == "FINGERPRINT_MISMATCH"
        assert "model is other here, echo there" in refusal.message
        assert (await error(fingerprint="")).field == "fingerprint"
        own = made.prefill.identity.fingerprint
        assert (await error(fingerprint=own, ranks=[])).field == "ranks"
        assert (await error(fingerprint=own, decode_incarnation=0)).field == "decode_incarnation"
        assert (await error(prefill_incarnation=3)).reason == "INCARNATION_MISMATCH"
        assert (await error(fingerprint=own, decode_incarnation=3)).reason == "PEER_UNKNOWN"
        assert (await error(fingerprint=own, pair_secret=b"short")).field == "pair_secret"
        assert made.prefill.frames()["ConnectLink"] == 0


async def test_link_that_cannot_be_opened_blames_the_transfer(tmp_path: Path) -> None:
    async with side(tmp_path, link_error="refused") as made:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await made.transfer.NegotiateLayout(made.negotiation(), timeout=10)
        error = from_rpc_error(caught.value, Leg.UNKNOWN)
        assert (error.reason, error.leg, error.retryable) == ("LINK_DOWN", Leg.TRANSFER, True)
        assert error.peer_incarnation == made.decode.identity.incarnation
