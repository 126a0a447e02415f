"""pdmesh.common.v1.PositionLogprobs <-> TokenLogprobs, and the order in which a prompt's positions come.

They are read from workers, not from clients: what is wrong there is InternalError, whose fault `leg` says.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from engine_core.types.errors import InternalError, Leg
from engine_core.types.sampling import TokenLogprobs
from pdmesh.common.v1 import generation_pb2

LOWEST = -9999.0
"""What stands for the logarithm of nothing: JSON has no infinity, and OpenAI's replies say this."""

POSITIONS_PER_MESSAGE = 128
"""Positions that one message carries at most: some 30 KB with 20 best tokens each, and two milliseconds to read."""

_ROUNDING = 1e-3
"""How far above 0 a logarithm may be by rounding."""


def logprobs_to_proto(position: TokenLogprobs) -> generation_pb2.PositionLogprobs:
    """One position, for the wire."""
    return generation_pb2.PositionLogprobs(
        chosen=generation_pb2.TokenLogprob(token_id=position.token_id, logprob=position.logprob, rank=position.rank),
        top=[
            generation_pb2.TokenLogprob(token_id=token, logprob=logprob, rank=rank)
            for rank, (token, logprob) in enumerate(position.top, 1)
        ],
    )


def logprobs_from_proto(message: generation_pb2.PositionLogprobs, most: int, leg: Leg) -> TokenLogprobs:
    """Reads one position with at most `most` best tokens; minus infinity becomes LOWEST.

    Raises InternalError when it is none: more best tokens, no number, a rank below 1.
    """
    if len(message.top) > most:
        raise _broken(f"{len(message.top)} best tokens came where {most} were asked for", leg)
    chosen = message.chosen
    if chosen.token_id < 0 or chosen.rank < 1:
        raise _broken(f"token {chosen.token_id} of rank {chosen.rank}", leg)
    top = tuple((best.token_id, _checked(best.logprob, leg)) for best in message.top)
    if any(token < 0 for token, _ in top):
        raise _broken("a best token has a negative id", leg)
    return TokenLogprobs(chosen.token_id, _checked(chosen.logprob, leg), chosen.rank, top)


def _checked(logprob: float, leg: Leg) -> float:
    if math.isnan(logprob) or logprob > _ROUNDING:
        raise _broken(f"{logprob:g} is not the logarithm of a probability", leg)
    return min(max(logprob, LOWEST), 0.0)


def pieces(
    first: int, positions: Sequence[TokenLogprobs], size: int = POSITIONS_PER_MESSAGE
) -> Iterator[tuple[int, Sequence[TokenLogprobs]]]:
    """Positions in pieces of at most `size`, each with the position that it begins with."""
    for at in range(0, len(positions), size):
        yield first + at, positions[at : at + size]


class PromptPositions:
    """Watches a prompt's positions come: in order from 1 on, each once, all of them before the first token."""

    def __init__(self, prompt_len: int, leg: Leg, *, asked: bool) -> None:
        """`leg` is blamed for what is wrong. Unless `asked`, none may come."""
        self._next, self._end, self._leg = 1, prompt_len if asked else 1, leg

    @property
    def complete(self) -> bool:
        """True when none is missing."""
        return self._next >= self._end

    def take(self, first: int, count: int) -> None:
        """Some have come. Raises InternalError for a gap, an overlap, and more than there are."""
        if first != self._next or count < 1 or first + count > self._end:
            raise _broken(
                f"{count} prompt positions from {first} on came where [{self._next}, {self._end}) were due", self._leg
            )
        self._next += count

    def tokens_begin(self) -> None:
        """A token has come. Raises InternalError when positions are missing."""
        if not self.complete:
            raise _broken(f"a token came before prompt positions [{self._next}, {self._end})", self._leg)


def _broken(problem: str, leg: Leg) -> InternalError:
    return InternalError(f"log probabilities: {problem}", leg=leg, reason="LOGPROBS")
