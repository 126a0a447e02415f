"""Log probabilities of one sample, over all its attempts: each prompt position once, one per output token.

What a worker says is checked against what was asked and against the very tokens: a reply whose log probabilities
are another text's is wrong text.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine_core.types.errors import InternalError, Leg
from engine_core.types.sampling import TokenLogprobs
from pdmesh.common.v1 import generation_pb2
from services.wire.logprobs import PromptPositions, logprobs_from_proto


class Scores:
    """What has come so far. `best` and `prompt_best` are the numbers of best tokens asked for per position, None for
    none at all; `vocab_size` bounds how many there are."""

    def __init__(
        self, prompt_token_ids: Sequence[int], best: int | None, prompt_best: int | None, vocab_size: int
    ) -> None:
        self._prompt_ids, self._best, self._prompt_best = prompt_token_ids, best, prompt_best
        self._vocab_size = vocab_size
        self._due = self._positions(asked=False)
        self._shown = False
        self.prompt: list[TokenLogprobs] = []
        """Of the prompt's tokens from the second on."""
        self.output: list[TokenLogprobs] = []
        """Of the tokens that were taken."""

    def begin_attempt(self) -> int | None:
        """What the next attempt is to ask for of the prompt: nothing when all of it is here."""
        left = self._prompt_best is not None and len(self.prompt) < len(self._prompt_ids) - 1
        self._due = self._positions(asked=left)
        return self._prompt_best if left else None

    def _positions(self, *, asked: bool) -> PromptPositions:
        return PromptPositions(len(self._prompt_ids), Leg.DECODE, asked=asked)

    def take_prompt(self, first: int, positions: Sequence[generation_pb2.PositionLogprobs]) -> None:
        """Some of the prompt's have come in this attempt; those that are here already count no second time.

        Raises InternalError when they are not those that are due.
        """
        self._due.take(first, len(positions))
        for at, message in enumerate(positions, first):
            if at == 1 + len(self.prompt):
                self.prompt.append(self._read(message, self._prompt_ids[at], self._prompt_best or 0))

    def read(
        self, token_ids: Sequence[int], positions: Sequence[generation_pb2.PositionLogprobs]
    ) -> list[TokenLogprobs]:
        """Those of new tokens. Raises InternalError unless there is one per token where they are asked for, and none
        where not, and the whole prompt's are here."""
        self._due.tokens_begin()
        asked = len(token_ids) if self._best is not None else 0
        if len(positions) != asked:
            raise _broken(f"{len(positions)} of {len(token_ids)} tokens came, {asked} were due")
        return [self._read(m, t, self._best or 0) for m, t in zip(positions, token_ids[:asked], strict=True)]

    def keep(self, positions: Sequence[TokenLogprobs]) -> None:
        """Their tokens were taken."""
        self.output.extend(positions)

    def show_prompt(self) -> list[TokenLogprobs]:
        """The prompt's when the first token is here, for the client: the first call has them, later ones nothing."""
        shown, self._shown = self._shown, True
        return [] if shown else self.prompt

    def _read(self, message: generation_pb2.PositionLogprobs, token_id: int, best: int) -> TokenLogprobs:
        position = logprobs_from_proto(message, best, Leg.DECODE)
        if position.token_id != token_id:
            raise _broken(f"those of token {position.token_id} came where token {token_id} stands")
        if len(position.top) < min(best, self._vocab_size):
            raise _broken(f"{len(position.top)} best tokens came where {best} were asked for")
        return position


def _broken(problem: str) -> InternalError:
    return InternalError(f"log probabilities: {problem}", leg=Leg.DECODE, reason="LOGPROBS")
