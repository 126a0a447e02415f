"""langchain-openai, litellm, pydantic-ai, openai-agents and instructor: each gets what its users ask it for."""

from __future__ import annotations

import pytest
import pytest_asyncio

from tests.clients.conftest import Clients
from tests.support.clients import PROGRAMS, Cases, environment

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

ANSWER = "The capital of France is Paris."
TOKENS = 8
ROME = {"city": "Rome", "days": 3}
PARIS = {"name": "Paris", "large": True}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def found(clients: Clients) -> Cases:
    command = [environment("sdks"), str(PROGRAMS / "frameworks.py"), clients.url]
    return (await clients.run(command, 500.0, LITELLM_LOCAL_MODEL_COST_MAP="True")).cases


async def test_langchain(found: Cases) -> None:
    assert found["langchain_invoke"] == [ANSWER, TOKENS, "stop"]
    assert found["langchain_stream"] == [ANSWER, TOKENS]
    assert found["langchain_batch"] == [ANSWER] * 3
    assert found["langchain_tools"] == ["get_weather", ROME, ROME, "sunny in Rome, 3"]
    assert found["langchain_structured"] == [PARIS, PARIS]
    assert found["langchain_logprobs"] == [f"{ANSWER}<|im_end|>", [2] * TOKENS]
    assert found["langchain_completion"] == [" Paris.\n"] * 2


async def test_litellm(found: Cases) -> None:
    assert found["litellm_chat"] == [ANSWER, "stop", TOKENS]
    assert found["litellm_stream"] == [ANSWER, TOKENS]
    assert found["litellm_tools"] == [["get_weather", ROME, "tool_calls"]] * 2
    assert found["litellm_schema"] == PARIS
    assert found["litellm_errors"] == [["BadRequestError", 400], ["BadRequestError", 400], ["NotFoundError", 404]]
    assert found["litellm_completion"] == [" Paris.\n", 3]


async def test_pydantic_ai(found: Cases) -> None:
    assert found["pydantic_ai_text"] == [ANSWER, TOKENS]
    assert found["pydantic_ai_output"] == [PARIS, PARIS], "by a tool, and by a schema"
    assert found["pydantic_ai_stream"] == ANSWER


async def test_openai_agents(found: Cases) -> None:
    assert found["agents_run"] == [["Rome"], "sunny"]
    output, streamed = found["agents_output"]
    assert streamed and set(output) == {"name", "large"} and output["name"] in ("Paris", "Rome")


async def test_instructor(clients: Clients) -> None:
    command = [environment("instructor"), str(PROGRAMS / "instructor_modes.py"), clients.url]
    found = (await clients.run(command)).cases
    assert found["tools"] == found["schema"] == PARIS
    for mode in ("tools_nested", "schema_nested"):
        cities = found[mode]["cities"]
        assert 2 <= len(cities) <= 3 and all(city["name"] in ("Paris", "Rome") for city in cities)
    assert found["partial"] == [True, PARIS]
