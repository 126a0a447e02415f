"""Three Bootstraps and two routers, killed and started again in turn under load."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest

from services.cli.status import collect
from tests.support.asking import until_async
from tests.support.churn import assert_whole, some_asks
from tests.support.load import Load, check_ends, run_all
from tests.support.mesh import Mesh
from tests.support.models import tiny_model

pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]

ASKS = some_asks(8, 200)


async def test_bootstraps_and_routers_come_and_go() -> None:
    """No client of a router that lives sees any of it: a Bootstrap's death is nobody's, a router's its own
    streams'. Workers are known to every Bootstrap again, and pairs are never taken from placement."""
    async with Mesh(tiny_model(), routers=2, bootstraps=3, options={"kv_tokens": 16384}) as mesh:
        calm = await run_all(mesh.url, ASKS)
        other = mesh.url_of("router-1")
        async with Load(mesh.url, ASKS, width=3, name="a") as first, Load(other, ASKS, width=3, name="b") as second:
            await first.until(lambda: first.streaming(2) >= 2, "streams run over the one router")
            await second.until(lambda: second.streaming(2) >= 2, "and over the other")
            for name in ("bootstrap", "bootstrap-2"):
                mesh.kill(name)
                await mesh.gone(name)
                now = time.monotonic()
                await first.until(lambda t=now: first.right_since(t) >= 2, f"without {name}")
                await second.until(lambda t=now: second.right_since(t) >= 2, f"without {name}, over the other")
                await mesh.start(name)
            # All at once: whoever is known goes on being used.
            for name in ("bootstrap", "bootstrap-1", "bootstrap-2"):
                mesh.kill(name)
            now = time.monotonic()
            await asyncio.gather(*(mesh.gone(n) for n in ("bootstrap", "bootstrap-1", "bootstrap-2")))
            await first.until(lambda: first.right_since(now) >= 2, "without any Bootstrap")
            await asyncio.gather(*(mesh.start(n) for n in ("bootstrap", "bootstrap-1", "bootstrap-2")))
            first.stop()
            await first.until(lambda: first.streaming() == first.waiting() == 0, "the first load is over")
            mesh.kill("router", signal.SIGKILL)
            await mesh.gone("router")
            now = time.monotonic()
            await second.until(lambda: second.right_since(now) >= 3, "the other router goes on")
            await mesh.start("router")
            await mesh.until_ready()
            async with Load(mesh.url, ASKS, width=2, name="c") as third:
                await third.until(lambda: third.streaming(2) >= 1, "streams run again")
                mesh.kill("router-1", signal.SIGKILL)
                await mesh.gone("router-1")
                second.stop()
                now = time.monotonic()
                await third.until(lambda: third.right_since(now) >= 3, "the first one goes on")
                await mesh.start("router-1")
                await mesh.until_ready(router="router-1")
        assert_whole([*first.answers, *third.answers], tiny_model(), calm)
        # Only what the killed router held broke, and it broke by its connection.
        failed = check_ends(second.answers, calm, may_break=True)
        assert failed and all(answer.broken for answer in failed)

        for name in ("bootstrap", "bootstrap-1", "bootstrap-2"):

            async def knows_all(endpoint: str = mesh.endpoint(name)) -> bool:
                return await _ready(endpoint) == {"prefill-0": "READY", "decode-0": "READY"}

            await until_async(knows_all, 30.0, lambda n=name: f"{n} knows the workers")


async def _ready(bootstrap: str) -> dict[str, str]:
    return {rank["instance"]: rank["table_state"] for rank in (await collect(bootstrap, 5.0))["ranks"]}
