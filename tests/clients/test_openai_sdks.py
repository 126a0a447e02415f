"""openai's SDKs for Python and for Node: whatever they offer, against a mesh with the demo model."""

from __future__ import annotations

import asyncio
import sys

import pytest
import pytest_asyncio

from tests.clients.conftest import KEY, Clients
from tests.support.asking import until_async
from tests.support.clients import PROGRAMS, Cases, node

# A busy machine takes its time for sixty requests.
pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(360)]

ANSWER = "The capital of France is Paris."
MODEL = "SmolLM2-135M-Instruct"
ECHO = {
    "text": "The capital of France is Paris.\n",
    "tokens": ["The", " capital", " of", " France", " is", " Paris", ".", "\n"],
    "offsets": [0, 3, 11, 14, 21, 24, 30, 31],
}
LOGPROBS = [-11.539290, -0.337616, -2.438664, -0.450951, -0.258082, -0.380138, -1.009356]
"""Of the tokens behind the first, by transformers."""
ROME = {"city": "Rome", "days": 3}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def python(clients: Clients) -> Cases:
    command = [sys.executable, str(PROGRAMS / "openai_python.py"), clients.url, clients.narrow_url, KEY]
    return (await clients.run(command)).cases


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def npm(clients: Clients) -> Cases:
    command = [node(), str(PROGRAMS / "openai_node.mjs"), clients.url, clients.narrow_url, KEY]
    return (await clients.run(command)).cases


# ---- Python -----------------------------------------------------------------------------------------------


async def test_python_chats(python: Cases) -> None:
    assert python["models"] == [[MODEL], "model"]
    text, reason, kind, reply, request, adds_up, cached = python["plain"]
    assert (text, reason, kind, adds_up) == (ANSWER, "stop", "chat.completion", True)
    assert reply == f"chatcmpl-{request}" and cached >= 0
    text, parts, roles, tokens = python["stream"]
    assert (text, roles, tokens) == (ANSWER, ["assistant"], 8) and parts >= 2
    assert python["several"] == [[ANSWER] * 4, ANSWER, [MODEL]], "asyncio"
    assert python["samples"] == [[0, 1, 2], 3]


async def test_python_tools(python: Cases) -> None:
    call = ["function", True, "get_weather", ROME]
    assert python["forced_tool"] == [[call], None, "tool_calls"]
    (streamed,), deltas, reason = python["streamed_tool"]
    assert (streamed, reason) == (call, "tool_calls") and deltas >= 2
    assert python["tool_round"] == [True, None], "an answer, and no call"
    person = python["parsed_tool"]
    assert set(person) == {"name", "age", "role"} and person["role"] in ("cook", "guard")


async def test_python_structured_output(python: Cases) -> None:
    city = python["schema"]
    assert set(city) == {"city", "people"} and len(city["city"]) <= 20 and 0 <= city["people"] <= 99
    assert python["json_object"] == ["dict", "stop"]
    person = python["parsed"]
    assert set(person) == {"name", "age", "role"} and isinstance(person["age"], int)


async def test_python_log_probabilities(python: Cases) -> None:
    joined, tokens = python["logprobs"]
    assert joined and len(tokens) == 4
    assert all(own == best[0] > best[1] and len(best) == 2 for own, best in tokens), "greedy: its own is the best"
    found = python["completion"]
    assert {name: found[name] for name in ECHO} == ECHO
    assert found["logprobs"][0] is None and found["logprobs"][1:] == pytest.approx(LOGPROBS, abs=1e-4)
    assert found["tops"] == [0, 3, 2, 2, 2, 2, 2, 2], "two, and the token itself where it is none of them"
    assert found["plain"] == found["streamed"] == " Paris.\n"


