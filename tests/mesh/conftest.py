"""Meshes that the tests of several modules share. Tests that use them run on the session's event loop:

pytestmark = pytest.mark.asyncio(loop_scope="session")
"""

from __future__ import annotations

import functools
import json
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from tests.support.asking import Answer, Asker, random_prompt
from tests.support.mesh import Mesh
from tests.support.models import tiny_model
from tests.support.oracle import Oracle, oracle_for

torch.set_num_threads(1)
"""For the oracle: the mesh's own processes want the cores."""

BLOCK_BYTES = 3 * 2 * 16 * 2 * 16 * 4
"""Of a tiny float32 model: layers, K and V, tokens, heads, head size, bytes."""


EOS = 2


@dataclass
class Pushed:
    """What all prefill workers of a mesh have delivered."""

    sessions: int
    bytes: int
    failures: int
    transports: set[str]


@dataclass
class Served:
    """A mesh with its client and its oracle."""

    mesh: Mesh
    asker: Asker
    oracle: Oracle
    model: Path

    async def pushed(self, since: Pushed | None = None, sessions: int = 0) -> Pushed:
        """Counts once all is quiet; with `since`, what was moved since then, by so many sessions.

        Raises AssertionError when there were fewer or more, or a push failed meanwhile.
        """
        ranks = [rank for rank in await self.mesh.quiet() if rank["role"] == "PREFILL"]
        pairs = [pair for rank in ranks for pair in rank["pairs"] if pair["up"]]
        now = Pushed(
            sum(int(rank["counters"].get("delivered", 0)) for rank in ranks),
            sum(pair["bytes"] for pair in pairs),
            sum(pair["failures"] for pair in pairs),
            {pair["transport"] for pair in pairs},
        )
        if since is None:
            return now
        assert (now.sessions, now.failures) == (since.sessions + sessions, since.failures), (since, now)
        return Pushed(sessions, now.bytes - since.bytes, 0, now.transports)


def assert_right(served: Served, answers: Sequence[Answer], path: str = "pd", *, attempts: int = 1) -> None:
    """Equal to transformers but for ties, by the path that was to be shown, and ended for the right reason."""
    claims = [answer.claim() for answer in answers]
    served.oracle.assert_right(claims)
    for answer, claim in zip(answers, claims, strict=True):
        assert answer.path == path and answer.attempts <= attempts, answer
        reason = served.oracle.finish(claim)
        assert reason is not None and answer.finish_reason == reason.value, answer


@functools.cache
def prompt_that_ends_at_once(oracle: Oracle) -> tuple[int, ...]:
    """A prompt of 120 tokens whose greedy first token is EOS; with tiny_model("llama") seed 12411 gives one."""
    for first in range(12_400, 20_000, 20):
        prompts = [random_prompt(120, seed) for seed in range(first, first + 20)]
        with torch.inference_mode():
            best = oracle._model(torch.tensor(prompts), logits_to_keep=1).logits[:, -1].argmax(-1)
        found = (best == EOS).nonzero()
        if len(found):
            return prompts[int(found[0])]
    raise AssertionError("no prompt ends at once")


@asynccontextmanager
async def serve(model: Path, **layout: Any) -> AsyncIterator[Served]:
    """Starts a mesh."""
    async with Mesh(model, **layout) as mesh, Asker(mesh) as asker:
        yield Served(mesh, asker, oracle_for(model), model)


CHUNK = 48
"""Tokens per step of the prefill workers."""


def two_paths() -> dict[str, Any]:
    """prefill-0 pushes by shm, prefill-1 by tcp, and requests take turns."""
    return {
        "prefill": 2,
        "options": {"kv_tokens": 16384, "policy": "round_robin", "max_batch_tokens": CHUNK},
        "overrides": {
            "prefill-0": {"transfer_backend": "shm"},
            "prefill-1": {"transfer_backend": "tcp"},
            "decode": {"max_batch_tokens": 512},
        },
    }


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def llama() -> AsyncIterator[Served]:
    """Two prefill workers, shm and tcp, and a decode worker."""
    async with serve(tiny_model("llama"), **two_paths()) as served:
        yield served


