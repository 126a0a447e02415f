"""More than half of a decode pool without a proof of quiet: the worker hands its streams over and starts anew."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest

from engine_core.types.request import Role
from tests.support.asking import until_async
from tests.support.churn import assert_whole, changed, drained
from tests.support.load import Answer, Ask, send
from tests.support.mesh import Mesh
from tests.support.models import tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

BLOCKS = 300
LONG = Ask(tuple(range(3, 13)), 1400)
"""89 blocks, of a request that is long done with its prefill."""
VICTIMS = [Ask(tuple((i * seed) % 290 + 3 for i in range(1600)), 8) for seed in (7, 11)]
"""101 blocks each, whose pushes are held whatever is aborted: more than half of the pool stays quarantined."""


async def test_streams_go_on_elsewhere(tmp_path: Path) -> None:
    hold, go = tmp_path / "hold", tmp_path / "go"
    rule = {"action": "hold_until_file", "path": str(go), "when": str(hold), "stubborn": True}
    scripts = {
        name: {"transfer_script": json.dumps({"transport": "shm", "rules": rules})}
        for name, rules in (("prefill-0", [rule]), ("prefill-1", []))
    }
    options = {
        "transfer_backend": "scripted", "transfer_script": json.dumps({"transport": "shm"}),
        "kv_progress_timeout": 0.5, "max_batch_tokens": 256,
    }  # fmt: skip
    overrides = {**scripts, "decode-0": {"kv_tokens": BLOCKS * 16}}
    async with (
        Mesh(tiny_model(), prefill=2, decode=2, options=options, overrides=overrides) as mesh,
        httpx.AsyncClient(timeout=100.0, trust_env=False) as client,
    ):
        await drained(mesh, "prefill-1", "decode-1")
        told: list[int] = []
        running = [_ask(client, mesh, LONG, told)]
        try:
            await until_async(lambda: _at_least(told, 3), 30.0)
            hold.touch()
            running += [_ask(client, mesh, ask, []) for ask in VICTIMS]
            end = await mesh.gone("decode-0", 60.0)
            assert end.code == 1 and "of the KV cache waits for a proof of quiet" in end.message, end
            given = [line for line in mesh.lines("decode-0") if "HANDOVER" in line]
            assert len(given) >= len(VICTIMS), "\n".join(mesh.lines("decode-0"))
            hold.unlink()
            for name, role in (("prefill-1", Role.PREFILL), ("decode-1", Role.DECODE)):
                await changed(mesh, name, role)
            answers = await asyncio.gather(*running)
        finally:
            hold.unlink(missing_ok=True)
            go.touch()
        assert_whole(answers, tiny_model())
        await mesh.start("decode-0")


def _ask(client: httpx.AsyncClient, mesh: Mesh, ask: Ask, told: list[int]) -> asyncio.Task[Answer]:
    return asyncio.ensure_future(
        send(client, mesh.url, ask, on_event=lambda answer: told.append(len(answer.token_ids)))
    )


async def _at_least(told: list[int], count: int) -> bool:
    return len(told) >= count
