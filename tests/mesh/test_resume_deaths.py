"""Deaths of real engines under running streams: in every state, and, where there is time, at every token."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.support.asking import TIMEOUT, Asker, Asking, random_prompt, until
from tests.support.mesh import Mesh
from tests.support.models import tiny_model
from tests.support.oracle import Oracle, oracle_for

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

SMALL = 10
"""Blocks of each decode worker: two short outputs fit, two of more than 80 tokens don't."""


@dataclass
class Mortal:
    """A mesh whose pushes can be held, with decode workers that run out of blocks."""

    mesh: Mesh
    asker: Asker
    oracle: Oracle
    folder: Path

    def hold(self) -> None:
        """Pushes that begin from now on wait."""
        (self.folder / "go").unlink(missing_ok=True)
        (self.folder / "hold").touch()

    def release(self) -> None:
        """They go on."""
        (self.folder / "hold").unlink(missing_ok=True)
        (self.folder / "go").touch()

    async def decode_of(self, asking: Asking) -> str:
        """Where an attempt was placed last."""
        moves = await self.asker.moves(asking.request_id)
        return str([m["reason"] for m in moves if m["to"] == "PLACED"][-1].partition(" + ")[2])

    def slow(self) -> None:
        """Decode steps take their time, so that what is seen is still so a moment later."""
        (self.folder / "slow").touch()

    async def kill_and_restart(self, name: str) -> None:
        """kill -9 of the engine; its process ends with it, and a new one takes the name."""
        await self.mesh.kill_engine(name)
        (self.folder / "slow").unlink(missing_ok=True)
        await self.mesh.gone(name)
        await self.mesh.start(name)

    def check(self, *asked: Asking) -> None:
        """All are right, and at least one has been on two workers."""
        answers = [a.answer for a in asked]
        assert all(a.ok for a in answers), answers
        self.oracle.assert_right([a.claim() for a in answers])
        assert [len(a.ids) for a in answers] == [a.options["max_tokens"] for a in answers]
        assert max(a.attempts for a in answers) > 1, answers


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mortal(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mortal]:
    folder = tmp_path_factory.mktemp("mortal")
    rule = {"action": "hold_until_file", "path": str(folder / "go"), "when": str(folder / "hold")}
    overrides: dict[str, dict[str, Any]] = {
        "prefill": {
            "transfer_backend": "scripted",
            "transfer_script": json.dumps({"transport": "shm", "rules": [rule]}),
        },
        # One token per step: whoever joins beside another stays READY until that one has ended.
        "decode": {
            "kv_tokens": 16 * SMALL,
            "max_batch_tokens": 1,
            "transfer_backend": "scripted",
            "fault_script": json.dumps({"rules": [{"action": "slow", "when": str(folder / "slow")}]}),
        },
        "router": {"pool_headroom": 0.0},
    }
    options = {"kv_tokens": 4096, "policy": "round_robin", "kv_progress_timeout": 60.0}
    model = tiny_model("llama")
    async with Mesh(model, decode=2, options=options, overrides=overrides) as mesh, Asker(mesh) as asker:
        yield Mortal(mesh, asker, oracle_for(model), folder)


def ask(mortal: Mortal, length: int, text: int, max_tokens: int, **options: Any) -> Asking:
    return mortal.asker.start(random_prompt(length, text), max_tokens=max_tokens, ignore_eos=True, **options)


async def test_decode_dies_between_token_1_and_delivered(mortal: Mortal) -> None:
    mortal.hold()
    asked = ask(mortal, 60, 1, 20)
    await asked.tokens(1)
    await mortal.asker.until_state(asked.request_id, "decode_request", "AWAITING_KV")
    victim = await mortal.decode_of(asked)
    (mortal.folder / "hold").unlink()  # what is held stays held
    await mortal.kill_and_restart(victim)
    await asked.whole()
    mortal.release()
    mortal.check(asked)