async def test_python_errors(python: Cases) -> None:
    wrong = "invalid_request_error"
    assert python["errors"] == {
        "400": ["BadRequestError", 400, wrong, "invalid_request", "temperature", True],
        "400 schema": ["BadRequestError", 400, wrong, "invalid_request", "response_format", True],
        "401": ["AuthenticationError", 401, wrong, "invalid_api_key", None, True],
        "404": ["NotFoundError", 404, wrong, "model_not_found", "model", True],
        "404 path": ["NotFoundError", 404, wrong, "not_found", None, True],
        "408": ["APIStatusError", 408, wrong, "request_timeout", None, True],
        "413": ["APIStatusError", 413, wrong, "body_too_large", None, True],
    }
    refused, tokens = python["full_queue"]
    assert refused == ["RateLimitError", 429, "rate_limit_error", "queue_full", None, True]
    assert tokens == 1, "the SDK tries again until there is room"
    assert python["broken_stream"] == ["APIError", "request_timeout", wrong]


async def test_python_timeouts_end_the_request(python: Cases, clients: Clients) -> None:
    assert python["timeout"] == ["APITimeoutError", True]
    await clients.cancelled("python-late")
    await clients.cancelled("python-left")


# ---- Node -------------------------------------------------------------------------------------------------


async def test_node_chats(npm: Cases) -> None:
    assert npm["models"] == [[MODEL], "model"]
    assert npm["plain"] == [ANSWER, "stop", 8]
    assert npm["stream"] == [ANSWER, ANSWER, 8]


async def test_node_tools_and_structured_output(npm: Cases) -> None:
    assert npm["streamed_tool"] == ["get_weather", ROME, "tool_calls"]
    assert npm["tool_round"] == [[ROME], ["user", "assistant", "tool"]]
    person = npm["parsed"]
    assert set(person) == {"name", "age", "role"} and person["role"] in ("cook", "guard")


async def test_node_log_probabilities(npm: Cases) -> None:
    joined, tokens = npm["logprobs"]
    assert joined and all(own == best[0] > best[1] for own, best in tokens) and len(tokens) == 4
    found = npm["completion"]
    assert {name: found[name] for name in ECHO} == ECHO and found["streamed"] == " Paris.\n"
    assert found["logprobs"][0] is None and found["logprobs"][1:] == pytest.approx(LOGPROBS, abs=1e-4)


async def test_node_errors(npm: Cases) -> None:
    wrong = "invalid_request_error"
    assert npm["errors"] == {
        "400": ["BadRequestError", 400, wrong, "invalid_request", "temperature"],
        "401": ["AuthenticationError", 401, wrong, "invalid_api_key", None],
        "404": ["NotFoundError", 404, wrong, "model_not_found", "model"],
    }
    assert npm["full_queue"] == [["RateLimitError", 429, "rate_limit_error", "queue_full", None], 1]


async def test_node_timeouts_end_the_request(npm: Cases, clients: Clients) -> None:
    assert npm["timeout"] == ["APIConnectionTimeoutError", None, None, None, None]
    assert npm["aborted"] is True
    await clients.cancelled("node-late")
    await clients.cancelled("node-left")


# ---- without workers --------------------------------------------------------------------------------------


async def test_python_tries_again_until_a_worker_is_there(clients: Clients, python: Cases, npm: Cases) -> None:
    del python, npm  # what they ask for comes before
    mesh = clients.mesh
    await mesh.quiet()
    mesh.kill("prefill-0")
    await mesh.gone("prefill-0")
    command = [sys.executable, str(PROGRAMS / "openai_python.py"), clients.url, clients.narrow_url, KEY, "retries"]
    running = asyncio.ensure_future(clients.run(command))

    async def refused_twice() -> bool:
        assert not running.done(), str(running.result())
        counted = 'pdmesh_router_requests_total{end="unavailable",path="/v1/completions"}'
        return await clients.metric(counted) >= 2

    await until_async(refused_twice, 60.0, lambda: "the first request and a retry")
    await mesh.start("prefill-0")
    refused, tokens = (await running).cases["retries"]
    assert refused[:3] == ["InternalServerError", 503, "server_error"] and refused[4:] == [None, True]
    assert tokens == 1
