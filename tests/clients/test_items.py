"""Anthropic's SDK, and frameworks that speak OpenAI's responses or Anthropic's messages: each gets what it asks for."""

from __future__ import annotations

import pytest
import pytest_asyncio

from tests.clients.conftest import Clients
from tests.support.clients import PROGRAMS, Cases, environment

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

ANSWER = "The capital of France is Paris."
TOKENS = 8
ROME = {"city": "Rome", "days": 3}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def found(clients: Clients) -> Cases:
    command = [environment("sdks"), str(PROGRAMS / "items.py"), clients.url]
    return (await clients.run(command, 500.0, LITELLM_LOCAL_MODEL_COST_MAP="True")).cases


async def test_anthropic(found: Cases) -> None:
    assert found["anthropic_whole"] == [ANSWER, "end_turn", TOKENS, True]
    assert found["anthropic_stream"] == [ANSWER, "end_turn", TOKENS]
    assert found["anthropic_stops"] == ["The capital of", " Paris.", "stop_sequence", " France"]
    assert found["anthropic_tools"] == [ROME, ROME, "tool_use", "text"]
    assert found["anthropic_schema"] == {"name": "Paris", "large": True}
    assert found["anthropic_errors"] == [
        ["NotFoundError", 404, "not_found_error"],
        ["BadRequestError", 400, "invalid_request_error"],
    ]
    assert found["litellm_messages"] == [ANSWER, ANSWER, TOKENS]


async def test_responses(found: Cases) -> None:
    assert found["litellm_responses"] == [ANSWER, "response.created", "response.completed"]
    assert found["langchain_responses"] == [ANSWER] * 2
    assert found["pydantic_ai_responses"] == ANSWER
    assert found["agents_responses"] == [ANSWER, ANSWER, True, ["Rome"], "sunny"]
