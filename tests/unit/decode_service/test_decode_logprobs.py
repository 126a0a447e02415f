"""Log probabilities through DecodeService and PrefillService: whole, in order, in messages of bounded size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine_core.host import frames
from engine_core.types.errors import InternalError, Leg
from engine_core.types.ids import SessionId
from engine_core.types.request import Finish, FinishReason, Role
from engine_core.types.sampling import TokenLogprobs
from services.decode.replies import output_messages, prompt_messages
from services.runtime.channels import ChannelPool
from services.runtime.errors import from_rpc_error
from services.wire.logprobs import POSITIONS_PER_MESSAGE, logprobs_from_proto
from tests.support import fake_engine
from tests.support.worker_pair import PROMPT, Pair, pair, stub_of, worker

SESSION = SessionId(1)


async def everything(call: Any, best: int = 20) -> tuple[list[int], list[TokenLogprobs], list[TokenLogprobs]]:
    """Tokens, their log probabilities, the prompt's; asserts their order."""
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] = []
    prompt: list[TokenLogprobs] = []
    async for message in call:
        if message.prompt_logprobs:
            assert not tokens and message.prompt_first_position == 1 + len(prompt)
            prompt += [logprobs_from_proto(one, best, Leg.DECODE) for one in message.prompt_logprobs]
        tokens += message.token_ids
        logprobs += [logprobs_from_proto(one, best, Leg.DECODE) for one in message.logprobs]
        assert len(logprobs) in (0, len(tokens))
    return tokens, logprobs, prompt


def outputs(count: int, best: int, start: int = 0) -> list[TokenLogprobs]:
    return [fake_engine.scored(fake_engine.echo(PROMPT, i), i, best) for i in range(start, count)]


def positions(prompt: tuple[int, ...], best: int) -> list[TokenLogprobs]:
    return [fake_engine.scored(prompt[i], i, best) for i in range(1, len(prompt))]


@pytest.mark.parametrize("max_tokens", [1, 6])
async def test_they_come_through_both_legs(tmp_path: Path, max_tokens: int) -> None:
    async with pair(tmp_path) as mesh:
        request = mesh.request(1, max_tokens=max_tokens, sampling={"logprobs": 2, "prompt_logprobs": 3})
        tokens, logprobs, prompt = await everything(mesh.stub().Generate(request, timeout=20))
        assert len(tokens) == max_tokens
        assert logprobs == outputs(max_tokens, 2)
        assert prompt == positions(PROMPT, 3)
        request = mesh.request(2, max_tokens=max_tokens, emitted=tokens[: max_tokens - 1], sampling={"logprobs": 0})
        tokens, logprobs, prompt = await everything(mesh.stub().Generate(request, timeout=20))
        assert (logprobs, prompt) == (outputs(max_tokens, 0, max_tokens - 1), [])
        tokens, logprobs, prompt = await everything(mesh.stub().Generate(mesh.request(3), timeout=20))
        assert (len(tokens), logprobs, prompt) == (6, [], [])


async def test_a_mixed_instance_gives_its_own(tmp_path: Path) -> None:
    channels = ChannelPool(connect_timeout=2.0)
    async with worker(Role.MIXED, tmp_path, channels) as mixed:
        prompt = tuple(range(10, 10 + 300))
        made = Pair(mixed, mixed, channels)
        sampling = {"logprobs": 1, "prompt_logprobs": 1}
        request = made.request(1, "burst:d.decoding", 400, prompt=prompt, prefill=None, sampling=sampling)
        from pdmesh.decode.v1 import decode_service_pb2_grpc

        call = stub_of(decode_service_pb2_grpc.DecodeServiceStub, channels, mixed).Generate(request, timeout=20)
        tokens, logprobs, scores = await everything(call)
        assert tokens == [fake_engine.echo(prompt, i) for i in range(400)]
        assert logprobs == [fake_engine.scored(t, i, 1) for i, t in enumerate(tokens)]
        assert scores == positions(prompt, 1)
    await channels.close()


@pytest.mark.parametrize(
    ("what", "leg"), [("omit:first", Leg.PREFILL), ("omit:position", Leg.PREFILL), ("omit:output", Leg.DECODE)]
)
async def test_what_is_left_out_is_an_error_of_who_left_it_out(tmp_path: Path, what: str, leg: Leg) -> None:
    async with pair(tmp_path) as mesh:
        request = mesh.request(1, what, sampling={"logprobs": 2, "prompt_logprobs": 3})
        error = from_rpc_error(await mesh.failure(request), Leg.UNKNOWN)
        assert isinstance(error, InternalError)
        assert (error.leg, error.reason, error.retryable) == (leg, "LOGPROBS", False)


# ---- messages --------------------------------------------------------------------------------------


def test_a_message_holds_so_many_positions() -> None:
    most = POSITIONS_PER_MESSAGE
    many = tuple(TokenLogprobs(i, -1.0, 1, tuple((t, -2.0) for t in range(20))) for i in range(1, 2 * most + 2))
    messages = list(prompt_messages(frames.PromptLogprobs(SESSION, 5, many)))
    assert [(m.prompt_first_position, len(m.prompt_logprobs)) for m in messages] == [
        (5, most), (5 + most, most), (5 + 2 * most, 1),
    ]  # fmt: skip
    assert max(m.ByteSize() for m in messages) < 1 << 17
    finish = Finish(FinishReason.LENGTH)
    output = frames.SessionOutput(SESSION, 7, tuple(o.token_id for o in many), finish, cached_tokens=3, logprobs=many)
    messages = list(output_messages(output))
    assert [(m.first_index, len(m.token_ids), len(m.logprobs)) for m in messages] == [
        (7, most, most), (7 + most, most, most), (7 + 2 * most, 1, 1),
    ]  # fmt: skip
    assert [m.HasField("finished") for m in messages] == [False, False, True]
    assert [m.HasField("cached_tokens") for m in messages] == [True, False, False]


def test_tokens_alone_are_one_message_and_an_end_alone_is_one() -> None:
    (message,) = output_messages(frames.SessionOutput(SESSION, 0, tuple(range(5000))))
    assert len(message.token_ids) == 5000 and not message.HasField("finished")
    (message,) = output_messages(frames.SessionOutput(SESSION, 9, (), Finish(FinishReason.PREEMPTED)))
    assert message.HasField("finished") and message.first_index == 9
    assert list(output_messages(frames.SessionOutput(SESSION, 9, ()))) == []
