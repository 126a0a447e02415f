"""pdmesh.common.v1.GenerationRequest <-> GenerateSpec, and what comes back: Finish, StageTimings.

Reading checks every range and raises InvalidRequestError that names the field as the caller knows it,
such as request.prompt_token_ids.
"""

from __future__ import annotations

import math
import time

from engine_core.types.errors import DeadlineError, InvalidRequestError, Leg
from engine_core.types.ids import SessionId
from engine_core.types.request import Finish, FinishReason, GenerateSpec, StageTimings
from pdmesh.common.v1 import generation_pb2, identity_pb2
from pdmesh.decode.v1 import decode_service_pb2
from services.wire.common import MAX_NAME, checked_size, checked_text
from services.wire.sampling import MAX_TOKEN_ID, sampling_from_proto, sampling_to_proto

DEFAULT_TIMEOUT = 600.0
"""Seconds that a call without a deadline gets."""

MAX_TOKENS = 1 << 22
"""Prompt, or emitted, tokens that are read at all; what an engine can hold is for it to say."""
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


def _check_ids(field: str, ids: tuple[int, ...]) -> None:
    if ids and min(ids) < 0:
        raise _invalid(field, f"holds {min(ids)}; token ids must be from 0 to {MAX_TOKEN_ID}")


def _invalid(field: str, problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"request.{field} {problem}", field=f"request.{field}")
