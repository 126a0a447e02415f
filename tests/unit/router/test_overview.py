"""/console and its data, over a scripted worker: who is asked how often, what is told, what is forbidden."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from engine_core.types.errors import Leg, UnavailableError
from pdmesh.common.v1 import identity_pb2
from services.config import RouterConfig
from services.router.console.routes import STATIC
from tests.support.asking import until_async
from tests.support.fake_decode import FakeDecode, Harness, running_router, says, stream
from tests.support.models import tiny_model

pytestmark = pytest.mark.timeout(60)


class CountedDecode(FakeDecode):
    """Counts how often its figures are asked for."""

    asked = 0

    async def GetStats(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.asked += 1
        answer = await super().GetStats(request, context)
        answer.role = identity_pb2.ROLE_DECODE
        return answer


async def mesh_of(router: Harness, since: float = 0.0) -> dict[str, Any]:
    answer = await router.http.get("/console/api/mesh", params={"since": since})
    assert answer.status_code == 200, answer.text
    data: dict[str, Any] = answer.json()
    return data


async def test_many_who_look_ask_a_worker_once_and_nobody_asks_none() -> None:
    fake = CountedDecode(says([]))
    async with running_router(tiny_model(), fake) as router:
        assert fake.asked == 0
        began = asyncio.get_running_loop().time()
        await asyncio.gather(*(mesh_of(router) for _ in range(30)))
        took = asyncio.get_running_loop().time() - began
        assert 1 <= fake.asked <= 1 + int(took)  # once a second at most
        seen: dict[str, Any] = {}

        async def told() -> bool:  # a busy machine may be late with the first answer
            seen.update((await mesh_of(router))["mesh"])
            return bool({w["instance"]: w for w in seen["workers"]}["decode-0"]["answers"])

        await until_async(told, 30.0, lambda: f"{seen}")
        workers = {w["instance"]: w for w in seen["workers"]}
        decode, prefill = workers["decode-0"], workers["prefill-0"]
        assert decode["kv"] == {"total": 10, "free": 6, "used": 3, "cached": 1, "pinned": 0, "quarantined": 0}
        assert (decode["answers"], decode["role"], decode["incarnation"]) == (True, "DECODE", str(fake.incarnation))
        assert (prefill["answers"], prefill["role"]) == (False, "PREFILL")  # nobody listens there
        (link,) = seen["links"]
        assert (link["from"], link["to"], link["bytes"], link["speed"]) == ("prefill-0", "decode-0", 4096, 8192.0)


async def test_a_request_is_seen_from_its_arrival_to_its_end() -> None:
    go = asyncio.Event()
    fake = FakeDecode(says([]))
    async with running_router(tiny_model(), fake) as router:
        first, *rest = stream(router.ids("hello there"), 9)
        fake.script = lambda _request: iter([first, go, *rest])
        asking = asyncio.ensure_future(
            router.http.post(
                "/v1/completions",
                json={"model": "default", "prompt": "hi", "max_tokens": 9},
                headers={"x-request-id": "one"},
            )
        )
        seen: dict[str, Any] = {}

        async def decoding() -> bool:
            seen.update((await mesh_of(router))["mesh"])
            return any(r["state"] == "FIRST_TOKEN" for r in seen["requests"])

        await until_async(decoding, 20.0, lambda: f"{seen}")
        (request,) = seen["requests"]
        assert (request["id"], request["prefill"], request["decode"]) == ("one", "prefill-0", "decode-0")
        assert request["tokens"] == 1 and 0 < request["ttft"] <= request["age"]
        assert (seen["router"]["in_flight"], seen["requests_total"], seen["recent"]) == (1, 1, [])
        go.set()
        assert (await asking).status_code == 200

        async def ended() -> bool:
            seen.update((await mesh_of(router))["mesh"])
            return not seen["requests"]

        await until_async(ended, 20.0, lambda: f"{seen}")
        (past,) = seen["recent"]
        assert (past["id"], past["state"], past["finish_reason"], past["transport"]) == (
            "one",
            "FINISHED",
            "stop",
            "shm",
        )
        assert past["timings"]["prefill_computing"] == 0.25

        told = (await router.http.get("/console/api/explain/one")).json()
        states = [m["to"] for m in told["moves"] if m["process"] == "router"]
        assert states == ["QUEUED", "PLACED", "SENT", "FIRST_TOKEN", "FINISHED"]
        assert told["rooms"] == [past["room"]]
        assert {s["process"] for s in told["silent"]} == {"decode-0", "prefill-0"}  # the fakes explain nothing
        assert (await router.http.get("/console/api/explain/other")).status_code == 404


async def test_history_counts_ends_and_tokens() -> None:
    fake = FakeDecode(says([]))
    async with running_router(tiny_model(), fake, max_attempts=1) as router:
        fake.script = says(router.ids("hello there"))
        whole = await router.http.post("/v1/completions", json={"model": "default", "prompt": "hi", "max_tokens": 9})
        tokens = whole.json()["usage"]["completion_tokens"]
        fake.script = lambda _request: iter([UnavailableError("gone", leg=Leg.DECODE)])
        assert (await router.http.post("/v1/completions", json={"model": "default", "prompt": "hi"})).status_code == 503
        assert (await router.http.post("/v1/completions", json={"model": "default", "prompt": 5})).status_code == 400
        history: dict[str, list[Any]] = {}

        async def counted() -> bool:
            history.update((await mesh_of(router))["history"])
            return sum(history["requests"]) >= 3

        await until_async(counted, 20.0, lambda: f"{history}")
        assert (sum(history["requests"]), sum(history["errors"]), sum(history["tokens"])) == (3, 1, tokens)
        assert any(v is not None and v > 0 for v in history["ttft_p50"])
        later = (await mesh_of(router, since=history["time"][-1]))["history"]
        assert all(time > history["time"][-1] for time in later["time"])


async def test_the_page_and_its_files_come_with_a_policy_that_forbids_all_else() -> None:
    async with running_router(tiny_model(), FakeDecode(says([]))) as router:
        bare = await router.http.get("/console")
        assert (bare.status_code, bare.headers["location"]) == (307, "console/")
        page = await router.http.get("/console/")
        assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
        assert "pdmesh console" in page.text
        names = re.findall(r'(?:src|href)="([^"]+)"', page.text)
        names += re.findall(r'from "\./([^"]+)"', "".join(path.read_text() for path in STATIC.glob("*.js")))
        assert {"main.js", "console.css", "icon.svg", "picture.js"} <= set(names)
        for name in {"", *names}:
            answer = await router.http.get(f"/console/{name}")
            assert answer.status_code == 200, name
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            again = await router.http.get(f"/console/{name}", headers={"if-none-match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        for path in ("nothing.js", "routes.py", "../routes.py", "%2e%2e/routes.py", "static/main.js"):
            assert (await router.http.get(f"/console/{path}")).status_code == 404, path
        assert (await router.http.post("/console/api/mesh")).status_code == 405
        assert (await router.http.get("/console/api/mesh?since=soon")).json()["error"]["param"] == "since"


def test_the_page_makes_no_markup_of_text_and_asks_nobody_else() -> None:
    for path in STATIC.iterdir():
        source = path.read_text()
        for forbidden in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
            assert forbidden not in source, f"{path.name}: {forbidden}"
        addresses = set(re.findall(r"https?://[^\s\"']+", source))
        assert addresses <= {"http://www.w3.org/2000/svg"}, f"{path.name}: {addresses}"  # the name of SVG, not a place


async def test_without_a_console_there_is_none() -> None:
    async with running_router(tiny_model(), FakeDecode(says([])), console=False) as router:
        for path in ("/console", "/console/", "/console/api/mesh"):
            assert (await router.http.get(path)).status_code == 404


@pytest.mark.parametrize(
    ("host", "told", "there"),
    [
        ("127.0.0.1", None, True), ("localhost", None, True), ("::1", None, True), ("0.0.0.0", None, False),
        ("10.0.0.1", None, False), ("0.0.0.0", True, True), ("127.0.0.1", False, False),
    ],
)  # fmt: skip
def test_a_console_is_there_by_default_where_only_this_machine_looks(
    host: str, told: bool | None, there: bool, tmp_path: Path
) -> None:
    assert RouterConfig(model=str(tmp_path), host=host, console=told).serves_console is there
