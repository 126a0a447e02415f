"""kill -9 of each process of a served mesh, under load.

One `pdmesh serve` with two pairs stands for all tests here. Each of them: load runs; something is killed;
every request in flight ends right: what a dead worker held goes on elsewhere, what a dead router held breaks;
requests go on through the others; serve reports the death and starts the dead anew; it serves again, under a
new incarnation; nothing has leaked.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import pytest_asyncio

from tests.support.churn import claim_of
from tests.support.load import Answer, Ask, Load, check_ends, run_all
from tests.support.models import tiny_model
from tests.support.oracle import oracle_for
from tests.support.serving import LIMIT, Serving, descriptors, running, until, until_gone

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]

OPTIONS = "--prefill 2 --decode 2 --kv-tokens 4096 --max-batch-tokens 64 --watchdog-timeout 20".split()
WITHIN = 60.0
"""Seconds in which a request must end, whatever happens to it."""


def some_asks() -> list[Ask]:
    """Prompts around block and chunk borders, most of them streamed; long enough that a kill meets them."""
    draw = random.Random(5)
    lengths = (1, 15, 16, 17, 40, 64, 100, 129, 200, 256, 300, 400)
    return [
        Ask(tuple(draw.randrange(3, 300) for _ in range(n)), 240 + 40 * (i % 4), stream=i % 4 != 3)
        for i, n in enumerate(lengths)
    ]


ASKS = some_asks()


class Bench:
    """The mesh, and what it does while nothing breaks."""

    def __init__(self, mesh: Serving, calm: dict[Ask, list[int]]) -> None:
        self.mesh, self.calm = mesh, calm


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench() -> AsyncIterator[Bench]:
    async with Serving(tiny_model(), *OPTIONS) as mesh:
        yield Bench(mesh, await run_all(mesh.url, ASKS))


def judge(answers: Sequence[Answer]) -> None:
    """Whether what differs from the calm run is right all the same."""
    oracle_for(tiny_model()).assert_right([claim_of(answer) for answer in answers])


def shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith(("pdmesh", "kv-", "torch_"))}


class Watch:
    """What must be as before once the dead is back."""

    @classmethod
    async def begin(cls, mesh: Serving) -> Watch:
        await mesh.until_quiet()
        await mesh.until_connected()
        return cls(mesh, await mesh.pids())

    def __init__(self, mesh: Serving, pids: dict[str, int]) -> None:
        self.mesh, self.pids = mesh, pids
        self.files = {name: descriptors(pid) for name, pid in pids.items()}
        self.sockets, self.shared = len(mesh.sockets()), shared_memory()
        self.line = len(mesh.lines)

    async def end(self) -> None:
        """Conservation, descriptors, sockets, shared memory, processes."""
        mesh = self.mesh
        await mesh.until_quiet()
        now = await mesh.pids()
        assert now.keys() == self.pids.keys()
        survivors = {name: pid for name, pid in now.items() if self.pids[name] == pid}
        more: dict[str, Any] = {}

        def settled() -> bool:
            counts = {name: descriptors(pid) for name, pid in survivors.items()}
            more.clear()
            more.update({n: (self.files[n], c) for n, c in counts.items() if c > self.files[n]})
            return not more

        try:
            await until(settled, "file descriptors", LIMIT)
        except AssertionError as exc:
            raise AssertionError(f"{exc}: {more}") from None
        await until_gone(pid for name, pid in self.pids.items() if now[name] != pid)
        assert len(mesh.sockets()) == self.sockets
        assert shared_memory() <= self.shared


async def hold_requests(mesh: Serving, watch: Watch, name: str) -> None:
    """Stops a prefill engine and waits until requests are with it that can't have token 1."""
    os.kill(watch.pids[f"{name}/engine"], signal.SIGSTOP)

    async def holds() -> bool:
        return bool((await mesh.ranks())[name]["streams"] >= 2)

    await until(holds, f"{name} has requests", LIMIT)


async def kill_under_load(bench: Bench, victim: str, *, both: bool) -> tuple[Load, float, Watch]:
    """Kills `victim` while streams run, waits for its report and for requests that began later to succeed."""
    mesh = bench.mesh
    watch = await Watch.begin(mesh)
    load = Load(mesh.url, ASKS, width=6, name=victim)
    async with load:
        await load.until(lambda: load.streaming(2) >= 4, "streams run")
        name = victim.removesuffix("/engine")
        if victim == "prefill-0":
            await hold_requests(mesh, watch, name)
        os.kill(watch.pids[victim], signal.SIGKILL)
        killed = time.monotonic()
        await until(lambda: mesh.said(name, "died: ", watch.line), "reported", LIMIT)
        if both:
            await until_gone([watch.pids[name], watch.pids[f"{name}/engine"]])
        await load.until(lambda: load.right_since(killed) >= 6, "the others go on")
        if both:
            return load, killed, watch
    return load, killed, watch


