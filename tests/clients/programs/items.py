"""Anthropic's SDK, and what speaks OpenAI's responses or Anthropic's messages by itself. Argument: the router's URL."""

from __future__ import annotations

import asyncio
import sys
from typing import Any, Literal

import agents
import anthropic
import litellm
from cases import QUESTION, WEATHER, WEATHER_QUESTION, run
from langchain_openai import ChatOpenAI
from openai import AsyncOpenAI
from pydantic import BaseModel, TypeAdapter
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

URL = sys.argv[1]
ASK: str = QUESTION[0]["content"]
WEATHER_ASK: str = WEATHER_QUESTION[0]["content"]
litellm.suppress_debug_info = True
client = anthropic.Anthropic(base_url=URL.removesuffix("/v1"), api_key="none", max_retries=0, timeout=90)
FUNCTION = WEATHER["function"]
TOOL: Any = {"name": "get_weather", "description": "The weather in a city", "input_schema": FUNCTION["parameters"]}


class City(BaseModel):
    name: Literal["Paris", "Rome"]
    large: bool


# ---- anthropic ----------------------------------------------------------------------------------------


def anthropic_whole() -> Any:
    message = client.messages.create(model="default", max_tokens=60, messages=QUESTION)
    typed = anthropic.types.Message.model_validate(message.model_dump(), strict=True)
    usage, block = typed.usage, typed.content[0]
    prompt = usage.input_tokens + (usage.cache_read_input_tokens or 0)
    counted = client.messages.count_tokens(model="default", messages=QUESTION).input_tokens
    assert message._request_id and message.id == f"msg_{message._request_id}"
    return [block.text, typed.stop_reason, usage.output_tokens, prompt == counted]  # type: ignore[union-attr]


def anthropic_stream() -> Any:
    event = TypeAdapter(anthropic.types.RawMessageStreamEvent)
    for one in client.messages.create(model="default", max_tokens=5, messages=QUESTION, stream=True):
        event.validate_python(one.model_dump(), strict=True)
    with client.messages.stream(model="default", max_tokens=60, messages=QUESTION) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert final.content[0].text == text  # type: ignore[union-attr]
    return [text, final.stop_reason, final.usage.output_tokens]


def anthropic_stops() -> Any:
    asked: Any = {"model": "default", "max_tokens": 60, "messages": QUESTION}
    stopped = client.messages.create(stop_sequences=[" France"], **asked)
    goes_on = [*QUESTION, {"role": "assistant", "content": "The capital of France is"}]
    more = client.messages.create(**{**asked, "messages": goes_on})
    texts = [message.content[0].text for message in (stopped, more)]  # type: ignore[union-attr]
    return [*texts, stopped.stop_reason, stopped.stop_sequence]


def anthropic_tools() -> Any:
    forced: Any = {"type": "tool", "name": "get_weather"}
    asked: Any = {"model": "default", "max_tokens": 200, "tools": [TOOL]}
    whole = client.messages.create(messages=WEATHER_QUESTION, tool_choice=forced, **asked)
    with client.messages.stream(messages=WEATHER_QUESTION, tool_choice=forced, **asked) as stream:
        streamed = stream.get_final_message()
    call: Any = streamed.content[0]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    turns: Any = [*WEATHER_QUESTION, {"role": "assistant", "content": streamed.content}]
    asked |= {"tool_choice": {"type": "none"}, "max_tokens": 8}
    after = client.messages.create(messages=[*turns, {"role": "user", "content": [result]}], **asked)
    return [whole.content[0].input, call.input, streamed.stop_reason, after.content[0].type]  # type: ignore[union-attr]


def anthropic_schema() -> Any:
    message = client.messages.parse(model="default", max_tokens=60, messages=QUESTION, output_format=City)
    assert message.parsed_output is not None
    return message.parsed_output.model_dump()


def anthropic_errors() -> Any:
    found = []
    for more in ({"model": "other", "max_tokens": 5}, {"model": "default", "max_tokens": 0}):
        try:
            client.messages.create(messages=QUESTION, **more)  # type: ignore[call-overload]
        except anthropic.APIStatusError as exc:
            body: Any = exc.body
            found.append([type(exc).__name__, exc.status_code, body["error"]["type"]])
    return found


def litellm_messages() -> Any:
    asked: Any = {"model": "anthropic/default", "messages": QUESTION, "max_tokens": 60, "api_key": "none"}
    asked["api_base"] = URL.removesuffix("/v1")
    whole = litellm.completion(**asked)
    text = "".join(part.choices[0].delta.content or "" for part in litellm.completion(stream=True, **asked))
    return [whole.choices[0].message.content, text, whole.usage.completion_tokens]


# ---- responses ----------------------------------------------------------------------------------------


def litellm_responses() -> Any:
    asked: Any = {"model": "openai/default", "input": ASK, "api_base": URL, "api_key": "none"}
    whole: Any = litellm.responses(**asked)
    events = [str(event.type.value) for event in litellm.responses(stream=True, **asked)]
    return [whole.output[0].content[0].text, events[0], events[-1]]


def langchain_responses() -> Any:
    model = ChatOpenAI(model="default", base_url=URL, api_key="none", use_responses_api=True, max_retries=0)  # type: ignore[arg-type]
    return [model.invoke(ASK).text, "".join(str(part.text) for part in model.stream(ASK))]


def pydantic_ai_responses() -> Any:
    provider = OpenAIProvider(base_url=URL, api_key="none")
    agent = Agent(OpenAIResponsesModel("default", provider=provider))
    return agent.run_sync(ASK).output


def agents_responses() -> Any:
    return asyncio.run(_agents())


async def _agents() -> Any:
    agents.set_tracing_disabled(True)
    openai = AsyncOpenAI(base_url=URL, api_key="none", max_retries=0)
    model = agents.OpenAIResponsesModel("default", openai)
    asked: list[str] = []

    @agents.function_tool
    def get_weather(city: Literal["Paris", "Rome"]) -> str:
        """The weather in a city."""
        asked.append(city)
        return "sunny"

    plain = agents.Agent(name="plain", model=model)
    whole = (await agents.Runner.run(plain, ASK)).final_output
    streamed = agents.Runner.run_streamed(plain, ASK)
    events = [event async for event in streamed.stream_events()]
    settings = agents.ModelSettings(tool_choice="get_weather")
    caller = agents.Agent(
        name="caller", model=model, tools=[get_weather], model_settings=settings,
        tool_use_behavior="stop_on_first_tool",
    )  # fmt: skip
    called = (await agents.Runner.run(caller, WEATHER_ASK, max_turns=2)).final_output
    return [whole, streamed.final_output, bool(events), asked, called]


run(
    {
        "anthropic_whole": anthropic_whole,
        "anthropic_stream": anthropic_stream,
        "anthropic_stops": anthropic_stops,
        "anthropic_tools": anthropic_tools,
        "anthropic_schema": anthropic_schema,
        "anthropic_errors": anthropic_errors,
        "litellm_messages": litellm_messages,
        "litellm_responses": litellm_responses,
        "langchain_responses": langchain_responses,
        "pydantic_ai_responses": pydantic_ai_responses,
        "agents_responses": agents_responses,
    }
)
