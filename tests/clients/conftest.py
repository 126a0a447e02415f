"""One mesh of the demo model for all clients. Tests that use it run on the session's event loop:

pytestmark = pytest.mark.asyncio(loop_scope="session")
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from tests.support.asking import Asker
from tests.support.clients import Ended, greedy_model, run
from tests.support.mesh import Mesh
from tests.support.models import demo_model

KEY = "sk-of-the-narrow-router"


@dataclass
class Clients:
    """The mesh: an open router, and one that asks for a key, serves one request and lets none wait."""

    mesh: Mesh
    asker: Asker
    model: Path
    folder: Path

    @property
    def url(self) -> str:
        """What an OpenAI client takes."""
        return self.mesh.base_url

    @property
    def narrow_url(self) -> str:
        return f"{self.mesh.url_of('router-1')}/v1"

    async def run(self, command: Sequence[str], within: float = 240.0, **variables: str) -> Ended:
        """Runs a client in a folder of its own."""
        folder = self.folder / f"client-{len(list(self.folder.iterdir()))}"
        folder.mkdir()
        return await run(command, folder, within, **variables)

    async def metric(self, series: str) -> float:
        """What the open router tells of a series; 0 before it is there."""
        async with httpx.AsyncClient(timeout=60.0, trust_env=False) as client:
            lines = (await client.get(f"{self.mesh.url}/metrics")).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{series} "))

    async def cancelled(self, request_id: str) -> None:
        """Waits until a request whose client has gone is over for the router and for decode."""
        for machine in ("router_request", "decode_request"):
            await self.asker.until_state(request_id, machine, "CANCELLED")


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def clients(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Clients]:
    folder = tmp_path_factory.mktemp("clients")
    keys = folder / "keys"
    keys.write_text(KEY)
    model = greedy_model(demo_model(), folder / "SmolLM2-135M-Instruct")
    # What one request may be long is bounded by the pools.
    options = {"kv_tokens": 1536, "threads": 2, "max_batch_tokens": 512}
    narrow = {"api_key_file": str(keys), "max_in_flight": 1, "max_queued": 0}
    async with Mesh(model, routers=2, options=options, overrides={"router-1": narrow}) as mesh, Asker(mesh) as asker:
        yield Clients(mesh, asker, model, folder)
