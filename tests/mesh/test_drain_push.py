"""A prefill worker's drain is not over before its pushes are: what decode waits for still arrives."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest

from tests.support.asking import until_async
from tests.support.churn import assert_whole, drained, some_asks
from tests.support.load import send
from tests.support.mesh import Mesh
from tests.support.models import tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


async def test_a_drain_waits_for_a_push_that_is_under_way(tmp_path: Path) -> None:
    rule = {"action": "hold_until_file", "path": str(tmp_path / "go")}
    options = {"transfer_backend": "scripted", "transfer_script": json.dumps({"transport": "shm", "rules": [rule]})}
    async with (
        Mesh(tiny_model(), options=options) as mesh,
        httpx.AsyncClient(timeout=60.0, trust_env=False) as client,
    ):
        (ask,) = some_asks(1, 20, longest=100)
        running = asyncio.ensure_future(send(client, mesh.url, ask))
        await until_async(lambda: _there(tmp_path / "go.held"), 30.0)
        await drained(mesh, "prefill-0", wait=False, stop=True)

        async def waits() -> bool:
            rank = await mesh.rank("prefill-0")
            return bool(rank["drain_note"] == "waits for 1 streams" and rank["health"] == "NOT_SERVING")

        await until_async(waits, 20.0)
        rank = await mesh.rank("prefill-0")
        assert (rank["drained"], rank["streams"], rank["sessions"]) == (False, 1, 1)
        (tmp_path / "go").touch()
        assert (await mesh.gone("prefill-0")).code == 0
        assert_whole([await running], tiny_model())
        assert not any("REPLANNED" in str(move) for move in (await mesh.explain((await running).request_id))["moves"])


async def _there(path: Path) -> bool:
    return path.exists()
