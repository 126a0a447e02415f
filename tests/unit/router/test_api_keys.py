"""API keys: who is let in, what is said to the others, and that no key is ever shown."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import httpx
import openai
import pytest

from engine_core.types.errors import ConfigError
from services.config import QueryConfig, RouterConfig, ServeConfig, load, without_secrets
from services.runtime.api_keys import ApiKeys, key_to_send, parse_keys, shown_keys
from tests.support.fake_decode import FakeDecode, error_of, running_router, says
from tests.support.models import tiny_model

COMPLETION = {"model": "default", "prompt": "hello", "max_tokens": 2}
GIVEN, FILED, NEW = "sk-given-on-the-line", "sk-from-the-file", "sk-a-new-one"


def holder(keys: ApiKeys, key: str) -> str | None:
    return keys.holder([key.encode()])


def test_all_keys_of_options_and_file_count_and_the_file_may_change(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# for the team\n\n  {FILED}  \nsk-other\n")
    keys = ApiKeys([GIVEN], file)
    assert keys.required
    names = {holder(keys, key) for key in (GIVEN, FILED, "sk-other")}
    assert len(names) == 3 and None not in names
    assert [holder(keys, key) for key in ("", "sk", GIVEN + "x", GIVEN.upper(), "# for the team")] == [None] * 5
    assert not keys.refresh()
    file.write_text(f"{NEW}\n")
    assert keys.refresh()
    assert holder(keys, NEW) and holder(keys, GIVEN) and not holder(keys, FILED)
    file.write_text("# nobody\n")  # of no use: what was there counts on, and nobody is let in for want of keys
    assert not keys.refresh() and keys.required and holder(keys, NEW)
    assert not ApiKeys().required
    for text in (repr(keys), str(keys.__dict__["_digests"])):
        assert NEW not in text and GIVEN not in text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no key"),
        ("# none\n", "holds no key"),
        ("two words\n", r"line 1: a key holds letters"),
        ("ok\na,b\n", r"line 2: a key holds letters, digits and ASCII punctuation but commas"),
        ("x" * 513, "a key has 1 to 512 characters, this one 513"),
        ("k\n" * 1001, "holds 1001 keys; there may be 1000"),
    ],
)
def test_files_that_hold_no_keys_are_refused_without_a_quote(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        parse_keys(text, "keys")
    assert caught.value.field == "--api-key-file" and "two words" not in str(caught.value)


def test_what_requests_show() -> None:
    assert shown_keys([(b"authorization", b"Bearer a"), (b"x-api-key", b"b")]) == [b"a", b"b"]
    assert shown_keys([(b"authorization", b"bearer   a ")]) == [b"a"]
    assert shown_keys([(b"authorization", b"Basic a"), (b"authorization", b"Bearer "), (b"x-api-key", b"")]) == []
    assert shown_keys([(b"authorization", b"Bearer %d" % i) for i in range(9)]) == [b"0", b"1"]


def test_what_commands_send(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"{FILED}\n{NEW}\n")
    assert key_to_send("", "") == ""
    assert key_to_send("", str(tmp_path / "keys")) == FILED
    environ = {"PDMESH_API_KEY": f"{GIVEN},{NEW}"}
    command, router = load(QueryConfig, environ=environ), load(RouterConfig, environ=environ, flags={"model": "m"})
    assert key_to_send(command.api_key, "") == GIVEN and router.api_key == (GIVEN, NEW)
    serve = load(ServeConfig, environ=environ, flags={"model": "m"})
    values, hidden = without_secrets(serve.child_values("router"))
    assert hidden == environ and "api_key" not in values and "api_key" not in serve.child_values("decode")
    with pytest.raises(ConfigError) as caught:
        load(RouterConfig, environ={}, flags={"model": "m", "api_key": 5})
    assert "5" not in str(caught.value)


async def test_who_is_let_in(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    file = tmp_path / "keys"
    file.write_text(FILED)
    fake = FakeDecode(says([5, 6]))
    options = {"api_key": (GIVEN,), "api_key_file": str(file), "console": True}
    async with running_router(tiny_model(), fake, **options) as router:
        http = router.http
        for path in ("/health", "/liveness", "/readiness", "/ping", "/metrics", "/console/", "/console/api.js"):
            assert (await http.get(path)).status_code == 200, path
        closed = ("/v1/models", "/workers", "/sd", "/openapi.json", "/console/api/mesh", "/explain/x", "/nothing")
        for path in (*closed, "/health/", "/console/api/explain/x"):
            response = await http.get(path)
            error = error_of(response)
            assert (response.status_code, error["type"], error["code"]) == (
                401,
                "invalid_request_error",
                "invalid_api_key",
            )
            assert response.headers["www-authenticate"] == 'Bearer realm="pdmesh"' and response.headers["x-request-id"]
        assert (await http.head("/v1/models")).status_code == 401
        for headers in (
            {"authorization": f"Bearer {GIVEN}x"},
            {"authorization": GIVEN},
            {"authorization": f"Basic {GIVEN}"},
            {"x-api-key": "\xff"},
            {"authorization": "Bearer"},
        ):
            raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
            response = await http.post("/v1/completions", json=COMPLETION, headers=httpx.Headers(raw))
            assert (response.status_code, error_of(response)["code"]) == (401, "invalid_api_key")
            assert GIVEN not in response.text
        assert fake.requests == []
        for headers in ({"authorization": f"Bearer {GIVEN}"}, {"x-api-key": FILED}):
            assert (await http.post("/v1/completions", json=COMPLETION, headers=headers)).status_code == 200
        with pytest.raises(openai.AuthenticationError) as caught:
            await router.client.models.list()
        assert (caught.value.code, caught.value.status_code) == ("invalid_api_key", 401)
        file.write_text(NEW)
        async with asyncio.timeout(20):
            while (await http.get("/v1/models", headers={"x-api-key": NEW})).status_code != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert (await http.get("/v1/models", headers={"x-api-key": FILED})).status_code == 401
        assert (await router.client.with_options(api_key=GIVEN).models.list()).data[0].object == "model"
        metrics = (await http.get("/metrics")).text
        assert 'pdmesh_router_requests_total{end="invalid",path="/v1/completions"} 5.0' in metrics
        shown = metrics + caplog.text
    assert not any(key in shown for key in (GIVEN, FILED, NEW))
