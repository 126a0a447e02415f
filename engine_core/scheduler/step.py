"""The border between deciding and doing: a StepPlan goes to the executor, a StepResult comes back."""

from __future__ import annotations

import msgspec

from engine_core.types.ids import SessionId
from engine_core.types.sampling import SamplingParams, TokenLogprobs


class ScheduledSequence(msgspec.Struct, frozen=True):
    """One sequence's part of a step.

    `token_ids` are the known tokens at positions [start, start + len(token_ids)) whose KV this step
    computes and writes; KV of [0, start) is already in the blocks. `block_ids` is the whole block
    table (token t lies in block_ids[t // block_size] at slot t % block_size), per cache group.
    With `sample`, the token after the last one is drawn; its position is start + len(token_ids).
    """

    session: SessionId
    token_ids: tuple[int, ...] | list[int]
    start: int
    block_ids: tuple[list[int], ...]
    sample: bool
    sampling: SamplingParams
    banned_token_ids: tuple[int, ...] = ()
    """Tokens that must not be drawn now (stop tokens below min_tokens)."""
    known: tuple[int, ...] | list[int] = ()
    """All known tokens of the session, those behind the chunk included; the scheduler's own list, to be read
    during the step alone. Penalties and grammars follow it."""
    prompt_len: int = 0
    """How many of `known` are the prompt's."""
    scored: tuple[int, int] = (0, 0)
    """Prompt positions [from, to) whose log probabilities this step reports; position p's logits come out of row
    p - 1, which is one of the chunk's."""


class StepPlan(msgspec.Struct, frozen=True):
    """What one step computes. Decodes (one token) come first, then prefill chunks."""

    step: int
    sequences: tuple[ScheduledSequence, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens computed by the step."""
        return sum(len(s.token_ids) for s in self.sequences)


class SequenceFailure(msgspec.Struct, frozen=True):
    """One sequence of the plan (by index) that could not be computed, while the others could. `lost` says that
    another worker may do better; without, the request itself is at fault."""

    index: int
    message: str
    lost: bool = False


class Computed(msgspec.Struct, frozen=True):
    """What came out for one sequence of the plan: the token (-1 unless one was drawn), its log probabilities and
    those of the `scored` positions, where asked for."""

    token: int
    logprobs: TokenLogprobs | None = None
    scores: tuple[TokenLogprobs, ...] = ()

    def lacks(self, part: ScheduledSequence) -> str:
        """Which log probabilities of the part are missing, or do not belong to its tokens; empty when all are well."""
        if (
            part.sample
            and part.sampling.logprobs is not None
            and (self.logprobs is None or self.logprobs.token_id != self.token)
        ):
            return f"token {self.token} came without its log probabilities"
        first, end = part.scored
        if [score.token_id for score in self.scores] != list(part.known[first:end]):
            return f"log probabilities of prompt positions [{first}, {end}) are missing"
        return ""


class StepResult(msgspec.Struct, frozen=True):
    """What came out: a token id per sequence with `sample`, in the plan's order (-1 elsewhere, and where it
    failed)."""

    step: int
    sampled: tuple[int, ...]
    seconds: float = 0.0
    forward_seconds: float = 0.0
    failures: tuple[SequenceFailure, ...] = ()
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    """Of each sampled token, in the plan's order, where asked for; empty when nobody asked."""
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()
    """Of each sequence's `scored` positions, in the plan's order; empty when nobody asked."""

    def of(self, index: int) -> Computed:
        """What came out for sequence `index` of the plan."""
        return Computed(
            self.sampled[index],
            self.logprobs[index] if self.logprobs else None,
            self.prompt_logprobs[index] if self.prompt_logprobs else (),
        )
