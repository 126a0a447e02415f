"""Requests that crash engines: given up after two, and nobody else is taken for one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.asking import Asker, random_prompt
from tests.support.mesh import Mesh
from tests.support.models import tiny_model
from tests.support.oracle import oracle_for

pytestmark = pytest.mark.timeout(300)

POISON = random_prompt(22, 1)
AT_POISON = {"position": len(POISON)}
"""What only the poison meets: nobody else draws a token at that position."""
WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")


@asynccontextmanager
async def mesh_with(*rules: dict[str, Any], **layout: Any) -> AsyncIterator[tuple[Mesh, Asker]]:
    script = json.dumps({"rules": rules})
    options = {"kv_tokens": 4096, "policy": "round_robin", "fault_script": script}
    async with Mesh(tiny_model("llama"), options=options, **layout) as mesh, Asker(mesh) as asker:
        mesh._killed |= set(WORKERS)
        yield mesh, asker


async def down(mesh: Mesh, names: Sequence[str], count: int) -> list[str]:
    """The workers that have ended, once there are so many."""
    async with asyncio.timeout(60):
        while len(gone := [name for name in names if not mesh.pid(name)]) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    return gone


async def refusals(mesh: Mesh) -> dict[str, float]:
    """Why the router has given up, and how often."""
    async with httpx.AsyncClient(trust_env=False) as client:
        lines = (await client.get(f"{mesh.url}/metrics")).text.splitlines()
    name = 'pdmesh_router_retries_refused_total{why="'
    return {x.removeprefix(name).partition('"')[0]: float(x.split()[-1]) for x in lines if x.startswith(name)}


@pytest.mark.parametrize("action", ["segv", pytest.param("raise", marks=pytest.mark.slow)])
async def test_a_poisonous_prompt_is_given_up_after_two_engines(action: str, tmp_path: Path) -> None:
    """Both prefill engines die of it. Streams that are under way go on once they are back; those that were asked
    in the same moment are served, and it is never tried again."""
    async with mesh_with({**AT_POISON, "action": action}, prefill=2, decode=2) as (mesh, asker):
        before = {name: mesh.pid(name) for name in WORKERS}
        streams = [asker.start(random_prompt(30 + i, i), max_tokens=300, ignore_eos=True) for i in range(4)]
        for stream in streams:
            await stream.tokens(1)
        bad = asker.start(POISON, stream=False, max_tokens=5)
        gone = await down(mesh, WORKERS, 1)
        await mesh.start(gone[0])
        await bad.whole()
        assert (bad.answer.status, bad.answer.error and bad.answer.error["code"]) == (500, "poison"), bad.answer
        assert bad.answer.error is not None and "crashed 2 engines" in bad.answer.error["message"]
        for name in WORKERS:
            if not mesh.pid(name):
                await mesh.start(name)
        for stream in streams:
            answer = await stream.whole()
            assert answer.ok and len(answer.ids) == 300, answer
            oracle_for(tiny_model("llama")).assert_right([answer.claim()])
        changed = {name for name in WORKERS if mesh.pid(name) != before[name]}
        assert changed == {"prefill-0", "prefill-1"}, "the rest of the fleet is whole"
        # Asked again, as clients do: refused, and nobody dies.
        pids = mesh.pids
        for again in (asker.start(POISON, stream=s, max_tokens=5) for s in (True, False)):
            answer = await again.whole()
            assert (answer.status, answer.error and answer.error["code"]) == (500, "poison"), answer
        assert mesh.pids == pids
        assert await refusals(mesh) == {"poison": 1.0}


@pytest.mark.slow
async def test_an_output_that_crashes_decode_at_each_step_is_given_up(tmp_path: Path) -> None:
    """A prefill worker adds a token to each attempt: that does not make it a success."""
    rules = [{"position": p, "phase": "decode", "action": "segv"} for p in range(43, 60)]
    async with mesh_with(*rules, decode=2) as (mesh, asker):
        bad = asker.start(random_prompt(40, 1), max_tokens=30, ignore_eos=True, temperature=0.9, seed=4)
        await bad.whole()
        assert bad.answer.status == 200 and bad.answer.error is not None
        # Of the three tokens that attempt 0 drew, some may have been on their way when it crashed.
        assert bad.answer.error["code"] == "poison" and 1 <= len(bad.answer.ids) <= 4
        assert await down(mesh, ("decode-0", "decode-1"), 2) == ["decode-0", "decode-1"]
        for name in ("decode-0", "decode-1"):
            await mesh.start(name)
        other = await asker.generate(random_prompt(20, 2), max_tokens=10)
        assert other.ok


@pytest.mark.slow
async def test_who_is_killed_twice_is_no_poison(tmp_path: Path) -> None:
    """kill -9 in its step, twice, without a token between: somebody's doing, and not the request's."""
    rules = [{"position": 45, "action": "kill", "once": str(tmp_path / f"once-{i}")} for i in range(3)]
    async with mesh_with(*rules, prefill=2, decode=2) as (mesh, asker):
        asked = asker.start(random_prompt(40, 1), max_tokens=20, ignore_eos=True)
        for _ in range(3):
            gone = await down(mesh, WORKERS, 1)
            await mesh.start(gone[0])
        answer = await asked.whole()
        assert answer.ok and len(answer.ids) == 20 and answer.attempts >= 4, answer
        oracle_for(tiny_model("llama")).assert_right([answer.claim()])


async def test_numbers_that_are_none_fail_their_request_alone() -> None:
    async with mesh_with({**AT_POISON, "action": "nan"}, mixed=1, prefill=0, decode=0) as (mesh, asker):
        pids = mesh.pids
        fine = asker.start(random_prompt(30, 1), max_tokens=200, ignore_eos=True)
        await fine.tokens(1)
        bad = await asker.start(POISON, stream=False, max_tokens=5).whole()
        assert (bad.status, bad.error and bad.error["code"]) == (500, "numbers"), bad
        answer = await fine.whole()
        assert answer.ok and len(answer.ids) == 200
        assert mesh.pids == pids
        assert await refusals(mesh) == {}
