"""Pools of any sizes, and workers that change what they do while requests run."""

from __future__ import annotations

import time

import httpx
import pytest

from engine_core.types.request import Role
from tests.support.asking import until_async
from tests.support.churn import assert_whole, changed, some_asks
from tests.support.load import Load, run_all
from tests.support.mesh import Mesh
from tests.support.models import tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ASKS = some_asks(8, 120)


async def roles(mesh: Mesh) -> dict[str, str]:
    return {r["instance"]: r["role"] for r in (await mesh.status())["ranks"] if r["state"] == "READY"}


async def test_three_prefills_and_one_decode_become_one_and_three() -> None:
    """3P1D → 2P2D → 1P3D → with a MIXED one, live; each shape serves, and no request fails."""
    async with Mesh(tiny_model(), prefill=3, decode=1, options={"kv_tokens": 16384}) as mesh:
        calm = await run_all(mesh.url, ASKS)
        pids = mesh.pids
        async with Load(mesh.url, ASKS, width=5) as load:
            await load.until(lambda: load.streaming(2) >= 3, "streams run")
            for name, role in (("prefill-1", Role.DECODE), ("prefill-2", Role.DECODE), ("prefill-1", Role.MIXED)):
                await changed(mesh, name, role, limit=1.0)
                assert (await roles(mesh))[name] == role
                now = time.monotonic()
                await load.until(lambda t=now: load.right_since(t) >= 3, f"{name} is {role}")

                async def serves(name: str = name) -> bool:
                    return bool((await mesh.rank(name))["counters"]["sessions_opened"])

                await until_async(serves, 30.0, lambda n=name: f"{n} is placed upon")
        assert await roles(mesh) == {
            "prefill-0": "PREFILL", "prefill-1": "MIXED", "prefill-2": "DECODE", "decode-0": "DECODE",
        }  # fmt: skip
        assert mesh.pids == pids, "a process was started anew"
        assert_whole(load.answers, tiny_model(), calm)
        assert await run_all(mesh.url, ASKS) == calm


async def test_pressure_moves_a_worker_to_where_it_is_missing() -> None:
    """With --auto-role at Bootstrap: prompts pile up before the one prefill worker, and a decode worker of three
    turns into a second one; once, and the calm that follows changes nothing."""
    options = {"kv_tokens": 16384, "max_batch_tokens": 32, "max_in_flight": 64, "pool_headroom": 0}
    auto = {
        "auto_role": True, "auto_role_high": 2.0, "auto_role_low": 1.0, "auto_role_hold": 1.0,
        "auto_role_cooldown": 600.0, "auto_role_limit": 1.0, "lease_renewal": 0.3,
    }  # fmt: skip
    asks = [*some_asks(40, 2, seed=3, longest=600)]
    async with Mesh(tiny_model(), prefill=1, decode=3, options=options, overrides={"bootstrap": auto}) as mesh:
        async with Load(mesh.url, asks, width=40) as load:

            async def two_prefills() -> bool:
                return sorted((await roles(mesh)).values()) == ["DECODE", "DECODE", "PREFILL", "PREFILL"]

            await until_async(two_prefills, 90.0, lambda: "\n".join(mesh.lines("bootstrap")))
            now = time.monotonic()
            await load.until(lambda: load.right_since(now) >= 10, "it goes on")
        assert_whole(load.answers, tiny_model())
        assert sum("changes its role" in line for line in mesh.lines("bootstrap")) == 1
        async with httpx.AsyncClient(trust_env=False) as client:
            assert (await client.get(f"{mesh.url}/readiness")).status_code == 200
