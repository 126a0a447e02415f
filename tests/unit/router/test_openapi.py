"""/openapi.json: a valid document that names every route, and real answers that have the shapes it tells of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import schemathesis

from services.router.edge.middleware import OPEN_PATHS
from tests.support.fake_decode import FakeDecode, Harness, running_router, says
from tests.support.models import tiny_model

CHAT = {"model": "default", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}

RESPONSE = {"model": "default", "input": "hello", "max_output_tokens": 3}
MESSAGE = {"model": "default", **CHAT}


def shape(document: dict[str, Any], path: str, method: str, status: int) -> dict[str, Any]:
    """The JSON schema of an answer, with all that it refers to."""
    answer = document["paths"][path][method]["responses"][str(status)]
    found: dict[str, Any] = answer["content"]["application/json"]["schema"]
    return {**found, "components": document["components"]}


async def document_of(router: Harness) -> dict[str, Any]:
    response = await router.http.get("/openapi.json", headers={"x-api-key": "k"})
    assert response.status_code == 200
    found: dict[str, Any] = response.json()
    return found


async def test_answers_have_the_shapes_that_it_tells_of() -> None:
    fake = FakeDecode(says([5, 6, 7]))
    async with running_router(tiny_model(), fake, api_key=("k",)) as router:
        document = await document_of(router)
        schemathesis.openapi.from_dict(document).validate()
        asked: list[tuple[str, str, Any, int]] = [
            (
                "post",
                "/v1/completions",
                {"model": "default", "prompt": ["hello", [5]], "max_tokens": 3, "return_token_ids": True},
                200,
            ),
            ("post", "/v1/chat/completions", CHAT, 200),
            ("post", "/v1/responses", RESPONSE, 200),
            ("post", "/v1/responses", {**RESPONSE, "background": True}, 400),
            ("post", "/v1/messages", MESSAGE, 200),
            ("post", "/v1/messages", {**MESSAGE, "max_tokens": 0}, 400),
            ("post", "/v1/messages", {**MESSAGE, "model": "none"}, 404),
            ("post", "/v1/messages/count_tokens", MESSAGE, 200),
            ("post", "/generate", {"text": "hello", "max_tokens": 3}, 200),
            ("post", "/tokenize", {"prompt": "hello", "return_token_strs": True}, 200),
            ("post", "/tokenize", CHAT, 200),
            ("post", "/detokenize", {"tokens": [5, 6]}, 200),
            ("post", "/detokenize", {"tokens": [-1]}, 400),
            ("post", "/v1/completions", {"model": "none", "prompt": "x"}, 404),
            *(("get", path, None, 200) for path in ("/v1/models", "/version", "/workers", "/sd", "/health_generate")),
            *(("get", path, None, 200) for path in OPEN_PATHS - {"/metrics"}),
        ]
        for method, path, body, status in asked:
            response = await router.http.request(method, path, json=body, headers={"x-api-key": "k"})
            assert response.status_code == status, (path, response.text)
            jsonschema.validate(response.json(), shape(document, path, method, status))
            bare = await router.http.request(method, path, json=body)
            if path in OPEN_PATHS:
                assert document["paths"][path][method]["security"] == [] and bare.status_code == 200
            else:
                assert bare.status_code == 401
                jsonschema.validate(bare.json(), shape(document, path, method, 401))
        for path, given in (("/v1/models/{name}", "default"), ("/explain/{request_id}", "nobody")):
            response = await router.http.get(path.partition("{")[0] + given, headers={"x-api-key": "k"})
            jsonschema.validate(response.json(), shape(document, path, "get", response.status_code))
        more = {"/metrics", "/v1/models/{name}", "/explain/{request_id}"}
        assert set(document["paths"]) == {path for _, path, _, _ in asked} | more
        ids = document["components"]["schemas"]["DetokenizeRequest"]["properties"]["tokens"]
        assert ids["items"]["maximum"] == 324
        served = {"type": "string", "enum": [Path(router.model).name, "default"]}
        for kind, described in document["components"]["schemas"].items():
            if not kind.endswith("Request"):
                continue
            free = kind in ("GenerateRequest", "TokenizeRequest", "DetokenizeRequest")
            assert ("model" in described["required"] if "required" in described else False) is not free, kind
            assert described["properties"]["model"] == ({"anyOf": [served, {"type": "null"}]} if free else served)


async def test_whether_keys_are_needed_is_told() -> None:
    async with running_router(tiny_model(), FakeDecode(says([5]))) as router:
        free = await document_of(router)
    async with running_router(tiny_model(), FakeDecode(says([5])), api_key=("k",)) as router:
        closed = await document_of(router)
    assert set(closed["components"]["securitySchemes"]) == {"bearer", "x-api-key"}
    assert [bool({} in found["security"]) for found in (free, closed)] == [True, False]
    names = [operation["operationId"] for methods in free["paths"].values() for operation in methods.values()]
    assert len(set(names)) == len(names)
