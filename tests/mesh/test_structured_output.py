"""Outputs that follow grammars, from prefill, decode and MIXED engines: they parse, validate, and end by themselves;
a seed gives the same ones whatever runs beside them; and free outputs never notice.

The router takes turns between a pair and a MIXED worker.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import pytest_asyncio

from tests.support.asking import Answer, Asker, random_prompt, until_async
from tests.support.mesh import Mesh
from tests.support.models import tiny_model
from tests.support.oracle import oracle_for
from tests.support.schemas import SCHEMAS

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCK, POOL = 16, 24
EOS = 2
HOT: dict[str, Any] = {"temperature": 1.5, "max_tokens": 600}


@dataclass
class Structured:
    """A mesh with a pair and a MIXED worker, whose steps are slow while `slow` is there."""

    mesh: Mesh
    asker: Asker
    slow: Path

    async def preemptions(self) -> float:
        """So far, of all workers."""
        found = [await self.asker.counters(name) for name in ("decode-0", "mixed-0")]
        return sum(counters.get("preemptions", 0) for counters in found)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def structured(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Structured]:
    slow = tmp_path_factory.mktemp("structured") / "slow"
    script = {"rules": [{"action": "slow", "when": str(slow)}]}
    options = {"policy": "round_robin", "fault_script": json.dumps(script)}
    overrides: dict[str, dict[str, Any]] = {
        "prefill": {"kv_tokens": 8192},
        "decode": {"kv_tokens": BLOCK * POOL},
        "router": {"pool_headroom": 0.0},  # more may come than fits
    }
    async with Mesh(tiny_model("llama"), mixed=1, options=options, overrides=overrides) as mesh, Asker(mesh) as asker:
        yield Structured(mesh, asker, slow)


async def test_what_follows_a_schema_parses_and_validates(structured: Structured) -> None:
    """Each schema twice with one seed, all together: twice the same, from both kinds of workers."""
    asked = [
        structured.asker.generate(random_prompt(20 + i, i), seed=i, stream=bool(turn), guided_json=schema, **HOT)
        for turn in range(2)
        for i, schema in enumerate(SCHEMAS.values())
    ]
    answers = await asyncio.gather(*asked)
    first, second = answers[: len(SCHEMAS)], answers[len(SCHEMAS) :]
    checker = jsonschema.FormatChecker()
    for (name, schema), answer, again in zip(SCHEMAS.items(), first, second, strict=True):
        assert answer.finish_reason == again.finish_reason == "stop", (name, answer)
        assert answer.ids == again.ids and answer.text == again.text, name
        value = json.loads(answer.text)
        jsonschema.validate(value, schema, cls=jsonschema.Draft202012Validator, format_checker=checker)
        assert json.loads(json.dumps(value)) == value
    assert {answer.path for answer in answers} == {"pd", "local"}


KINDS: list[tuple[dict[str, Any], str]] = [
    ({"guided_regex": "([a-f]{2}:){3}[0-9]{1,3}"}, r"([a-f]{2}:){3}[0-9]{1,3}"),
    ({"guided_choice": ["yes", "no", "perhaps é 😀", 'a "b"\n']}, 'yes|no|perhaps é 😀|a "b"\n'),
    (
        {"guided_grammar": 'root ::= pair ("; " pair){1,3}\npair ::= [a-c] "=" [0-9]\n'},
        "[a-c]=[0-9](; [a-c]=[0-9]){1,3}",
    ),
    ({"structured_outputs": {"grammar": 'start: "(" start ")" | "x"'}}, r"\(*x\)*"),
    ({"structured_outputs": {"regex": "^x{3,9}$"}}, "x{3,9}"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": [[1], "b"]}}}}, r'\[1\]|"b"'),
]


@pytest.mark.parametrize(("fields", "pattern"), KINDS)
async def test_every_kind_of_grammar(structured: Structured, fields: dict[str, Any], pattern: str) -> None:
    asked = [
        structured.asker.ask(api, random_prompt(30, 100 + seed), stream=stream, seed=seed, **fields, **HOT)
        for seed, (api, stream) in enumerate((a, s) for a in ("generate", "completions") for s in (True, False))
    ]
    for answer in await asyncio.gather(*asked):
        assert re.fullmatch(pattern, answer.text), answer
        assert answer.finish_reason == "stop" and answer.ids[-1] in (0, EOS)


def spelling(name: str, distance: int) -> list[tuple[dict[str, Any], str]]:
    """Ways of asking for text that spells the special token behind so many characters, which have a token each, and
    the output of each."""
    before = "xq" * (distance // 2) + "x" * (distance % 2)
    text, pattern = f"{before}<|{name}|>b", rf"{before}<\|{name}\|>b"
    return [
        ({"guided_regex": pattern}, text),
        ({"guided_choice": [text]}, text),
        ({"guided_grammar": f"start: {json.dumps(text)}"}, text),
        ({"guided_json": {"const": text}}, json.dumps(text)),
        ({"guided_json": {"enum": [text]}}, json.dumps(text)),
        ({"guided_json": {"type": "string", "pattern": f"^{pattern}$"}}, json.dumps(text)),
    ]


@pytest.mark.parametrize("distance", [0, 12, 13, 100])
async def test_text_that_spells_special_tokens_is_text(structured: Structured, distance: int) -> None:
    cases = [case for name in ("im_start", "im_end") for case in spelling(name, distance)]
    asked = [
        structured.asker.ask(api, random_prompt(12, i), stream=stream, temperature=1.5, max_tokens=200, **fields)
        for i, (fields, _) in enumerate(cases)
        for api, stream in (("completions", True), ("generate", False))
    ]
    answers = await asyncio.gather(*asked)
    for (fields, text), streamed, whole in zip(cases, answers[::2], answers[1::2], strict=True):
        assert streamed.text == whole.text == text, (fields, streamed, whole)
        assert streamed.finish_reason == whole.finish_reason == "stop"
        assert len(whole.ids) > distance and not {0, 1, EOS} & set(whole.ids[:-1])


async def test_a_chat_by_a_schema(structured: Structured) -> None:
    schema = SCHEMAS["an order"]
    wanted = {"type": "json_schema", "json_schema": {"name": "order", "schema": schema, "strict": True}}
    body = {"model": "default", "messages": [{"role": "user", "content": "order"}], "n": 2, "seed": 4, **HOT}
    body["response_format"] = wanted
    reply = await structured.asker.post("/v1/chat/completions", body)
    for one in reply["choices"]:
        assert one["finish_reason"] == "stop"
        jsonschema.validate(json.loads(one["message"]["content"]), schema)


async def test_free_outputs_beside_constrained_ones_are_what_they_are_alone(structured: Structured) -> None:
    free: dict[str, Any] = {"temperature": 1.2, "max_tokens": 30, "ignore_eos": True, "logprobs": 2}
    prompts = [random_prompt(40, 200 + i) for i in range(4)]
    alone = [await structured.asker.generate(prompt, seed=i, **free) for i, prompt in enumerate(prompts)]
    constrained = [
        structured.asker.generate(random_prompt(25, 220 + i), seed=i, guided_json=SCHEMAS["list of objects"], **HOT)
        for i in range(8)
    ]
    mixed = [structured.asker.generate(prompt, seed=i, **free) for i, prompt in enumerate(prompts)]
    beside = (await asyncio.gather(*constrained, *mixed))[len(constrained) :]
    assert [answer.ids for answer in beside] == [answer.ids for answer in alone]
    oracle_for(tiny_model("llama")).assert_right([answer.claim() for answer in beside])


async def test_a_seed_gives_the_same_output_alone_batched_and_preempted(structured: Structured) -> None:
    fields: dict[str, Any] = {"guided_regex": "([a-z ]{9}[0-9]){24}", **HOT}
    prompts = [random_prompt(60, 300 + i) for i in range(6)]
    alone = [await structured.asker.generate(prompt, seed=i, **fields) for i, prompt in enumerate(prompts)]
    assert all(re.fullmatch("([a-z ]{9}[0-9]){24}", answer.text) for answer in alone)
    assert {answer.path for answer in alone} == {"pd", "local"}
    before = await structured.preemptions()
    structured.slow.touch()
    asked = [structured.asker.start(prompt, seed=i, **fields) for i, prompt in enumerate(prompts)]

    async def pressed() -> bool:
        return await structured.preemptions() > before or all(one.done for one in asked)

    await until_async(pressed, 60.0)
    structured.slow.unlink()
    batched: list[Answer] = [await one.whole() for one in asked]
    assert await structured.preemptions() > before, "the pools held them all"
    assert [answer.ids for answer in batched] == [answer.ids for answer in alone]
    assert {answer.finish_reason for answer in batched} == {"stop"}


async def test_limits_cut_and_ends_win(structured: Structured) -> None:
    prompt = random_prompt(20, 400)
    cut = await structured.asker.generate(prompt, max_tokens=4, guided_regex="[a-f]{40}")
    assert cut.finish_reason == "length" and len(cut.ids) == 4 and re.fullmatch("[a-f]+", cut.text)
    short = await structured.asker.generate(prompt, min_tokens=30, guided_choice=["yes"], max_tokens=60)
    assert (short.text, short.finish_reason) == ("yes", "stop") and len(short.ids) < 8
    longer = await structured.asker.generate(prompt, min_tokens=30, guided_regex="[a-f]{1,200}", max_tokens=40)
    assert len(longer.ids) >= 30
    one = await structured.asker.generate(prompt, max_tokens=1, guided_choice=["no"])
    assert "no".startswith(one.text) and one.finish_reason == "length"


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"guided_json": {"type": "strin"}}, "guided_json", "Invalid type: strin"),
        ({"guided_regex": "("}, "guided_regex", "unclosed group"),
        ({"guided_grammar": "start: nowhere"}, "guided_grammar", "unknown name"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "not together with guided_regex"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "not together with guided_regex"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}, "strict": True}}},
            "response_format",
            'Unimplemented keys: ["not"]',
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_cannot_be_compiled_is_a_400_before_any_work(
    structured: Structured, fields: dict[str, Any], param: str, reason: str, *, stream: bool
) -> None:
    asking = structured.asker.start(random_prompt(10, 500), stream=stream, **fields)
    answer = await asking.whole()
    assert answer.status == 400 and answer.error is not None, answer
    assert answer.error["param"] == param and reason in answer.error["message"]
    assert not [move for move in await structured.asker.moves(asking.request_id) if move["to"] == "PLACED"]
