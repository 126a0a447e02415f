"""SIGSTOP of a prefill worker in the middle of a push; its copy goes on when it wakes up, long after.

The script holds a push of prefill-0, and lets it go on whatever is cancelled meanwhile: the latest copy
that a stopped process can make. Its request gives it up, and goes on over prefill-1. Others fill every block
of decode's pool that is not quarantined, over prefill-1 too. Then prefill-0 wakes up and writes: no other
request's text is touched, and what was quarantined comes back when quiet is proved.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.runtime.channels import ChannelPool
from tests.support.churn import assert_whole
from tests.support.load import Answer, Ask, Load, run_all, send
from tests.support.mesh import Mesh
from tests.support.models import tiny_model
from tests.support.serving import LIMIT, until

pytestmark = pytest.mark.timeout(400)

POOL_BLOCKS = 40
PROMPT, OUTPUT = 100, 40
VICTIM_BLOCKS = -(-(PROMPT + OUTPUT - 1) // 16)
"""Blocks that decode reserves for it, room for its growth included."""


def asks(count: int, max_tokens: int, seed: int, *, spread: int = 1) -> list[Ask]:
    """Random prompts of PROMPT tokens and up to `spread` - 1 more."""
    draw = random.Random(seed)
    return [Ask(tuple(draw.randrange(3, 300) for _ in range(PROMPT + i % spread)), max_tokens) for i in range(count)]


OTHERS = asks(12, 100, seed=1, spread=12)


class Stage:
    """A mesh whose prefill-0 can be made to hold its pushes."""

    def __init__(self, directory: Path, transport: str) -> None:
        self.hold, self.go = directory / "hold", directory / "go"
        self.held = directory / "go.held"
        rule = {"action": "hold_until_file", "path": str(self.go), "when": str(self.hold), "stubborn": True}
        script = {"transport": transport, "rules": [rule]}
        self.mesh = Mesh(
            tiny_model(),
            prefill=2,
            decode=1,
            options={
                "transfer_backend": "scripted",
                "transfer_script": json.dumps({"transport": transport}),
                "kv_progress_timeout": 3.0,
                "queue_timeout": 8.0,
                "lease_ttl": 2.0,
                "lease_renewal": 0.4,
            },
            overrides={
                "prefill-0": {"transfer_script": json.dumps(script)},
                "decode-0": {"kv_tokens": POOL_BLOCKS * 16},
            },
        )

    async def victim(self, client: httpx.AsyncClient) -> asyncio.Task[Answer]:
        """A request that has token 1 and whose push hangs at prefill-0."""
        self.hold.touch()
        for ask in asks(50, OUTPUT, seed=2):
            tokens = asyncio.Event()

            def seen(answer: Answer, tokens: asyncio.Event = tokens) -> None:
                if answer.token_ids:
                    tokens.set()

            task = asyncio.create_task(send(client, self.mesh.url, ask, on_event=seen))
            await until(lambda done=task: self.held.exists() or done.done(), "held, or served by prefill-1", LIMIT)
            if self.held.exists():
                async with asyncio.timeout(LIMIT):
                    await tokens.wait()
                return task
        raise AssertionError("no request came to prefill-0")

    async def quarantined(self) -> int:
        return int((await self.mesh.rank("decode-0"))["kv"]["quarantined"])


@pytest.mark.parametrize(
    ("transport", "parts"),
    [
        ("shm", "engine"),
        pytest.param("shm", "service", marks=pytest.mark.slow),
        pytest.param("shm", "both", marks=pytest.mark.slow),
        pytest.param("tcp", "engine", marks=pytest.mark.slow),
        pytest.param("tcp", "both", marks=pytest.mark.slow),
    ],
)
async def test_a_prefill_worker_is_stopped_mid_push_and_wakes_up(tmp_path: Path, transport: str, parts: str) -> None:
    stage = Stage(tmp_path, transport)
    async with stage.mesh as mesh, httpx.AsyncClient(timeout=60.0, trust_env=False) as client:
        calm = await run_all(mesh.url, OTHERS)
        rank = await mesh.rank("prefill-0")
        pids = [rank["engine_pid"]] * (parts != "service") + [rank["pid"]] * (parts != "engine")
        running = await stage.victim(client)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        stage.hold.unlink()
        try:
            victim = await asyncio.wait_for(running, LIMIT)
            assert_whole([victim], tiny_model())
            if transport == "shm":
                # Nobody can prove that the stopped one will not write: its blocks stay out.
                assert await settled(stage) == VICTIM_BLOCKS
            else:
                # The own reader dropped the session: what still comes is thrown away.
                assert await settled(stage) == 0

            async with Load(mesh.url, OTHERS, width=6) as load:
                await load.until(lambda: sum(a.ok for a in load.answers) >= 12, "the pool is used up")
                await load.until(lambda: load.streaming(5) >= 2, "others hold its blocks")
                stage.go.touch()
                for pid in pids:
                    os.kill(pid, signal.SIGCONT)
                woken = time.monotonic()

                async def quiet() -> bool:
                    return await stage.quarantined() == 0

                await until(quiet, "quiet is proved", LIMIT)
                await load.until(lambda: load.right_since(woken) >= 6, "others go on")
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        assert_whole(load.answers, tiny_model(), calm)

        async def both_serve() -> bool:
            return bool((await generate(client, mesh, OTHERS[0]))["prefill_instance"] == "prefill-0")

        await until(both_serve, "prefill-0 serves again", LIMIT)
        assert (await mesh.rank("prefill-0"))["incarnation"] == rank["incarnation"]
        assert await run_all(mesh.url, OTHERS) == calm


async def test_a_call_to_a_process_that_stands_still_ends() -> None:
    """Its kernel still answers for it; only pings tell. Without them a call would wait for its deadline."""
    async with Mesh(tiny_model(), prefill=0, decode=0, router=False) as mesh:
        pool = ChannelPool()
        try:
            stub = health_pb2_grpc.HealthStub(pool.get(mesh.bootstrap))
            call = stub.Watch(health_pb2.HealthCheckRequest(), timeout=100.0)
            assert (await call.read()).status == health_pb2.HealthCheckResponse.SERVING
            os.kill(mesh.pid("bootstrap"), signal.SIGSTOP)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        finally:
            os.kill(mesh.pid("bootstrap"), signal.SIGCONT)
            await pool.close()


@pytest.mark.slow
async def test_prompts_that_a_stopped_engine_never_starts_are_computed_elsewhere() -> None:
    """Its service process still answers and renews the lease; the request waits queue_timeout, once."""
    options = {"queue_timeout": 2.0, "kv_tokens": 4096}
    async with Mesh(tiny_model(), prefill=2, decode=1, options=options) as mesh:
        async with httpx.AsyncClient(timeout=60.0, trust_env=False) as client:
            calm = [(await generate(client, mesh, ask))["output_ids"] for ask in OTHERS]
            engine = (await mesh.rank("prefill-0"))["engine_pid"]
            os.kill(engine, signal.SIGSTOP)
            try:
                answers = await asyncio.gather(*(generate(client, mesh, ask) for ask in OTHERS))
            finally:
                os.kill(engine, signal.SIGCONT)
        assert [a["output_ids"] for a in answers] == calm
        assert {a["prefill_instance"] for a in answers} == {"prefill-1"}
        assert {a["attempts"] for a in answers} == {1, 2}


async def settled(stage: Stage) -> int:
    """Quarantined blocks once the victim's session is all that decode has, or is gone."""

    async def alone() -> bool:
        rank = await stage.mesh.rank("decode-0")
        return bool(rank["streams"] == 0 and rank["kv"]["used"] == 0 and rank["sessions"] <= 1)

    await until(alone, "the victim alone", LIMIT)
    return await stage.quarantined()


async def generate(client: httpx.AsyncClient, mesh: Mesh, ask: Ask) -> Any:
    body = {"input_ids": list(ask.prompt), "max_tokens": 4, "ignore_eos": True, "temperature": 0}
    answer = await client.post(f"{mesh.url}/generate", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()