@pytest.mark.parametrize(
    "victim",
    [
        "prefill-0",
        "decode-1/engine",
        pytest.param("prefill-1/engine", marks=pytest.mark.slow),
        pytest.param("decode-0", marks=pytest.mark.slow),
    ],
)
async def test_a_worker_is_killed(bench: Bench, victim: str) -> None:
    mesh, name = bench.mesh, victim.removesuffix("/engine")
    before = (await mesh.ranks())[name]["incarnation"]
    load, killed, watch = await kill_under_load(bench, victim, both=True)
    how = "died: killed by SIGKILL" if victim == name else "died: engine"
    assert mesh.said(name, how, watch.line), "\n".join(mesh.lines)

    failed = check_ends(load.answers, bench.calm, within=WITHIN, judge=judge)
    assert not failed, await mesh.timelines(a.request_id for a in failed)

    back = await mesh.until_back(name, before)
    assert mesh.said(name, "starts again in 0.5 s", watch.line)
    role = "prefill_instance" if name.startswith("prefill") else "decode_instance"

    async def serves() -> bool:
        answer = await mesh.generate(ASKS[3].prompt)
        assert answer.status_code == 200, answer.text
        return bool(answer.json()[role] == name)

    await until(serves, f"{name} serves again", LIMIT)
    assert back["engine_pid"] not in watch.pids.values() and running(back["engine_pid"])
    assert await run_all(mesh.url, ASKS) == bench.calm
    await watch.end()


async def test_bootstrap_is_killed(bench: Bench) -> None:
    """Nobody notices: workers and router go on with the table that they know, and fill the new one."""
    mesh = bench.mesh
    await mesh.until_quiet()
    before = await mesh.status()
    load, _, watch = await kill_under_load(bench, "bootstrap", both=False)
    assert mesh.said("bootstrap", "died: killed by SIGKILL", watch.line)
    assert check_ends(load.answers, bench.calm, within=WITHIN) == []

    await mesh.until_quiet()
    after = await mesh.status()
    assert after["revision"]["table_epoch"] > before["revision"]["table_epoch"]
    lives = {r["instance"]: (r["incarnation"], r["pid"], r["engine_pid"]) for r in before["ranks"]}
    assert {r["instance"]: (r["incarnation"], r["pid"], r["engine_pid"]) for r in after["ranks"]} == lives
    assert await run_all(mesh.url, ASKS) == bench.calm
    await watch.end()


async def test_the_router_is_killed(bench: Bench) -> None:
    """Its connections break, and whoever comes before it is back is refused. The workers end what it asked
    for, and serve on."""
    mesh = bench.mesh
    await mesh.until_quiet()
    before = await mesh.ranks()
    load, killed, watch = await kill_under_load(bench, "router", both=False)
    failed = check_ends(load.answers, bench.calm, within=WITHIN, may_break=True)
    assert any(a.broken and a.began < killed for a in failed)
    assert mesh.said("router", "died: killed by SIGKILL", watch.line)
    assert await run_all(mesh.url, ASKS) == bench.calm
    await watch.end()
    after = await mesh.ranks()
    assert {n: r["incarnation"] for n, r in after.items()} == {n: r["incarnation"] for n, r in before.items()}


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["prefill-1/engine", "decode-1/engine", "prefill-0", "decode-0"])
async def test_a_process_that_stands_still_is_killed_and_replaced(bench: Bench, victim: str) -> None:
    """SIGSTOP, and never SIGCONT: an engine is ended by its service process, that one by serve. What it held
    goes on as after a kill, if not sooner."""
    mesh, name = bench.mesh, victim.removesuffix("/engine")
    before = (await mesh.ranks())[name]["incarnation"]
    watch = await Watch.begin(mesh)
    why = "died: no sign of life for 30 s" if victim == name else "died: engine sent no frame for 20 s"
    async with Load(mesh.url, ASKS, width=6, name=f"still-{name}") as load:
        await load.until(lambda: load.streaming(2) >= 4, "streams run")
        os.kill(watch.pids[victim], signal.SIGSTOP)
        await until(lambda: mesh.said(name, why, watch.line), "reported", 120.0)
        died = time.monotonic()
        await load.until(lambda: load.right_since(died) >= 6, "requests go on")
    failed = check_ends(load.answers, bench.calm, within=WITHIN, judge=judge)
    assert not failed, await mesh.timelines(a.request_id for a in failed)
    await mesh.until_back(name, before)
    assert await run_all(mesh.url, ASKS) == bench.calm
    await watch.end()
