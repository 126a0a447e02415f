"""DecodeService and PrefillService as a pair: sequence, cancels, deaths, refusals."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from engine_core.types.errors import Leg, PdmeshError
from engine_core.types.request import Role
from pdmesh.common.v1 import generation_pb2, identity_pb2
from services.runtime.channels import ChannelPool
from services.runtime.errors import from_rpc_error
from tests.support import fake_engine
from tests.support.worker_pair import PROMPT, Pair, pair, until, worker


def expected(count: int, start: int = 0) -> list[int]:
    return [fake_engine.echo(PROMPT, i) for i in range(start, count)]


async def refused(mesh: Pair, request: Any) -> PdmeshError:
    return from_rpc_error(await mesh.failure(request), Leg.UNKNOWN)


async def test_prompt_goes_through_prefill_and_tokens_come_back(tmp_path: Path) -> None:
    async with pair(tmp_path) as mesh:
        tokens, finished = await mesh.generate(mesh.request(1))
        assert tokens == expected(6)
        assert finished.reason == generation_pb2.FINISH_REASON_LENGTH
        assert finished.path == "pd"
        await mesh.settled()
        decode = [line.split()[0] for line in mesh.decode.journal.read_text().splitlines()]
        assert decode == ["Configure", "ExpectPeer", "Open", "LegStarted", "LegToken", "LegDelivered", "EndSession"]
        prefill = [line.split()[0] for line in mesh.prefill.journal.read_text().splitlines()]
        assert prefill == ["Configure", "ConnectLink", "OpenPrefill", "TicketArrived", "EndSession"]


async def test_link_is_negotiated_once_for_many(tmp_path: Path) -> None:
    async with pair(tmp_path) as mesh:
        results = await asyncio.gather(*(mesh.generate(mesh.request(room)) for room in range(1, 17)))
        assert [tokens for tokens, _ in results] == [expected(6)] * 16
        assert mesh.prefill.frames()["ConnectLink"] == 1
        assert mesh.decode.links.up(mesh.prefill.identity.incarnation) is not None


async def test_one_token_needs_neither_link_nor_ticket(tmp_path: Path) -> None:
    async with pair(tmp_path) as mesh:
        tokens, finished = await mesh.generate(mesh.request(1, max_tokens=1))
        assert tokens == expected(1)
        assert finished.reason == generation_pb2.FINISH_REASON_LENGTH
        assert mesh.prefill.frames()["ConnectLink"] == 0
        assert mesh.prefill.frames()["TicketArrived"] == 0


async def test_resumed_request_goes_on_at_its_index(tmp_path: Path) -> None:
    async with pair(tmp_path) as mesh:
        request = mesh.request(1, max_tokens=6, emitted=expected(3), attempt=2)
        tokens, _ = await mesh.generate(request)
        assert tokens == expected(6, 3)


@pytest.mark.parametrize(
    ("stage", "prefill_opens"),
    [
        ("hold:d.open", 0),
        ("hold:p.open", 1),
        ("hold:d.started", 1),
        ("hold:p.started", 1),
        ("hold:p.token", 1),
        ("hold:d.decoding", 1),
    ],
)
async def test_cancel_ends_both_legs_once(tmp_path: Path, stage: str, prefill_opens: int) -> None:
    async with pair(tmp_path) as mesh:
        call = mesh.stub().Generate(mesh.request(1, stage), timeout=60)
        reached = {
            "hold:d.open": lambda: mesh.decode.frames()["Open"] == 1,
            "hold:p.open": lambda: mesh.prefill.frames()["OpenPrefill"] == 1,
            "hold:d.started": lambda: mesh.decode.frames()["LegStarted"] == 1,
            "hold:p.started": lambda: mesh.prefill.frames()["TicketArrived"] == 1,
            "hold:p.token": lambda: mesh.decode.frames()["LegToken"] == 1,
            "hold:d.decoding": lambda: mesh.decode.frames()["LegDelivered"] == 1,
        }[stage]
        await until(reached)
        call.cancel()
        await mesh.settled()
        assert mesh.decode.frames()["EndSession"] == 1
        assert mesh.prefill.frames()["EndSession"] == mesh.prefill.frames()["OpenPrefill"] == prefill_opens
        tokens, _ = await mesh.generate(mesh.request(2))
        assert tokens == expected(6)


async def test_random_cancels_leave_nothing(tmp_path: Path) -> None:
    async with pair(tmp_path) as mesh:

        async def one(room: int) -> None:
            call = mesh.stub().Generate(mesh.request(room, max_tokens=12), timeout=60)
            read = 0
            async for message in call:
                read += len(message.token_ids)
                if read >= room % 12:
                    call.cancel()
                    return

        await asyncio.gather(*(one(room) for room in range(1, 41)), return_exceptions=True)
        await mesh.settled()


async def test_engine_killed_in_decode_is_unavailable_at_once(tmp_path: Path) -> None:
    async with pair(tmp_path) as mesh:
        request = asyncio.ensure_future(refused(mesh, mesh.request(1, "hold:d.decoding")))
        await until(lambda: mesh.decode.frames()["LegDelivered"] == 1)
        os.kill(mesh.decode.engine.pid, signal.SIGKILL)
        async with asyncio.timeout(5):
            error = await request
        assert (error.reason, error.leg, error.retryable) == ("ENGINE_DIED", Leg.DECODE, True)
        assert error.peer_incarnation == mesh.decode.identity.incarnation
        assert (await refused(mesh, mesh.request(2))).reason == "ENGINE_DIED"


@pytest.mark.parametrize("stage", ["die:p.open", "die:p.started"])
async def test_prefill_death_before_token_one_is_prefills_fault(tmp_path: Path, stage: str) -> None:
    async with pair(tmp_path) as mesh:
        failure = await mesh.failure(mesh.request(1, stage))
        assert failure.code() is grpc.StatusCode.UNAVAILABLE
        error = from_rpc_error(failure, Leg.UNKNOWN)
        assert (error.leg, error.retryable) == (Leg.PREFILL, True)
        assert error.peer_incarnation == mesh.prefill.identity.incarnation


async def test_prefill_service_gone_is_prefills_fault(tmp_path: Path) -> None:
    async with pair(tmp_path) as mesh:
        await mesh.generate(mesh.request(1))
        await mesh.prefill.server.stop(0)
        failure = await mesh.failure(mesh.request(2))
        assert failure.code() is grpc.StatusCode.UNAVAILABLE
        error = from_rpc_error(failure, Leg.UNKNOWN)
        assert (error.leg, error.retryable) == (Leg.PREFILL, True)


async def test_prefill_refusal_keeps_its_code_and_details(tmp_path: Path) -> None:
    async with pair(tmp_path) as mesh:
        failure = await mesh.failure(mesh.request(1, "fail:p.open"))
        assert failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        error = from_rpc_error(failure, Leg.UNKNOWN)
        assert (error.reason, error.leg, error.retry_after) == ("QUEUE_FULL", Leg.PREFILL, 2.0)


async def test_decode_refusal_is_decodes(tmp_path: Path) -> None:
    async with pair(tmp_path) as mesh:
        error = await refused(mesh, mesh.request(1, "fail:d.open"))
        assert (error.reason, error.leg) == ("QUEUE_FULL", Leg.DECODE)


async def test_gap_in_the_output_is_internal(tmp_path: Path) -> None:
    async with pair(tmp_path) as mesh:
        failure = await mesh.failure(mesh.request(1, "gap:d.decoding"))
        assert failure.code() is grpc.StatusCode.INTERNAL
        assert "gap in the output: token 3 came where 2 was due" in failure.details()


async def test_stalled_decoding_is_a_deadline_of_decode(tmp_path: Path) -> None:
    async with pair(tmp_path, decode={"stall": 0.3}) as mesh:
        error = await refused(mesh, mesh.request(1, "hold:d.decoding"))
        assert (error.reason, error.leg) == ("TOKEN_STALL", Leg.DECODE)


async def test_a_stream_that_waits_while_others_decode_does_not_stall(tmp_path: Path) -> None:
    """A preempted session waits for blocks as long as the others need."""
    async with pair(tmp_path, decode={"stall": 1.0}) as mesh:
        waiting = asyncio.ensure_future(refused(mesh, mesh.request(1, "hold:d.decoding")))
        began = time.monotonic()
        room = 2
        while time.monotonic() < began + 2.5:
            await mesh.generate(mesh.request(room))
            room += 1
        assert not waiting.done()
        assert (await waiting).reason == "TOKEN_STALL"


async def test_attempts_are_fenced(tmp_path: Path) -> None:
    async with pair(tmp_path) as mesh:
        lower = asyncio.ensure_future(refused(mesh, mesh.request(1, "hold:d.started", attempt=1)))
        await until(lambda: mesh.decode.frames()["LegStarted"] == 1)
        for attempt in (0, 1):
            stale = await refused(mesh, mesh.request(1, attempt=attempt))
            assert (stale.reason, stale.leg) == ("STALE_ATTEMPT", Leg.DECODE)
        tokens, _ = await mesh.generate(mesh.request(1, attempt=2))
        assert tokens == expected(6)
        error = await lower
        assert (error.reason, error.retryable) == ("SUPERSEDED", True)


async def test_other_incarnations_are_refused_and_named(tmp_path: Path) -> None:
    async with pair(tmp_path) as mesh:
        own = mesh.decode.identity.incarnation
        failure = await mesh.failure(mesh.request(1, decode_incarnation=own + 1))
        assert failure.code() is grpc.StatusCode.FAILED_PRECONDITION
        error = from_rpc_error(failure, Leg.UNKNOWN)
        assert (error.leg, error.peer_incarnation) == (Leg.DECODE, own)
        peer = mesh.prefill.identity.incarnation
        ref = identity_pb2.PeerRef(endpoint=mesh.prefill.server.endpoint, incarnation=peer + 1)
        error = await refused(mesh, mesh.request(2, prefill=ref))
        assert (error.reason, error.leg, error.peer_incarnation) == ("INCARNATION_MISMATCH", Leg.PREFILL, peer)
        ref = identity_pb2.PeerRef(endpoint="127.0.0.1:1", incarnation=peer)
        error = await refused(mesh, mesh.request(3, prefill=ref))
        assert (error.reason, error.leg, error.retryable) == ("PEER_UNKNOWN", Leg.PREFILL, True)


async def test_peer_that_registers_late_is_awaited(tmp_path: Path) -> None:
    async with pair(tmp_path, decode={"wait": 20.0}) as mesh:
        row = mesh.rows.pop(0)
        request = asyncio.ensure_future(mesh.generate(mesh.request(1)))
        await until(lambda: len(mesh.decode.sessions) == 1)
        mesh.rows.insert(0, row)
        assert mesh.peers is not None
        mesh.peers.poke()
        tokens, _ = await request
        assert tokens == expected(6)


async def test_other_fingerprint_is_refused_with_the_part(tmp_path: Path) -> None:
    parts = fake_engine.PARTS | {"tokenizer": "other"}
    async with pair(tmp_path, prefill={"parts": parts}) as mesh:
        failure = await mesh.failure(mesh.request(1))
        assert failure.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "tokenizer is tok here, other there" in failure.details()
        error = await refused(mesh, mesh.request(2, fingerprint="f" * 32))
        assert (error.reason, error.leg) == ("FINGERPRINT_MISMATCH", Leg.DECODE)


async def test_link_is_negotiated_anew_after_its_end(tmp_path: Path) -> None:
    async with pair(tmp_path) as mesh:
        await mesh.generate(mesh.request(1))
        first = mesh.decode.links.up(mesh.prefill.identity.incarnation)
        (tmp_path / "drop").touch()
        await until(lambda: mesh.decode.links.up(mesh.prefill.identity.incarnation) is None)
        (tmp_path / "drop").unlink(missing_ok=True)
        tokens, _ = await mesh.generate(mesh.request(2))
        assert tokens == expected(6)
        assert mesh.decode.links.up(mesh.prefill.identity.incarnation) not in (None, first)


async def test_bad_fields_are_named(tmp_path: Path) -> None:
    async with pair(tmp_path) as mesh:
        failure = await mesh.failure(mesh.request(1, max_tokens=0))
        assert failure.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert from_rpc_error(failure, Leg.UNKNOWN).field == "request.sampling.max_tokens"
        request = mesh.request(2)
        request.ClearField("prefill")
        assert (await refused(mesh, request)).field == "prefill"
        assert mesh.decode.frames()["Open"] == 0


async def test_deadline_of_the_call_ends_both_legs(tmp_path: Path) -> None:
    async with pair(tmp_path) as mesh:
        failure = await mesh.failure(mesh.request(1, "hold:p.started"), timeout=0.7)
        assert failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_mixed_instance_serves_alone(tmp_path: Path) -> None:
    channels = ChannelPool()
    async with worker(Role.MIXED, tmp_path, channels) as mixed:
        mesh = Pair(mixed, mixed, channels)
        request = mesh.request(1)
        assert (await refused(mesh, request)).field == "prefill"
        request = mesh.request(2)
        request.ClearField("prefill")
        tokens, finished = await mesh.generate(request)
        assert (tokens, finished.path) == (expected(6), "local")
        tokens, _ = await mesh.generate(_local(mesh.request(3, "burst:d.decoding", max_tokens=200)))
        assert tokens == expected(200)
    await channels.close()


def _local(request: Any) -> Any:
    request.ClearField("prefill")
    return request