FAULTS = ("fail", "short", "short_silent", "corrupt", "lose")


class Script:
    """Switches of the scripted transport: what a push suffers while a switch is on."""

    def __init__(self, folder: Path, transport: str) -> None:
        self.folder, self.transport = folder, transport
        self._gate = folder / "go"

    def as_json(self) -> str:
        """The rules for the prefill worker."""
        hold = {"action": "hold_until_file", "path": str(self._gate)}
        rules: list[dict[str, object]] = [
            {**hold, "when": str(self.folder / "hold")},
            {**hold, "stubborn": True, "when": str(self.folder / "stubborn")},
            {"action": "delay", "seconds": 0.3, "when": str(self.folder / "delay")},
            *(
                {"action": a, "when": str(self.folder / a)}
                for a in ("fail", "short", "short_silent", "corrupt", "lose")
            ),
        ]
        return json.dumps({"transport": self.transport, "rules": rules})

    def on(self, name: str) -> None:
        """From now on each push suffers this."""
        self._gate.unlink(missing_ok=True)
        (self.folder / name).touch()

    def off(self, name: str) -> None:
        """New pushes are as they should be; held ones are held on."""
        (self.folder / name).unlink(missing_ok=True)

    def release(self) -> None:
        """All switches are off, and what is held goes on."""
        for path in self.folder.iterdir():
            path.unlink()
        self._gate.touch()

    @property
    def held(self) -> bool:
        """True when a push was held since the last release."""
        return (self.folder / "go.held").exists()


@dataclass
class Scripted(Served):
    """A mesh whose pushes do as they are told."""

    script: Script


SMALL_POOL = 64
"""Blocks of the scripted mesh's decode worker."""


@asynccontextmanager
async def serve_scripted(script: Script, progress_timeout: float) -> AsyncIterator[Scripted]:
    """One pair with a small decode pool, slow prompts, and a router that serves four requests at once."""
    options = {
        "transfer_backend": "scripted", "transfer_script": script.as_json(), "verify_kv": True, "kv_tokens": 4096,
        "max_batch_tokens": 2, "max_in_flight": 4, "kv_progress_timeout": progress_timeout,
    }  # fmt: skip
    overrides = {
        "decode": {"kv_tokens": 16 * SMALL_POOL, "max_batch_tokens": 512},
        "router": {"pool_headroom": 0.0},  # more may come than fits: workers show how they queue
    }
    model = tiny_model("llama")
    async with Mesh(model, options=options, overrides=overrides) as mesh, Asker(mesh) as asker:
        yield Scripted(mesh, asker, oracle_for(model), model, script)


TRANSPORTS = ["shm", pytest.param("tcp", marks=pytest.mark.slow)]
"""Below the scripted transport."""


@pytest_asyncio.fixture(scope="package", loop_scope="session", params=TRANSPORTS)
async def scripted_mesh(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Scripted]:
    """Tests hold its pushes for as long as they like."""
    async with serve_scripted(Script(tmp_path_factory.mktemp("script"), request.param), 120.0) as served:
        yield served


@pytest_asyncio.fixture(loop_scope="session")
async def scripted(scripted_mesh: Scripted) -> AsyncIterator[Scripted]:
    """The scripted mesh with all switches off, before and after; quiet in the end."""
    scripted_mesh.script.release()
    yield scripted_mesh
    scripted_mesh.script.release()
    for name in ("prefill-0", "decode-0"):  # whatever a failed test has left stopped
        await scripted_mesh.mesh.kill_engine(name, signal.SIGCONT)
    await scripted_mesh.mesh.quiet()
    await scripted_mesh.asker.router_idle()


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def small_mesh() -> AsyncIterator[Mesh]:
    """One pair over tcp whose pools hold 256 tokens; for what must not get in."""
    overrides = {"prefill": {"transfer_backend": "tcp"}}
    async with Mesh(tiny_model("llama"), options={"kv_tokens": 256}, overrides=overrides) as mesh:
        yield mesh
