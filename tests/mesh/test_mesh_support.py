"""The meshes that tests start are real: processes die, come back on their ports, and are accounted for."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx
import pytest

from models.tiny import make_tiny
from tests.support.mesh import Mesh


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("mesh") / "tiny-llama")


async def complete(mesh: Mesh, prompt: str = "hello") -> httpx.Response:
    async with httpx.AsyncClient(timeout=30.0, trust_env=False) as client:
        body = {"model": "default", "prompt": prompt, "max_tokens": 6, "ignore_eos": True}
        return await client.post(f"{mesh.base_url}/completions", json=body)


async def test_a_prefill_worker_dies_and_comes_back_on_its_port(model: Path) -> None:
    async with Mesh(model, overrides={"prefill": {"max_batch_tokens": 32}}) as mesh:
        assert set(mesh.pids) == {"bootstrap", "router", "prefill-0", "decode-0"}
        assert (await complete(mesh)).json()["usage"]["completion_tokens"] == 6
        before = await mesh.rank("prefill-0")

        mesh.kill("prefill-0")
        end = await mesh.gone("prefill-0")
        assert end.reason == "killed by SIGKILL"
        await mesh.start("prefill-0")
        await mesh.until_ready()

        after = await mesh.rank("prefill-0")
        assert after["endpoint"] == before["endpoint"] == mesh.endpoint("prefill-0")
        assert after["incarnation"] > before["incarnation"]
        answer = await complete(mesh)
        assert answer.status_code == 200, answer.text
        timeline = await mesh.explain(answer.headers["x-request-id"])
        assert {move["process"] for move in timeline["moves"]} == {"router", "prefill-0", "decode-0"}
        await mesh.quiet()


@pytest.mark.slow
async def test_a_dead_engine_ends_its_service_process(model: Path) -> None:
    async with Mesh(model, prefill=0, decode=0, mixed=1) as mesh:
        await mesh.kill_engine("mixed-0", signal.SIGKILL)
        assert (await mesh.gone("mixed-0")).code == 1
        await mesh.start("mixed-0")
        await mesh.until_ready()
        assert (await complete(mesh)).json()["usage"]["completion_tokens"] == 6
