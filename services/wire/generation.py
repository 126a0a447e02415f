"""pdmesh.common.v1.GenerationRequest <-> GenerateSpec, and what comes back: Finish, StageTimings.

Reading checks every range and raises InvalidRequestError that names the field as the caller knows it,
such as request.sampling.top_p. What the engine can't do yet is refused, never ignored.
"""

from __future__ import annotations

import math
import time

from engine_core.types.errors import DeadlineError, InvalidRequestError, Leg
from engine_core.types.ids import SessionId
from engine_core.types.request import Finish, FinishReason, GenerateSpec, StageTimings
from engine_core.types.sampling import SamplingParams
from pdmesh.common.v1 import generation_pb2, identity_pb2
from pdmesh.decode.v1 import decode_service_pb2
from services.wire.common import MAX_NAME, checked_size, checked_text

DEFAULT_TIMEOUT = 600.0
"""Seconds that a call without a deadline gets."""

_MAX_TOKEN_ID = 2**31 - 1
MAX_TOKENS = 1 << 22
"""Prompt, or emitted, tokens that are read at all; what an engine can hold is for it to say."""
MAX_STOP_IDS = 4_096
MAX_REQUEST_ID = 512
MAX_SALT = 256

_REASON_TO_PROTO: dict[FinishReason, generation_pb2.FinishReason] = {
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: generation_pb2.FINISH_REASON_CANCELLED,
    FinishReason.PREEMPTED: generation_pb2.FINISH_REASON_PREEMPTED,
}
_REASON_FROM_PROTO = {number: reason for reason, number in _REASON_TO_PROTO.items()}


def monotonic_deadline(time_remaining: float | None, now: float | None = None) -> float:
    """A gRPC context's time_remaining() as a point on CLOCK_MONOTONIC; None gets DEFAULT_TIMEOUT."""
    start = time.monotonic() if now is None else now
    return start + (DEFAULT_TIMEOUT if time_remaining is None else min(time_remaining, DEFAULT_TIMEOUT * 100))


def seconds_left(deadline: float, leg: Leg = Leg.UNKNOWN, now: float | None = None) -> float:
    """Seconds until a deadline on CLOCK_MONOTONIC. Raises DeadlineError when none are left."""
    left = deadline - (time.monotonic() if now is None else now)
    if left <= 0:
        raise DeadlineError("the deadline passed", leg=leg)
    return left


def spec_from_proto(request: generation_pb2.GenerationRequest, deadline: float) -> GenerateSpec:
    """Reads and checks one attempt. `deadline` is on CLOCK_MONOTONIC.

    Raises InvalidRequestError naming the field.
    """
    session = SessionId(request.session.room, request.session.attempt)
    if session.room <= 0:
        raise _invalid("session.room", f"is {session.room}; it must be a positive 63-bit number")
    if session.attempt < 0:
        raise _invalid("session.attempt", f"is {session.attempt}; it must not be negative")
    for name, text, limit in (
        ("request_id", request.request_id, MAX_REQUEST_ID),
        ("cache_salt", request.cache_salt, MAX_SALT),
        ("fingerprint", request.fingerprint, MAX_NAME),
    ):
        checked_text(text, f"request.{name}", limit)
    checked_size(request.prompt_token_ids, "request.prompt_token_ids", MAX_TOKENS)
    checked_size(request.emitted_token_ids, "request.emitted_token_ids", MAX_TOKENS)
    prompt, emitted = tuple(request.prompt_token_ids), tuple(request.emitted_token_ids)
    if not prompt:
        raise _invalid("prompt_token_ids", "is empty; at least one token is needed")
    _check_ids("prompt_token_ids", prompt)
    _check_ids("emitted_token_ids", emitted)
    sampling = sampling_from_proto(request.sampling)
    if len(emitted) >= sampling.max_tokens:
        raise _invalid(
            "emitted_token_ids", f"holds {len(emitted)} tokens; max_tokens {sampling.max_tokens} leaves none to draw"
        )
    if request.arrival_unix_ms < 0:
        raise _invalid("arrival_unix_ms", f"is {request.arrival_unix_ms}; it must not be negative")
    return GenerateSpec(
        session=session,
        request_id=request.request_id,
        prompt_token_ids=prompt,
        emitted_token_ids=emitted,
        sampling=sampling,
        arrival_ms=request.arrival_unix_ms or time.time_ns() // 1_000_000,
        deadline=deadline,
        cache_salt=request.cache_salt,
    )


def spec_to_proto(spec: GenerateSpec, fingerprint: str = "") -> generation_pb2.GenerationRequest:
    """The attempt for the wire. The deadline travels as the call's own."""
    return generation_pb2.GenerationRequest(
        session=identity_pb2.SessionId(room=spec.session.room, attempt=spec.session.attempt),
        request_id=spec.request_id,
        prompt_token_ids=spec.prompt_token_ids,
        emitted_token_ids=spec.emitted_token_ids,
        sampling=sampling_to_proto(spec.sampling),
        arrival_unix_ms=spec.arrival_ms,
        fingerprint=fingerprint,
        cache_salt=spec.cache_salt,
    )


