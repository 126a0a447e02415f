"""What the engine says of a session as messages of its Generate stream, cut to a bounded size. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from engine_core.host import frames
from pdmesh.decode.v1 import decode_service_pb2
from services.wire.generation import finish_to_proto
from services.wire.logprobs import POSITIONS_PER_MESSAGE, logprobs_to_proto, pieces

Response = decode_service_pb2.GenerateResponse


def output_messages(output: frames.SessionOutput) -> Iterator[Response]:
    """The output's tokens, what was cached with the first of them, and how it ended with the last. An error is none
    of them; without tokens and finish there is none."""
    finished = finish_to_proto(output.finish) if output.finish is not None else None
    count = len(output.token_ids)
    size = POSITIONS_PER_MESSAGE if output.logprobs else max(count, 1)
    for at in range(0, max(count, 1) if finished is not None else count, size):
        yield Response(
            first_index=output.first_index + at,
            token_ids=output.token_ids[at : at + size],
            logprobs=[logprobs_to_proto(one) for one in output.logprobs[at : at + size]],
            cached_tokens=output.cached_tokens if at == 0 else None,
            finished=finished if at + size >= count else None,
        )


def prompt_messages(scores: frames.PromptLogprobs) -> Iterator[Response]:
    """Log probabilities of prompt positions."""
    for first, positions in pieces(scores.first_position, scores.positions):
        yield Response(
            prompt_first_position=first, prompt_logprobs=[logprobs_to_proto(position) for position in positions]
        )
