"""Rolling upgrades: a new pair comes, the old one is drained and ends, and no request fails."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from tests.support.churn import assert_whole, drained, some_asks
from tests.support.load import Ask, Load, run_all
from tests.support.mesh import Mesh
from tests.support.models import tiny_model

pytestmark = pytest.mark.timeout(240)

OLD, NEW = ("prefill-0", "decode-0"), ("prefill-1", "decode-1")
LONG = Ask(tuple(range(3, 60)), 1500)
ASKS = [*some_asks(6, 200), LONG]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("new", "limit"),
    [
        pytest.param({}, 1.0, id="one fingerprint: what is open is handed over", marks=pytest.mark.slow),
        pytest.param({"block_size": 32}, 1.0, id="another fingerprint: what is open ends where it began"),
    ],
)
async def test_an_upgrade_under_load(new: dict[str, Any], limit: float) -> None:
    overrides = {name: new for name in NEW}
    async with Mesh(tiny_model(), options={"kv_tokens": 16384}, overrides=overrides) as mesh:
        calm = await run_all(mesh.url, ASKS)
        async with Load(mesh.url, ASKS, width=7) as load:
            await load.until(lambda: any(a.ask is LONG and len(a.token_ids) > 5 for a in load.answers), "a long one")
            await asyncio.gather(*(mesh.start(name) for name in NEW))
            began = time.monotonic()
            before = [a for a in load.answers if a.token_ids and not a.over]
            await drained(mesh, *OLD, limit=limit, stop=True)
            ends = [await mesh.gone(name) for name in OLD]
            assert [end.code for end in ends] == [0, 0]
            assert {rank["instance"] for rank in (await mesh.status())["ranks"]} == set(NEW)
            await load.until(lambda: load.right_since(began) >= 5, "the new pair serves")
        assert before, "no stream was open when the old pair was drained"
        assert_whole(load.answers, tiny_model(), calm)
        resumed = [a.request_id for a in load.answers if await _attempts(mesh, a.request_id, with_tokens=True) > 1]
        if new:
            assert resumed == [], "a stream left the fingerprint that it began under"


async def _attempts(mesh: Mesh, request_id: str, *, with_tokens: bool) -> int:
    """Attempts of a request, those after its first token alone if told so."""
    moves = [m for m in (await mesh.explain(request_id))["moves"] if m["process"].startswith("router")]
    first = next((i for i, move in enumerate(moves) if move["to"] == "FIRST_TOKEN"), 0) if with_tokens else 0
    return 1 + sum(move["to"] == "PLACED" for move in moves[first:])
