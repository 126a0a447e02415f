"""Log probabilities over HTTP from a scripted worker: aligned with the tokens that a client gets, whatever breaks, and
an error rather than those of another text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest

from engine_core.types.errors import Leg, PdmeshError, PeerFailedError
from engine_core.types.request import Finish, FinishReason
from engine_core.types.sampling import TokenLogprobs
from pdmesh.decode.v1 import decode_service_pb2 as decode_pb2
from services.wire.logprobs import logprobs_to_proto
from tests.support.fake_decode import EOS, FakeDecode, Harness, Step, running_router
from tests.support.models import tiny_model

TEXT = "the cat sat on the mat"
BROKE = PeerFailedError("the connection broke", leg=Leg.DECODE)


def scored(token: int, place: int, best: int) -> TokenLogprobs:
    """What the worker says of a token at a place."""
    return TokenLogprobs(token, -float(place) - 0.5, 1, tuple((t, -float(place + t)) for t in range(best)))


def message(request: Any, ids: Sequence[int], first: int, finish: Finish | None = None) -> decode_pb2.GenerateResponse:
    """Tokens with their log probabilities."""
    from services.wire.generation import finish_to_proto

    best = request.sampling.logprobs
    return decode_pb2.GenerateResponse(
        first_index=first,
        token_ids=ids,
        logprobs=[logprobs_to_proto(scored(t, i, best)) for i, t in enumerate(ids, first)],
        finished=None if finish is None else finish_to_proto(finish),
    )


def prompt_message(request: Any, first: int, end: int) -> decode_pb2.GenerateResponse:
    """Positions of the prompt."""
    prompt, best = request.prompt_token_ids, request.sampling.prompt_logprobs
    positions = [logprobs_to_proto(scored(prompt[i], i, best)) for i in range(first, end)]
    return decode_pb2.GenerateResponse(prompt_first_position=first, prompt_logprobs=positions)


def worker(ids: Sequence[int], breaks: dict[str | int, PdmeshError], per_message: int = 2) -> FakeDecode:
    """Knows the whole output; fails once where `breaks` says: "prompt" (half of its positions are out), "token 1"
    (all are), or when so many tokens are out."""
    whole, left = [*ids, EOS], dict(breaks)

    def script(call: decode_pb2.GenerateRequest) -> Iterator[Step]:
        request = call.request
        prompt = len(request.prompt_token_ids)
        if request.sampling.HasField("prompt_logprobs"):
            yield prompt_message(request, 1, prompt // 2)
            if "prompt" in left:
                yield left.pop("prompt")
            yield prompt_message(request, prompt // 2, prompt)
            if "token 1" in left:
                yield left.pop("token 1")
        at = len(request.emitted_token_ids)
        while at < len(whole):
            if at in left:
                yield left.pop(at)
            some = whole[at : min([at + per_message, *(b for b in left if isinstance(b, int) and b > at)])]
            at += len(some)
            end = Finish(FinishReason.STOP, EOS) if at == len(whole) else None
            yield message(request, some, at - len(some), end)

    return FakeDecode(script)


async def ask(router: Harness, *, stream: bool, **options: Any) -> dict[str, Any]:
    """/generate; of a stream the last event with all tokens and log probabilities joined."""
    body = {"text": "hello there", "logprobs": 2, "prompt_logprobs": 1, "max_tokens": 99, "stream": stream, **options}
    response = await router.http.post("/generate", json=body)
    assert response.status_code == 200, response.text
    if not stream:
        return dict(response.json())
    lines = response.text.strip().split("\n\n")
    assert lines[-1] == "data: [DONE]"
    parts = [msgspec.json.decode(line.removeprefix("data: ")) for line in lines[:-1] if line.startswith("data: ")]
    for part in parts:
        assert len(part["logprobs"]) == len(part["output_ids"])
    joined = {name: [x for part in parts for x in part[name]] for name in ("logprobs", "output_ids")}
    return {**parts[-1], **joined, "text": "".join(part["text"] for part in parts)}


def right(reply: dict[str, Any], ids: Sequence[int]) -> None:
    """Tokens and theirs."""
    assert reply["output_ids"] == list(ids)
    assert [(one["token_id"], one["logprob"]) for one in reply["logprobs"]] == [
        (token, -float(place) - 0.5) for place, token in enumerate(ids)
    ]
    assert all([t for t, _ in one["top"]] == [0, 1] for one in reply["logprobs"])


@pytest.mark.parametrize("stream", [True, False])
async def test_each_position_once_over_all_attempts(stream: bool) -> None:
    fake = FakeDecode(lambda request: [])
    async with running_router(tiny_model(), fake) as router:
        ids, prompt = router.ids(TEXT), router.tokenizer.encode("hello there", add_special_tokens=True)
        assert len(prompt) > 3
        asked_again: dict[str | int, list[bool]] = {"prompt": [True, True], "token 1": [True, False]}
        for at in ("prompt", "token 1", 1, len(ids)):
            fake.requests.clear()
            fake.script = worker(ids, {at: BROKE}).script
            reply = await ask(router, stream=stream)
            right(reply, [*ids, EOS])
            assert reply["text"] == TEXT and reply["attempts"] == 2
            found = reply["prompt_logprobs"]
            assert found[0] is None and [one[str(prompt[i])]["logprob"] for i, one in enumerate(found) if i] == [
                -float(i) - 0.5 for i in range(1, len(prompt))
            ]
            asked = [r.request.sampling.HasField("prompt_logprobs") for r in fake.requests]
            assert asked == asked_again.get(at, [True, False])
            assert [r.request.sampling.logprobs for r in fake.requests] == [2, 2]


@pytest.mark.parametrize("stream", [True, False])
async def test_what_a_stop_cuts_away_has_none(stream: bool) -> None:
    fake = FakeDecode(lambda request: [])
    async with running_router(tiny_model(), fake) as router:
        ids = router.ids(TEXT)
        fake.script = worker(ids, {}, per_message=len(ids)).script
        cut = await ask(router, stream=stream, stop=["sat"])
        assert cut["text"] == "the cat " and len(cut["output_ids"]) < len(ids)
        right(cut, ids[: len(cut["output_ids"])])


async def test_a_request_given_back_keeps_what_came_with_it() -> None:
    fake = FakeDecode(lambda request: [])
    async with running_router(tiny_model(), fake) as router:
        ids = router.ids(TEXT)
        again = worker(ids, {}).script

        def script(call: decode_pb2.GenerateRequest) -> Iterator[Step]:
            if call.request.session.attempt:
                yield from again(call)
                return
            yield prompt_message(call.request, 1, len(call.request.prompt_token_ids))
            yield message(call.request, ids[:3], 0, Finish(FinishReason.PREEMPTED))

        fake.script = script
        right(await ask(router, stream=True), [*ids, EOS])


async def test_all_that_shapes_the_draws_goes_with_every_attempt() -> None:
    fake = FakeDecode(lambda request: [])
    async with running_router(tiny_model(), fake) as router:
        ids = router.ids(TEXT)
        fake.script = worker(ids, {3: BROKE}).script
        asked: dict[str, Any] = {
            "frequency_penalty": 0.5, "presence_penalty": -0.25, "repetition_penalty": 1.5,
            "logit_bias": {"5": 1.5, "6": -100.0}, "seed": 9, "temperature": 1.0,
        }  # fmt: skip
        await ask(router, stream=False, prompt_logprobs=None, **asked)
        first, second = (r.request.sampling for r in fake.requests)
        assert first == second
        for name in ("frequency_penalty", "presence_penalty", "repetition_penalty", "seed"):
            assert getattr(first, name) == asked[name]
        assert dict(first.logit_bias) == {5: 1.5, 6: -100.0} and not first.HasField("prompt_logprobs")
        await ask(router, stream=False, prompt_logprobs=None, logprobs=0)
        plain = fake.requests[-1].request.sampling
        assert (plain.repetition_penalty, plain.HasField("grammar"), plain.logprobs) == (1.0, False, 0)


def left_out(spoilt: decode_pb2.GenerateResponse) -> None:
    del spoilt.logprobs[:]


def one_too_few(spoilt: decode_pb2.GenerateResponse) -> None:
    del spoilt.logprobs[0]


def of_another_token(spoilt: decode_pb2.GenerateResponse) -> None:
    spoilt.logprobs[0].chosen.token_id += 1


def no_number(spoilt: decode_pb2.GenerateResponse) -> None:
    spoilt.logprobs[0].chosen.logprob = float("nan")


def too_few_best(spoilt: decode_pb2.GenerateResponse) -> None:
    del spoilt.logprobs[1].top[0]


@pytest.mark.parametrize("spoil", [left_out, one_too_few, of_another_token, no_number, too_few_best])
async def test_wrong_ones_end_the_request(spoil: Any) -> None:
    fake = FakeDecode(lambda request: [])
    async with running_router(tiny_model(), fake) as router:
        ids = router.ids(TEXT)

        def script(call: decode_pb2.GenerateRequest) -> Iterator[Step]:
            yield message(call.request, ids[:2], 0)
            wrong = message(call.request, ids[2:4], 2)
            spoil(wrong)
            yield wrong

        fake.script = script
        response = await router.http.post("/generate", json={"text": "hello", "logprobs": 2, "max_tokens": 9})
        assert response.status_code == 500 and len(fake.requests) == 1
        assert "log probabilities" in response.json()["error"]["message"]


async def test_tokens_before_the_whole_prompt_end_the_request() -> None:
    fake = FakeDecode(lambda request: [])
    async with running_router(tiny_model(), fake) as router:
        ids = router.ids(TEXT)

        def script(call: decode_pb2.GenerateRequest) -> Iterator[Step]:
            yield prompt_message(call.request, 1, 2)
            yield message(call.request, ids[:2], 0)

        fake.script = script
        body = {"text": "hello there", "logprobs": 2, "prompt_logprobs": 0, "max_tokens": 9}
        response = await router.http.post("/generate", json=body)
        assert response.status_code == 500
        assert "before prompt positions" in response.json()["error"]["message"]