def sampling_from_proto(message: generation_pb2.SamplingParams) -> SamplingParams:
    """Reads and checks how to draw. Raises InvalidRequestError naming the field."""
    top_p = message.top_p if message.HasField("top_p") else 1.0
    if not (math.isfinite(message.temperature) and message.temperature >= 0):
        raise _invalid("sampling.temperature", f"is {message.temperature:g}; it must be a number from 0 on")
    if not 0 < top_p <= 1:
        raise _invalid("sampling.top_p", f"is {top_p:g}; it must be above 0 and at most 1")
    if message.top_k < 0:
        raise _invalid("sampling.top_k", f"is {message.top_k}; it must not be negative (0 keeps all tokens)")
    if not 0 <= message.min_p <= 1:
        raise _invalid("sampling.min_p", f"is {message.min_p:g}; it must be from 0 to 1")
    if message.max_tokens < 1:
        raise _invalid("sampling.max_tokens", f"is {message.max_tokens}; it must be at least 1")
    if not 0 <= message.min_tokens <= message.max_tokens:
        raise _invalid(
            "sampling.min_tokens", f"is {message.min_tokens}; it must be from 0 to max_tokens ({message.max_tokens})"
        )
    checked_size(message.stop_token_ids, "request.sampling.stop_token_ids", MAX_STOP_IDS)
    stop_ids = tuple(message.stop_token_ids)
    _check_ids("sampling.stop_token_ids", stop_ids)
    _refuse_unsupported(message)
    return SamplingParams(
        max_tokens=message.max_tokens,
        temperature=message.temperature,
        top_p=top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        seed=message.seed,
        min_tokens=message.min_tokens,
        stop_token_ids=stop_ids,
        ignore_eos=message.ignore_eos,
    )


def sampling_to_proto(sampling: SamplingParams) -> generation_pb2.SamplingParams:
    """How to draw, for the wire."""
    return generation_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
    )


def timings_to_proto(timings: StageTimings) -> generation_pb2.StageTimings:
    """Seconds per stage, for the wire."""
    return generation_pb2.StageTimings(
        queued=timings.queued,
        computing=timings.computing,
        transferring=timings.transferring,
        decoding=timings.decoding,
        starting=timings.starting,
        first_token=timings.first_token,
    )


def timings_from_proto(message: generation_pb2.StageTimings) -> StageTimings:
    """Seconds per stage; what can be no duration counts as none."""
    stages = (
        message.queued,
        message.computing,
        message.transferring,
        message.decoding,
        message.starting,
        message.first_token,
    )
    return StageTimings(*(seconds if math.isfinite(seconds) and seconds >= 0 else 0.0 for seconds in stages))


def finish_to_proto(finish: Finish) -> decode_service_pb2.Finished:
    """The end of an output, for the wire."""
    return decode_service_pb2.Finished(
        reason=_REASON_TO_PROTO[finish.reason],
        stop_token_id=finish.stop_token_id,
        cached_tokens=finish.cached_tokens,
        decode_timings=timings_to_proto(finish.timings),
        prefill_timings=timings_to_proto(finish.prefill_timings),
        path=finish.path,
        transport=finish.transport,
    )


def finish_from_proto(message: decode_service_pb2.Finished) -> Finish:
    """The end of an output. Raises InvalidRequestError on a reason that is not set or not known."""
    reason = _REASON_FROM_PROTO.get(message.reason)
    if reason is None:
        raise InvalidRequestError(f"finished.reason {message.reason} is not known", field="finished.reason")
    return Finish(
        reason=reason,
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
        cached_tokens=message.cached_tokens,
        path=message.path,
        transport=message.transport,
        timings=timings_from_proto(message.decode_timings),
        prefill_timings=timings_from_proto(message.prefill_timings),
    )


def _refuse_unsupported(message: generation_pb2.SamplingParams) -> None:
    asked = {
        "frequency_penalty": message.frequency_penalty != 0,
        "presence_penalty": message.presence_penalty != 0,
        "repetition_penalty": message.HasField("repetition_penalty") and message.repetition_penalty != 1,
        "logit_bias": bool(message.logit_bias),
        "logprobs": message.HasField("logprobs"),
    }
    for name, wanted in asked.items():
        if wanted:
            raise _invalid(f"sampling.{name}", "is not supported by this engine")


def _check_ids(field: str, ids: tuple[int, ...]) -> None:
    if ids and min(ids) < 0:
        raise _invalid(field, f"holds {min(ids)}; token ids must be from 0 to {_MAX_TOKEN_ID}")


def _invalid(field: str, problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"request.{field} {problem}", field=f"request.{field}")
