"""GenerationRequest <-> GenerateSpec."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_core.types.errors import DeadlineError, InvalidRequestError
from engine_core.types.ids import SessionId
from engine_core.types.request import Finish, FinishReason, GenerateSpec, StageTimings
from engine_core.types.sampling import Grammar, GrammarKind, SamplingParams
from pdmesh.common.v1 import generation_pb2, identity_pb2
from pdmesh.decode.v1 import decode_service_pb2
from services.wire.generation import (
    DEFAULT_TIMEOUT,
    MAX_TOKENS,
    finish_from_proto,
    finish_to_proto,
    monotonic_deadline,
    seconds_left,
    spec_from_proto,
    spec_to_proto,
    timings_from_proto,
)
from services.wire.sampling import MAX_GRAMMAR_BYTES, sampling_from_proto

token_ids = st.lists(st.integers(0, 2**31 - 1), max_size=20).map(tuple)
single = st.floats(0, 1, width=32)
adjustments = st.floats(-1e4, 1e4, width=32)
tops = st.none() | st.integers(0, 20)


@st.composite
def specs(draw: st.DrawFn) -> GenerateSpec:
    emitted = draw(token_ids)
    most = draw(st.integers(len(emitted) + 1, 2**31 - 1))
    return GenerateSpec(
        session=SessionId(draw(st.integers(1, 2**63 - 1)), draw(st.integers(0, 2**31 - 1))),
        request_id=draw(st.text(max_size=20)),
        prompt_token_ids=(draw(st.integers(0, 2**31 - 1)), *draw(token_ids)),
        emitted_token_ids=emitted,
        sampling=SamplingParams(
            max_tokens=most,
            temperature=draw(st.floats(0, 100, width=32)),
            top_p=draw(st.floats(0.0625, 1, width=32)),
            top_k=draw(st.integers(0, 2**31 - 1)),
            min_p=draw(single),
            seed=draw(st.integers(0, 2**64 - 1)),
            min_tokens=draw(st.integers(0, most)),
            stop_token_ids=draw(token_ids),
            ignore_eos=draw(st.booleans()),
            frequency_penalty=draw(adjustments),
            presence_penalty=draw(adjustments),
            repetition_penalty=draw(st.floats(2**-9, 1000, width=32)),
            logit_bias=tuple(sorted(draw(st.dictionaries(st.integers(0, 2**31 - 1), adjustments, max_size=5)).items())),
            logprobs=draw(tops),
            prompt_logprobs=draw(tops),
            grammar=draw(
                st.none() | st.builds(Grammar, st.sampled_from(list(GrammarKind)), st.text(min_size=1, max_size=20))
            ),
        ),
        arrival_ms=draw(st.integers(1, 2**63 - 1)),
        deadline=5.0,
        cache_salt=draw(st.text(max_size=5)),
    )


@given(specs())
def test_round_trip(spec: GenerateSpec) -> None:
    message = generation_pb2.GenerationRequest.FromString(spec_to_proto(spec, "fp").SerializeToString())
    assert message.fingerprint == "fp"
    assert spec_from_proto(message, 5.0) == spec


def request(**more: object) -> generation_pb2.GenerationRequest:
    fields: dict[str, object] = {
        "session": identity_pb2.SessionId(room=1),
        "prompt_token_ids": [1],
        "sampling": generation_pb2.SamplingParams(max_tokens=4),
        "arrival_unix_ms": 1,
    }
    return generation_pb2.GenerationRequest(**(fields | more))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"session": identity_pb2.SessionId(room=0)}, "request.session.room"),
        ({"session": identity_pb2.SessionId(room=-5)}, "request.session.room"),
        ({"session": identity_pb2.SessionId(room=1, attempt=-1)}, "request.session.attempt"),
        ({"prompt_token_ids": []}, "request.prompt_token_ids"),
        ({"prompt_token_ids": [1, -1]}, "request.prompt_token_ids"),
        ({"emitted_token_ids": [1, 2, 3, 4]}, "request.emitted_token_ids"),
        ({"emitted_token_ids": [-2]}, "request.emitted_token_ids"),
        ({"arrival_unix_ms": -1}, "request.arrival_unix_ms"),
        ({"request_id": "x" * 513}, "request.request_id"),
        ({"cache_salt": "x" * 257}, "request.cache_salt"),
        ({"fingerprint": "x" * 257}, "request.fingerprint"),
        ({"prompt_token_ids": bytes(MAX_TOKENS + 1)}, "request.prompt_token_ids"),
        ({"emitted_token_ids": bytes(MAX_TOKENS + 1)}, "request.emitted_token_ids"),
    ],
)
def test_bad_requests_name_the_field(change: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        spec_from_proto(request(**change), 1.0)
    assert caught.value.field == field
    assert field in caught.value.message


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"temperature": -0.5}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"min_p": float("nan")}, "min_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -7}, "max_tokens"),
        ({"min_tokens": 5}, "min_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"stop_token_ids": [-3]}, "stop_token_ids"),
        ({"stop_token_ids": bytes(4097)}, "stop_token_ids"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty"),
        ({"frequency_penalty": 1e300}, "frequency_penalty"),
        ({"presence_penalty": float("-inf")}, "presence_penalty"),
        ({"presence_penalty": 20_000.0}, "presence_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-30}, "repetition_penalty"),
        ({"repetition_penalty": 2000.0}, "repetition_penalty"),
        ({"repetition_penalty": -1.0}, "repetition_penalty"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"logit_bias": {3: float("nan")}}, "logit_bias"),
        ({"logit_bias": {3: float("-inf")}}, "logit_bias"),
        ({"logit_bias": {3: 1e38}}, "logit_bias"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"grammar": generation_pb2.Grammar(text="a")}, "grammar.kind"),
        ({"grammar": {"kind": 77, "text": "a"}}, "grammar.kind"),
        ({"grammar": {"kind": 1}}, "grammar.text"),
        ({"grammar": {"kind": 2, "text": "x" * (MAX_GRAMMAR_BYTES + 1)}}, "grammar.text"),
        ({"grammar": {"kind": 3, "text": "é" * (MAX_GRAMMAR_BYTES // 2 + 1)}}, "grammar.text"),
    ],
)
def test_bad_sampling_names_the_field(change: dict[str, object], name: str) -> None:
    message = generation_pb2.SamplingParams(**({"max_tokens": 4} | change))
    with pytest.raises(InvalidRequestError) as caught:
        sampling_from_proto(message)
    assert caught.value.field == f"request.sampling.{name}"


def test_unset_fields_take_neutral_values() -> None:
    message = generation_pb2.SamplingParams(max_tokens=4, repetition_penalty=1.0)
    assert sampling_from_proto(message) == SamplingParams(max_tokens=4)
    assert sampling_from_proto(generation_pb2.SamplingParams(max_tokens=4)) == SamplingParams(max_tokens=4)


def test_bounds_are_met_exactly() -> None:
    spec = spec_from_proto(request(request_id="x" * 512, cache_salt="y" * 256), 1.0)
    assert (len(spec.request_id), len(spec.cache_salt)) == (512, 256)
    grammar = generation_pb2.Grammar(kind=generation_pb2.GRAMMAR_KIND_LARK, text="x" * MAX_GRAMMAR_BYTES)
    message = generation_pb2.SamplingParams(
        max_tokens=4,
        stop_token_ids=bytes(4096),
        logit_bias=dict.fromkeys(range(1024), -100.0),
        logprobs=0,
        prompt_logprobs=20,
        grammar=grammar,
    )
    read = sampling_from_proto(message)
    assert len(read.stop_token_ids) == 4096
    assert read.logit_bias == tuple((token, -100.0) for token in range(1024))
    assert (read.logprobs, read.prompt_logprobs) == (0, 20)
    assert read.grammar is not None and read.grammar.kind is GrammarKind.LARK


def test_timings_that_are_no_durations_count_as_none() -> None:
    message = generation_pb2.StageTimings(queued=float("nan"), computing=float("inf"), transferring=-1.0, decoding=2.0)
    assert timings_from_proto(message) == StageTimings(0.0, 0.0, 0.0, 2.0)


def test_finish_round_trip() -> None:
    for stop_token in (None, 0, 7):
        finish = Finish(
            reason=FinishReason.STOP,
            stop_token_id=stop_token,
            cached_tokens=16,
            path="pd",
            transport="shm",
            timings=StageTimings(1.0, 2.0, 3.0, 4.0),
            prefill_timings=StageTimings(5.0, 6.0, 7.0, 8.0),
        )
        assert finish_from_proto(finish_to_proto(finish)) == finish
    for reason in FinishReason:
        assert finish_from_proto(finish_to_proto(Finish(reason=reason))).reason is reason
    with pytest.raises(InvalidRequestError):
        finish_from_proto(decode_service_pb2.Finished())


def test_deadlines() -> None:
    assert monotonic_deadline(2.5, now=10.0) == 12.5
    assert monotonic_deadline(None, now=10.0) == 10.0 + DEFAULT_TIMEOUT
    assert seconds_left(12.5, now=10.0) == 2.5
    with pytest.raises(DeadlineError):
        seconds_left(12.5, now=12.5)
