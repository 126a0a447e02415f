"""Workers of different fingerprints: never paired, whoever asks for it, and what differs is named."""

from __future__ import annotations

import random
import signal
from collections import Counter
from typing import Any

import grpc
import httpx
import pytest

from engine_core.types.errors import FencedError, Leg
from pdmesh.common.v1 import identity_pb2
from pdmesh.decode.v1 import decode_service_pb2, decode_service_pb2_grpc
from services.runtime.channels import ChannelPool
from services.runtime.errors import from_rpc_error
from services.wire.generation import spec_to_proto
from tests.support.builders import spec
from tests.support.mesh import Mesh
from tests.support.models import tiny_model


async def complete(mesh: Mesh, prompt: list[int] | None = None, *, stream: bool = False) -> httpx.Response:
    body = {"input_ids": prompt or [5, 6, 7], "max_tokens": 4, "ignore_eos": True, "stream": stream}
    async with httpx.AsyncClient(timeout=30.0, trust_env=False) as client:
        return await client.post(f"{mesh.url}/generate", json=body)


async def force(mesh: Mesh, decode: dict[str, Any], prefill: dict[str, Any]) -> FencedError:
    """Asks a decode worker, past the router, to work with a prefill worker; returns how it refuses."""
    request = decode_service_pb2.GenerateRequest(
        request=spec_to_proto(spec((5, 6, 7)), decode["fingerprint"]),
        decode_incarnation=decode["incarnation"],
        prefill=identity_pb2.PeerRef(endpoint=prefill["endpoint"], incarnation=prefill["incarnation"]),
    )
    pool = ChannelPool()
    try:
        call = decode_service_pb2_grpc.DecodeServiceStub(pool.get(decode["endpoint"])).Generate(request, timeout=10.0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    finally:
        await pool.close()
    error = from_rpc_error(caught.value, Leg.UNKNOWN)
    assert isinstance(error, FencedError), error
    return error


async def test_strangers_are_not_paired_and_the_difference_is_named() -> None:
    """Block size apart, then weights apart: two decode workers, neither of which fits the prefill worker."""
    overrides: dict[str, dict[str, Any]] = {
        "prefill-0": {"block_size": 16},
        "decode-0": {"block_size": 32},
        "decode-1": {"block_size": 16, "model": str(tiny_model(seed=1))},
    }
    async with Mesh(tiny_model(), prefill=1, decode=2, router=False, overrides=overrides) as mesh:
        await mesh.start("router")
        prefill, sizes, weights = [await mesh.rank(name) for name in ("prefill-0", "decode-0", "decode-1")]
        assert len({rank["fingerprint"] for rank in (prefill, sizes, weights)}) == 3

        for stream in (False, True):
            answer = await complete(mesh, stream=stream)
            assert answer.status_code == 503, answer.text
            error = answer.json()["error"]
            assert (error["param"], error["code"], error["type"]) == (
                "block_size", "fingerprint_mismatch", "server_error",
            )  # fmt: skip
            assert "block_size is 16 at prefill-0 and 32 at decode-0" in error["message"]
            assert int(answer.headers["retry-after"]) >= 1
        async with httpx.AsyncClient(timeout=10.0, trust_env=False) as client:
            ready = await client.get(f"{mesh.url}/readiness")
            assert ready.status_code == 503

        error = await force(mesh, sizes, prefill)
        assert (error.leg, error.reason) == (Leg.PREFILL, "FINGERPRINT_MISMATCH") and "block_size" in error.message
        error = await force(mesh, weights, prefill)
        assert error.reason == "FINGERPRINT_MISMATCH" and "checkpoint" in error.message

        mesh.kill("decode-0", signal.SIGTERM)
        assert (await mesh.gone("decode-0")).code == 0
        answer = await complete(mesh)
        assert (answer.status_code, answer.json()["error"]["param"]) == (503, "checkpoint"), answer.text
        assert "checkpoint is " in answer.json()["error"]["message"]

        for rank in (await mesh.status())["ranks"]:
            assert rank["pairs"] == [], "a link between strangers"
            assert rank["counters"]["sessions_opened"] == (rank["instance"] == "decode-1")  # refused after entering
            assert rank["kv"]["free"] == rank["kv"]["total"]


@pytest.mark.slow
async def test_two_families_share_a_mesh_without_mixing() -> None:
    """An upgrade: new pairs beside old ones."""
    sizes = {"prefill-0": 16, "prefill-1": 32, "decode-0": 16, "decode-1": 32}
    overrides = {name: {"block_size": size} for name, size in sizes.items()}
    draw = random.Random(3)
    async with Mesh(tiny_model(), prefill=2, decode=2, overrides=overrides) as mesh:
        pairs: Counter[tuple[str, str]] = Counter()
        for _ in range(40):
            answer = await complete(mesh, [draw.randrange(3, 300) for _ in range(40)])
            assert answer.status_code == 200, answer.text
            pairs[answer.json()["prefill_instance"], answer.json()["decode_instance"]] += 1
        assert set(pairs) == {("prefill-0", "decode-0"), ("prefill-1", "decode-1")}, pairs
        links = {(r["instance"], p["peer_instance"]) for r in (await mesh.status())["ranks"] for p in r["pairs"]}
        assert {tuple(sorted(link)) for link in links} == {("decode-0", "prefill-0"), ("decode-1", "prefill-1")}
