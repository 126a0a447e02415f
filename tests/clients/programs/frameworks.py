"""What people build with: langchain-openai, litellm, pydantic-ai and openai-agents. Argument: the router's URL."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Literal

import agents
import litellm
from cases import QUESTION, WEATHER, WEATHER_QUESTION, run
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

URL = sys.argv[1]
ASK = "What is the capital of France?"
litellm.suppress_debug_info = True
WEATHER_ASK = WEATHER_QUESTION[0]["content"]


class City(BaseModel):
    name: Literal["Paris", "Rome"]
    large: bool


@tool
def get_weather(city: Literal["Paris", "Rome"], days: int) -> str:
    """The weather in a city."""
    return f"sunny in {city}, {days}"


# ---- langchain ----------------------------------------------------------------------------------------


def langchain(**more: Any) -> ChatOpenAI:
    options = {"model": "default", "temperature": 0, "max_tokens": 60, "timeout": 90, "max_retries": 0, **more}
    return ChatOpenAI(base_url=URL, api_key="none", **options)


def langchain_invoke() -> Any:
    message = langchain().invoke(ASK)
    return [message.content, message.usage_metadata["output_tokens"], message.response_metadata["finish_reason"]]


def langchain_stream() -> Any:
    chunks = list(langchain(stream_usage=True).stream(ASK))
    usage = [c.usage_metadata["output_tokens"] for c in chunks if c.usage_metadata]
    return ["".join(str(c.content) for c in chunks), sum(usage)]


def langchain_tools() -> Any:
    forced = langchain().bind_tools([get_weather], tool_choice="get_weather")
    call = forced.invoke(WEATHER_ASK).tool_calls[0]
    whole = None
    for chunk in forced.stream(WEATHER_ASK):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    return [call["name"], call["args"], whole.tool_calls[0]["args"], get_weather.invoke(call["args"])]


def langchain_structured() -> Any:
    return [
        langchain().with_structured_output(City, method=method).invoke(ASK).model_dump()
        for method in ("json_schema", "function_calling")
    ]


def langchain_logprobs() -> Any:
    content = langchain(logprobs=True, top_logprobs=2).invoke(ASK).response_metadata["logprobs"]["content"]
    return ["".join(t["token"] for t in content), [len(t["top_logprobs"]) for t in content]]


def langchain_completion() -> Any:
    model = OpenAI(base_url=URL, api_key="none", model="default", temperature=0, max_tokens=3)
    return [model.invoke("The capital of France is"), "".join(model.stream("The capital of France is"))]


async def _langchain_batch() -> Any:
    return [m.content for m in await langchain().abatch([ASK] * 3)]


# ---- litellm ------------------------------------------------------------------------------------------


def lite(**more: Any) -> Any:
    options = {"messages": QUESTION, "temperature": 0, "max_tokens": 60, "timeout": 90, "num_retries": 0, **more}
    return litellm.completion(model="openai/default", api_base=URL, api_key="none", **options)


def litellm_chat() -> Any:
    reply = lite()
    return [reply.choices[0].message.content, reply.choices[0].finish_reason, reply.usage.completion_tokens]


def litellm_stream() -> Any:
    chunks = list(lite(stream=True, stream_options={"include_usage": True}))
    whole = litellm.stream_chunk_builder(chunks, messages=QUESTION)
    return [whole.choices[0].message.content, whole.usage.completion_tokens]


def litellm_tools() -> Any:
    calls = []
    for stream in (False, True):
        reply = lite(
            messages=WEATHER_QUESTION, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False, stream=stream
        )
        whole = litellm.stream_chunk_builder(list(reply)) if stream else reply
        call = whole.choices[0].message.tool_calls[0]
        calls.append([call.function.name, json.loads(call.function.arguments), whole.choices[0].finish_reason])
    return calls


def litellm_schema() -> Any:
    return City.model_validate_json(lite(response_format=City).choices[0].message.content).model_dump()


def litellm_errors() -> Any:
    found = []
    for wrong in ({"temperature": 3}, {"max_tokens": -1}):
        try:
            lite(**wrong)
        except litellm.exceptions.APIError as exc:
            found.append(["APIError", str(exc)])
        except litellm.exceptions.BadRequestError as exc:
            found.append(["BadRequestError", exc.status_code])
    try:
        litellm.completion(model="openai/nobody", api_base=URL, api_key="none", messages=QUESTION, num_retries=0)
    except litellm.exceptions.NotFoundError as exc:
        found.append(["NotFoundError", exc.status_code])
    return found


def litellm_completion() -> Any:
    reply = litellm.text_completion(
        model="text-completion-openai/default", prompt="The capital of France is", api_base=URL, api_key="none",
        temperature=0, max_tokens=3, logprobs=1,
    )  # fmt: skip
    return [reply.choices[0].text, len(reply.choices[0].logprobs.tokens)]


# ---- pydantic-ai --------------------------------------------------------------------------------------


def thinking() -> OpenAIChatModel:
    settings: Any = {"temperature": 0.0, "max_tokens": 60, "timeout": 90}
    return OpenAIChatModel("default", provider=OpenAIProvider(base_url=URL, api_key="none"), settings=settings)


def pydantic_ai_text() -> Any:
    result = Agent(thinking()).run_sync(ASK)
    return [result.output, result.usage.output_tokens]


def pydantic_ai_output() -> Any:
    """By a forced tool, and by a JSON schema."""
    outputs: list[Any] = [City, NativeOutput(City)]
    return [Agent(thinking(), output_type=kind).run_sync(ASK).output.model_dump() for kind in outputs]


async def _pydantic_ai_stream() -> Any:
    async with Agent(thinking()).run_stream(ASK) as result:
        parts = [part async for part in result.stream_text(delta=True, debounce_by=None)]
    return "".join(parts)


# ---- openai-agents ------------------------------------------------------------------------------------


def agents_model() -> Any:
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=URL, api_key="none", timeout=90, max_retries=0)
    return agents.OpenAIChatCompletionsModel(model="default", openai_client=client)


async def _agents_run() -> Any:
    """The agent calls its function; what that says is the answer."""
    asked = []

    @agents.function_tool
    def weather(city: Literal["Paris", "Rome"]) -> str:
        """The weather in a city."""
        asked.append(city)
        return "sunny"

    settings = agents.ModelSettings(temperature=0, max_tokens=60, tool_choice="required", parallel_tool_calls=False)
    agent = agents.Agent(
        name="a", model=agents_model(), tools=[weather], model_settings=settings,
        tool_use_behavior="stop_on_first_tool",
    )  # fmt: skip
    result = await agents.Runner.run(agent, WEATHER_ASK, max_turns=4)
    return [asked, result.final_output]


async def _agents_output() -> Any:
    settings = agents.ModelSettings(temperature=0, max_tokens=60)
    agent = agents.Agent(name="a", model=agents_model(), output_type=City, model_settings=settings)
    streamed = agents.Runner.run_streamed(agent, ASK)
    kinds = [event.type async for event in streamed.stream_events()]
    return [streamed.final_output.model_dump(), "raw_response_event" in kinds]


if __name__ == "__main__":
    run({
        "langchain_invoke": langchain_invoke,
        "langchain_stream": langchain_stream,
        "langchain_batch": lambda: asyncio.run(_langchain_batch()),
        "langchain_tools": langchain_tools,
        "langchain_structured": langchain_structured,
        "langchain_logprobs": langchain_logprobs,
        "langchain_completion": langchain_completion,
        "litellm_chat": litellm_chat,
        "litellm_stream": litellm_stream,
        "litellm_tools": litellm_tools,
        "litellm_schema": litellm_schema,
        "litellm_errors": litellm_errors,
        "litellm_completion": litellm_completion,
        "pydantic_ai_text": pydantic_ai_text,
        "pydantic_ai_output": pydantic_ai_output,
        "pydantic_ai_stream": lambda: asyncio.run(_pydantic_ai_stream()),
        "agents_run": lambda: asyncio.run(_agents_run()),
        "agents_output": lambda: asyncio.run(_agents_output()),
    })  # fmt: skip
