"""Calls that tool_choice forces, end to end: the SDK joins them to JSON that validates, in each family's form."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import openai
import pytest
import pytest_asyncio

from services.router.parsers.forcing import MAX_CALLS
from tests.support.mesh import Mesh
from tests.support.models import tiny_model, with_special_tokens

pytestmark = pytest.mark.asyncio(loop_scope="session")

MARKS = (
    "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]",
    "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>",
    "｜DSML｜",
)  # fmt: skip
ROUTERS: Mapping[str, Mapping[str, str]] = {
    "router": {"tool_call_parser": "json", "reasoning_parser": "none"},
    "router-1": {"tool_call_parser": "hermes", "reasoning_parser": "none"},
    "router-2": {"tool_call_parser": "mistral", "reasoning_parser": "mistral"},
    "router-3": {"tool_call_parser": "auto", "reasoning_parser": "auto"},  # the vocabulary is harmony's
    "router-4": {"tool_call_parser": "qwen3_coder", "reasoning_parser": "none"},
    "router-5": {"tool_call_parser": "deepseek_v32", "reasoning_parser": "none"},
}
by_router = pytest.mark.parametrize("router", ROUTERS)

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Málaga 🌞", 'the "Hague"']},
        "days": {"type": "integer", "minimum": 1, "maximum": 31},
        "notes": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 2},
        "where": {"$ref": "#/$defs/point"},
    },
    "required": ["city", "days", "notes", "where"],
    "additionalProperties": False,
    "$defs": {"point": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}},
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS, "strict": True}}
TIME = {"type": "function", "function": {"name": "get_time"}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
SCHEMAS = {"get_weather": PARAMETERS, "get_time": {"type": "object", "maxProperties": 0}}


@dataclass
class Tools:
    """The mesh, its special tokens, and what makes a model of random weights end its thoughts and its output."""

    mesh: Mesh
    ids: Mapping[str, int]

    def client(self, router: str) -> openai.AsyncOpenAI:
        """The SDK at one router."""
        return openai.AsyncOpenAI(
            base_url=self.mesh.url_of(router) + "/v1", api_key="none", max_retries=0, timeout=60.0
        )

    def asked(self, seed: int, **more: Any) -> dict[str, Any]:
        """A chat with tools."""
        ends = (self.ids["<|im_end|>"], self.ids["[/THINK]"], self.ids["<|end|>"])
        return {
            "model": "default",
            "messages": [{"role": "user", "content": "How is the weather?"}],
            "tools": [WEATHER, TIME],
            "max_tokens": 400,
            "seed": seed,
            "logit_bias": {str(i): 60 for i in ends},
            **more,
        }


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def tools(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Tools]:
    folder = tmp_path_factory.mktemp("tools") / "model"
    ids = with_special_tokens(tiny_model("llama"), MARKS, folder)
    async with Mesh(folder, routers=len(ROUTERS), overrides=ROUTERS) as mesh:
        yield Tools(mesh, ids)


def check(calls: Any, most: int) -> None:
    """Each call has an id of its own and arguments by the schema of its function."""
    assert 1 <= len(calls) <= most
    assert len({call.id for call in calls}) == len(calls)
    for call in calls:
        assert call.type == "function" and call.id.startswith("call_")
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


@by_router
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
async def test_a_forced_call_is_valid_whole_and_streamed(tools: Tools, router: str, choice: Any) -> None:
    async with tools.client(router) as client:
        for seed in range(2):
            asked = tools.asked(seed, tool_choice=choice, temperature=1.5)
            whole = (await client.chat.completions.create(**asked)).choices[0]
            assert whole.finish_reason == "tool_calls" and whole.message.content is None
            check(whole.message.tool_calls, 1 if choice == NAMED else MAX_CALLS)
            if choice == NAMED:
                assert [c.function.name for c in whole.message.tool_calls] == ["get_weather"]
            async with client.chat.completions.stream(**asked) as stream:
                async for _ in stream:
                    pass
                streamed = (await stream.get_final_completion()).choices[0]
            assert streamed.finish_reason == "tool_calls" and not streamed.message.content
            check(streamed.message.tool_calls, 1 if choice == NAMED else MAX_CALLS)
            assert [(c.function.name, c.function.arguments) for c in streamed.message.tool_calls or ()] == [
                (c.function.name, c.function.arguments) for c in whole.message.tool_calls
            ]


@by_router
async def test_arguments_are_streamed_as_they_come(tools: Tools, router: str) -> None:
    async with tools.client(router) as client:
        asked = tools.asked(1, tool_choice=NAMED, stream=True)
        deltas = [c.choices[0].delta async for c in await client.chat.completions.create(**asked) if c.choices]
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert calls[0].function.name == "get_weather" and calls[0].id.startswith("call_")
    assert [(c.id, c.function.name, c.type) for c in calls[1:]] == [(None, None, None)] * (len(calls) - 1)
    assert {c.index for c in calls} == {0}
    pieces = [c.function.arguments for c in calls]
    jsonschema.validate(json.loads("".join(pieces)), PARAMETERS)
    assert not any(delta.content for delta in deltas)


@by_router
async def test_no_parallel_calls_is_one_call(tools: Tools, router: str) -> None:
    async with tools.client(router) as client:
        for seed in range(2):
            asked = tools.asked(seed, tool_choice="required", parallel_tool_calls=False)
            choice = (await client.chat.completions.create(**asked)).choices[0]
            check(choice.message.tool_calls, 1)


@by_router
@pytest.mark.parametrize("most", [None, 3])
async def test_a_model_that_never_ends_by_itself_calls_no_more_than_it_may(
    tools: Tools, router: str, most: int | None
) -> None:
    harmony = router == "router-3"  # its form has one call
    asked = tools.asked(1, tool_choice="required", temperature=0, max_tokens=2000, tools=[TIME])
    asked["logit_bias"] = {str(tools.ids[end]): -100 for end in ("<|im_end|>", "<|endoftext|>", "/")}
    asked["logit_bias"] |= {str(tools.ids[mark]): 60 for mark in ("[/THINK]", "<|end|>")}
    async with tools.client(router) as client:
        more = {} if most is None else {"max_tool_calls": most}
        choice = (await client.chat.completions.create(**asked, extra_body=more)).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert len(choice.message.tool_calls or ()) == (1 if harmony else most or MAX_CALLS)


async def test_thoughts_come_before_a_forced_call(tools: Tools) -> None:
    async with tools.client("router-2") as client:
        asked = tools.asked(0, tool_choice=NAMED, temperature=2.0)
        # It thinks, and each token of the thought is a letter or the end of it.
        letters = "abcdefghijklmnopqrst"
        asked["logit_bias"] |= {str(tools.ids["[THINK]"]): 100, str(tools.ids["[/THINK]"]): 70} | {
            str(tools.ids[c]): 60 for c in letters
        }
        for seed in range(20):
            found = await client.chat.completions.create(**{**asked, "seed": seed})
            message = found.choices[0].message
            assert message.content is None
            thought = getattr(message, "reasoning_content", "")
            if found.choices[0].finish_reason == "length":  # it thought on and on
                assert message.tool_calls is None and len(thought) == 399
                continue
            check(message.tool_calls, 1)
            assert set(thought) <= set(letters)
            assert found.usage is not None and found.usage.completion_tokens_details is not None
            assert found.usage.completion_tokens_details.reasoning_tokens == len(thought)
            if len(thought) > 2:
                return
    raise AssertionError("no thought was long enough to see")


async def test_free_output_is_content(tools: Tools) -> None:
    """A model of random weights calls nothing by itself."""
    async with tools.client("router") as client:
        for choice in ("auto", "none"):
            tool = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
            asked = tools.asked(0, tool_choice=choice, tools=[tool], max_tokens=8)
            found = (await client.chat.completions.create(**asked)).choices[0]
            assert found.message.tool_calls is None and isinstance(found.message.content, str)


async def test_results_of_calls_go_back_into_the_chat(tools: Tools) -> None:
    async with tools.client("router") as client:
        asked = tools.asked(0, tool_choice=NAMED)
        message = (await client.chat.completions.create(**asked)).choices[0].message
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "cold"}
        asked["messages"] = [*asked["messages"], message.model_dump(exclude_none=True), result]
        check((await client.chat.completions.create(**asked)).choices[0].message.tool_calls, 1)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "x" * 65}}]}, "tools[0].function.name"),
        ({"tools": [TIME, TIME]}, "tools"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
            "tools[0].function.parameters",
        ),
        ({"tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ],
)
async def test_bad_definitions_are_refused_by_name(tools: Tools, body: dict[str, Any], field: str) -> None:
    async with tools.client("router") as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(**tools.asked(0, **body))
    assert caught.value.param == field
    assert field.split("[")[0] in caught.value.message


async def test_a_schema_that_cannot_be_followed_is_refused(tools: Tools) -> None:
    impossible = {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": impossible}}
    async with tools.client("router") as client:
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(**tools.asked(0, tools=[tool], tool_choice="required"))