@pytest.mark.slow
async def test_the_only_prefill_dies_between_token_1_and_delivered(mortal: Mortal) -> None:
    """The stream waits until it is back; who has no token yet is told so."""
    mortal.hold()
    asked = ask(mortal, 61, 2, 20)
    await asked.tokens(1)
    await mortal.asker.until_state(asked.request_id, "decode_request", "AWAITING_KV")
    (mortal.folder / "hold").unlink()
    await mortal.mesh.kill_engine("prefill-0")
    await mortal.mesh.gone("prefill-0")
    late = mortal.asker.start(random_prompt(10, 3), max_tokens=3)
    await late.whole()
    assert late.answer.status == 503 and not asked.done
    await mortal.mesh.start("prefill-0")
    await asked.whole()
    mortal.release()
    mortal.check(asked)


@pytest.mark.slow
async def test_decode_dies_with_one_that_decodes_and_one_that_is_ready(mortal: Mortal) -> None:
    mortal.release()
    mortal.slow()
    asked = [ask(mortal, 10 + i, 10 + i, 60, temperature=0.8, seed=i) for i in range(3)]
    waits = [mortal.asker.until_state(a.request_id, "decode_request", "READY") for a in asked]
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    done, rest = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    ready = asked[tasks.index(done.pop())]
    for task in rest:
        task.cancel()
    await mortal.kill_and_restart(await mortal.decode_of(ready))
    for one in asked:
        await one.whole()
    mortal.check(*asked)


@pytest.mark.slow
async def test_decode_dies_with_a_preempted_one(mortal: Mortal) -> None:
    """Whoever is younger gives its blocks to the older one, and dies waiting."""
    mortal.release()
    mortal.slow()
    asked = [ask(mortal, 10 + i, 20 + i, 120) for i in range(4)]
    seen: list[Asking] = []

    async def preempted() -> bool:
        for one in asked:
            moves = [m for m in await mortal.asker.moves(one.request_id) if m["machine"] == "decode_request"]
            if moves and moves[-1]["to"] == "PREEMPTED":
                seen.append(one)
                return True
            assert not all(a.done for a in asked), "nobody was preempted"
        return False

    while not await preempted():
        pass
    await mortal.kill_and_restart(await mortal.decode_of(seen[0]))
    for one in asked:
        await one.whole()
    mortal.check(*asked)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_an_engine_dies_at_every_token(tmp_path: Path) -> None:
    """Twelve outputs; at token k of output k the engine that draws it gets kill -9, be it prefill or decode."""
    lengths = [40 + 16 * at for at in range(12)]
    rules = [
        {"position": n + at, "action": "kill", "once": str(tmp_path / f"once-{at}")} for at, n in enumerate(lengths)
    ]
    options = {"kv_tokens": 4096, "policy": "round_robin", "fault_script": json.dumps({"rules": rules})}
    model = tiny_model("llama")
    oracle = oracle_for(model)
    async with Mesh(model, prefill=2, decode=2, options=options) as mesh, Asker(mesh) as asker:
        for at, length in enumerate(lengths):
            mesh._killed |= {"prefill-0", "prefill-1", "decode-0", "decode-1"}
            sampled: dict[str, Any] = {"temperature": 0.9, "seed": at} if at % 2 else {}
            asked = asker.start(
                random_prompt(length, at), max_tokens=12, ignore_eos=True, stream=at % 3 != 0, **sampled
            )
            answer = await asked.whole()
            assert answer.ok and (tmp_path / f"once-{at}").exists(), (at, answer)
            assert answer.attempts == 2 and len(answer.ids) == 12, (at, answer)
            oracle.assert_right([answer.claim()])
            await until(lambda: len(mesh.pids) < 6, TIMEOUT, lambda: f"a worker ends: {mesh.pids}")
            (dead,) = {"prefill-0", "prefill-1", "decode-0", "decode-1"} - mesh.pids.keys()
            assert dead.startswith("prefill" if at == 0 else "decode")
            await mesh.start(dead)
