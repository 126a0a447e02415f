"""Where `pdmesh top` gets its frames from, while what it asks dies."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest

from engine_core.types.errors import UnavailableError
from services.cli.top import Source
from services.config import QueryConfig
from tests.support.asking import until_async
from tests.support.fake_decode import FakeDecode, register, running_bootstrap, running_router, says
from tests.support.models import tiny_model


async def test_the_view_goes_on_without_bootstrap_and_workers() -> None:
    async with AsyncExitStack() as stack:
        dying = await stack.enter_async_context(running_bootstrap())
        worker = FakeDecode(says([]))
        await worker.start()
        stack.push_async_callback(worker.stop)
        await register(dying, worker, "digest")
        source = Source(QueryConfig(bootstrap=("127.0.0.1:1", dying), query_timeout=5.0))
        stack.push_async_callback(source.close)
        frame = await source.look(must=True)
        assert (frame.bootstrap, frame.note, list(frame.routers)) == (dying, "", [])
        assert [(rank["instance"], rank["answers"], rank["kv"]["total"]) for rank in frame.ranks] == [
            ("decode-0", True, 10)
        ]
        await worker.stop()
        frame = await source.look()
        assert [(rank["instance"], rank["answers"], rank["kv"]["total"]) for rank in frame.ranks] == [
            ("decode-0", False, 10)  # its last figures stay
        ]


async def test_without_any_bootstrap_those_known_last_are_shown() -> None:
    worker = FakeDecode(says([]))
    await worker.start()
    try:
        async with running_bootstrap() as dying:
            await register(dying, worker, "digest")
            source = Source(QueryConfig(bootstrap=(dying,), query_timeout=1.0))
            await source.look(must=True)
        frame = await source.look()
        assert frame.bootstrap == "" and "does not answer" in frame.note and "known last" in frame.note
        assert [(rank["instance"], rank["answers"]) for rank in frame.ranks] == [("decode-0", True)]
        await source.close()
        fresh = Source(QueryConfig(bootstrap=(dying,), query_timeout=1.0))
        with pytest.raises(UnavailableError, match="does not answer"):
            await fresh.look(must=True)
        await fresh.close()
    finally:
        await worker.stop()


@pytest.mark.parametrize("console", [True, False])
async def test_routers_are_asked_for_what_their_console_shows(console: bool) -> None:
    fake = FakeDecode(says([]))
    async with running_router(tiny_model(), fake, console=console) as router:
        fake.script = says(router.ids("hello"))
        await router.http.post(
            "/v1/completions", json={"model": "default", "prompt": "hi"}, headers={"x-request-id": "one"}
        )
        source = Source(QueryConfig(bootstrap=(router.bootstrap,)))
        try:
            looks = list((await source.look(must=True)).routers)

            async def counted() -> bool:
                looks[:] = (await source.look()).routers
                return not console or sum(looks[0].history.get("requests", [])) == 1

            await until_async(counted, 20.0, lambda: f"{looks}")
            (look,) = looks
            if console:
                assert look.error == "" and look.mesh is not None and look.mesh["recent"][0]["id"] == "one"
                assert len(look.history["time"]) == len(set(look.history["time"]))
            else:
                assert look.mesh is None and "no console" in look.error
        finally:
            await source.close()
