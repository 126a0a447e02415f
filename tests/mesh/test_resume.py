"""Streams that go on elsewhere, on real workers: at every token, in every state, whatever was asked.

In most tests a sequence is lost at a chosen token, which to router and client is what a death is, while the
engine lives on; test_resume_deaths.py kills.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from engine_core.types.request import FinishReason
from tests.support.asking import Answer, Asker, random_prompt
from tests.support.mesh import Mesh
from tests.support.models import tiny_model
from tests.support.oracle import Oracle, oracle_for

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENS = 10
"""Of each output; one is asked for each index at which it may break."""
LENGTHS = [40 + 16 * at for at in range(TOKENS)]
"""Prompt lengths, so far apart that a position belongs to one request alone."""


@dataclass
class Breaking:
    """A mesh that loses request `at` when its token `at` is due, once after each arm()."""

    mesh: Mesh
    asker: Asker
    oracle: Oracle
    folder: Path

    def arm(self) -> None:
        """Each request breaks once more."""
        for path in self.folder.glob("once-*"):
            path.unlink()
        (self.folder / "on").touch()

    def disarm(self) -> None:
        """Nothing breaks."""
        (self.folder / "on").unlink(missing_ok=True)

    def broken(self) -> list[int]:
        """Which have broken since arm()."""
        return sorted(int(path.name.removeprefix("once-")) for path in self.folder.glob("once-*"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def breaking(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Breaking]:
    folder = tmp_path_factory.mktemp("breaks")
    rules = [
        {"position": n + at, "action": "fail", "when": str(folder / "on"), "once": str(folder / f"once-{at}")}
        for at, n in enumerate(LENGTHS)
    ]
    options = {"kv_tokens": 4096, "policy": "round_robin", "fault_script": json.dumps({"rules": rules})}
    model = tiny_model("llama")
    async with Mesh(model, decode=2, options=options) as mesh, Asker(mesh) as asker:
        yield Breaking(mesh, asker, oracle_for(model), folder)


@pytest.fixture(autouse=True)
def calm_afterwards(breaking: Breaking) -> Iterator[None]:
    yield
    breaking.disarm()


def check(served: Breaking, answer: Answer, at: int) -> None:
    """Right to the last token, by two attempts, with the counts of one."""
    assert answer.attempts == 2, (at, answer)
    served.oracle.assert_right([answer.claim()])
    reason = served.oracle.finish(answer.claim())
    assert reason is not None and answer.finish_reason == reason.value, (at, answer)
    assert answer.cached == 0, "what the second attempt found in caches is not the client's prompt"


VARIANTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "top_p": 0.95, "seed": 11},
    "min-tokens": {"temperature": 1.0, "seed": 5, "min_tokens": 7, "stop_token_ids": list(range(3, 200))},
}


@pytest.mark.parametrize(("variant", "stream"), [("greedy", True), ("sampled", False), ("min-tokens", True)])
async def test_a_break_at_every_token(breaking: Breaking, variant: str, stream: bool) -> None:
    options = {"max_tokens": TOKENS, "ignore_eos": True, **VARIANTS[variant]}
    breaking.arm()
    reached = []
    for at, length in enumerate(LENGTHS):
        answer = await breaking.asker.generate(random_prompt(length, at), stream=stream, **options)
        if at in breaking.broken():
            reached.append(at)
            check(breaking, answer, at)
        else:  # its stop token came first
            assert variant == "min-tokens" and len(answer.ids) <= at and answer.attempts == 1
            assert breaking.oracle.finish(answer.claim()) is FinishReason.STOP
    assert reached == list(range(TOKENS)) if variant != "min-tokens" else reached[:8] == list(range(8))


async def test_openai_replies_of_broken_streams(breaking: Breaking) -> None:
    """Text, stop strings and usage are what they are without a break."""
    for at in (1, 4):
        prompt = random_prompt(LENGTHS[at], at)
        options: dict[str, Any] = {"max_tokens": TOKENS, "ignore_eos": True}
        breaking.disarm()
        calm = await breaking.asker.complete(prompt, stream=True, **options)
        middle = len(calm.text) // 2
        stop = calm.text[max(middle - 2, 1) : middle + 2]
        stopped = await breaking.asker.complete(prompt, stream=True, stop=[stop], **options)
        assert calm.text.startswith(stopped.text) and stopped.stop_reason == stop
        for stream in (True, False):
            breaking.arm()
            broken = await breaking.asker.complete(prompt, stream=stream, **options)
            assert (broken.text, broken.ids, broken.finish_reason) == (calm.text, calm.ids, "length")
            assert broken.attempts == 2 and broken.cached == 0
            breaking.arm()
            cut = await breaking.asker.complete(prompt, stream=stream, stop=[stop], **options)
            assert (cut.text, cut.ids, cut.stop_reason) == (stopped.text, stopped.ids, stop)
            assert cut.attempts == (2 if at in breaking.broken() else 1)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "hello the user", "max_output_tokens": 40}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hello the user"}], "max_tokens": 40}),
    ],
)
async def test_usage_of_broken_items(breaking: Breaking, path: str, body: dict[str, Any]) -> None:
    """The counts of one attempt: a second one neither counts again nor finds the client's prompt in a cache."""
    told = []
    for breaks in (False, True):
        breaking.arm() if breaks else breaking.disarm()
        asked = {"model": "default", **body, "temperature": 0, "ignore_eos": True, "cache_salt": breaking.asker.salt()}
        async with httpx.AsyncClient(base_url=breaking.mesh.url, timeout=60.0, trust_env=False) as http:
            response = await http.post(path, json=asked)
        told.append(response.json()["usage"])
    assert breaking.broken(), "no token of it was one that breaks"
    assert told[0] == told[1] and told[0]["output_tokens"] == 40


async def test_a_seeded_request_may_be_asked_again_after_its_router_died(breaking: Breaking) -> None:
    """The text depends on prompt, seed and options: not on the room, nor on who serves it."""
    prompt = random_prompt(50, 99)
    options: dict[str, Any] = {"temperature": 1.0, "seed": 77, "ignore_eos": True}
    stream = breaking.asker.start(prompt, max_tokens=400, request_id="the-same", **options)
    await stream.tokens(3)
    breaking.mesh.kill("router")
    await breaking.mesh.gone("router")
    with pytest.raises(Exception, match="peer closed|disconnected|closed"):
        await stream.whole()
    before = list(stream.answer.ids)
    await breaking.mesh.start("router")
    await breaking.mesh.until_ready()
    again = await breaking.asker.generate(prompt, max_tokens=400, request_id="the-same", **options)
    assert again.ids[: len(before)] == before and len(again.ids) == 400
    breaking.oracle.assert_right([again.claim()])
