"""From a StepPlan to one packed ForwardBatch: numpy in, tensors out, buffers kept between steps."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from engine_core.execution.forward_metadata import ForwardMetaData, GroupMetaData
from engine_core.scheduler.step import ScheduledSequence, StepPlan
from engine_core.types.errors import InternalError
from engine_core.types.ids import SessionId
from engine_core.types.kv import KvLayout
from engine_core.types.sampling import SamplingParams

_NOBODY = SessionId(0)


class DrawRow(msgspec.Struct, frozen=True):
    """What drawing one token needs beside its logits; `position` is the drawn token's.

    `known` are the session's tokens, of which the first `prompt_len` are the prompt's and the first `position` are
    those before the drawn one. Penalties alone read it.
    """

    params: SamplingParams
    position: int
    banned: tuple[int, ...] = ()
    session: SessionId = _NOBODY
    known: tuple[int, ...] | list[int] = ()
    prompt_len: int = 0


@dataclass(frozen=True, slots=True)
class ScoreRows:
    """Prompt positions of one sequence of the plan whose log probabilities are wanted.

    `tokens` stand at positions `position` and on; their logits come out of the wanted rows `first` and on. `top` is
    the number of best tokens to report.
    """

    sequence: int
    position: int
    tokens: list[int]
    first: int
    top: int


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step, packed. Valid until the builder packs the next one: the buffers are the builder's.

    input_ids, position_ids [T] int64. `draws` has one row per sampled sequence, in plan order, and
    `sampled_sequences` says which sequence of the plan each belongs to. Their rows are the first that the
    metadata wants; those of `scores` follow.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    metadata: ForwardMetaData
    draws: tuple[DrawRow, ...]
    sampled_sequences: tuple[int, ...]
    scores: tuple[ScoreRows, ...] = ()


class _Buffer:
    """A flat array that grows by doubling, with a tensor over the same memory."""

    def __init__(self, dtype: npt.DTypeLike) -> None:
        self._array: npt.NDArray[np.signedinteger] = np.zeros(256, dtype)
        self._tensor = torch.from_numpy(self._array)

    def take(self, *shape: int) -> tuple[npt.NDArray[np.signedinteger], torch.Tensor]:
        size = int(np.prod(shape))
        if size > self._array.size:
            self._array = np.zeros(max(size, 2 * self._array.size), self._array.dtype)
            self._tensor = torch.from_numpy(self._array)
        return self._array[:size].reshape(shape), self._tensor[:size].view(shape)


class BatchBuilder:
    """Packs plans for one KV layout."""

    def __init__(self, layout: KvLayout, vocab_size: int) -> None:
        self._layout = layout
        self._vocab_size = vocab_size
        self._ids, self._positions, self._rows = _Buffer(np.int64), _Buffer(np.int64), _Buffer(np.int64)
        self._starts, self._lens = _Buffer(np.int32), _Buffer(np.int32)
        self._tables = [_Buffer(np.int32) for _ in layout.groups]
        self._slots = [_Buffer(np.int64) for _ in layout.groups]

    def build(self, plan: StepPlan) -> ForwardBatch:
        """Packs a plan. Raises InternalError when a sequence has no tokens, a token is outside the vocabulary,
        a block table is too short or names a block that is not there, or scored positions are not the chunk's."""
        sequences = plan.sequences
        counts = np.fromiter((len(s.token_ids) for s in sequences), np.int64, len(sequences))
        firsts = np.fromiter((s.start for s in sequences), np.int64, len(sequences))
        if not len(sequences) or counts.min() < 1:
            raise InternalError(f"step {plan.step} has a sequence without tokens")
        total = int(counts.sum())

        starts, starts_t = self._starts.take(len(sequences) + 1)
        starts[0] = 0
        np.cumsum(counts, out=starts[1:])
        lens, lens_t = self._lens.take(len(sequences))
        np.add(firsts, counts, out=lens, casting="unsafe")

        ids, ids_t = self._ids.take(total)
        cursor = 0
        for sequence in sequences:
            n = len(sequence.token_ids)
            if n == 1:
                ids[cursor] = sequence.token_ids[0]
            else:
                ids[cursor : cursor + n] = sequence.token_ids
            cursor += n
        if int(ids.min()) < 0 or int(ids.max()) >= self._vocab_size:
            raise InternalError(f"step {plan.step} has a token outside the vocabulary of {self._vocab_size}")

        positions, positions_t = self._positions.take(total)
        owner = np.repeat(np.arange(len(sequences)), counts)
        np.subtract(np.arange(total), (starts[:-1] - firsts)[owner], out=positions)

        sampled = tuple(i for i, s in enumerate(sequences) if s.sample)
        scores = self._scores(sequences, len(sampled))
        rows, rows_t = self._rows.take(len(sampled) + sum(len(s.tokens) for s in scores))
        rows[: len(sampled)] = starts[1:][list(sampled)] - 1
        for score in scores:
            before = int(starts[score.sequence]) + score.position - 1 - sequences[score.sequence].start
            rows[score.first : score.first + len(score.tokens)] = np.arange(before, before + len(score.tokens))

        groups = tuple(self._group(plan, g, owner, positions, lens) for g in range(len(self._layout.groups)))
        ones = counts == 1
        metadata = ForwardMetaData(
            num_decodes=len(sequences) if ones.all() else int(np.argmin(ones)),
            query_starts=starts_t,
            seq_lens=lens_t,
            max_query_len=int(counts.max()),
            max_seq_len=int(lens.max()),
            sample_rows=rows_t,
            groups=groups,
            wants_all=len(sampled) == total and not scores,
        )
        draws = tuple(
            DrawRow(s.sampling, s.start + len(s.token_ids), s.banned_token_ids, s.session, s.known, s.prompt_len)
            for s in sequences
            if s.sample
        )
        return ForwardBatch(ids_t, positions_t, metadata, draws, sampled, scores)

    def _scores(self, sequences: tuple[ScheduledSequence, ...], first: int) -> tuple[ScoreRows, ...]:
        scores: list[ScoreRows] = []
        for i, s in enumerate(sequences):
            begin, end = s.scored
            if begin >= end:
                continue
            if begin <= s.start or end > min(s.start + len(s.token_ids) + 1, s.prompt_len, len(s.known)):
                raise InternalError(f"session {s.session} scores [{begin}, {end}), which its chunk does not reach")
            tokens = list(s.known[begin:end])
            if min(tokens) < 0 or max(tokens) >= self._vocab_size:
                raise InternalError(f"session {s.session} scores a token outside the vocabulary of {self._vocab_size}")
            scores.append(ScoreRows(i, begin, tokens, first, s.sampling.prompt_logprobs or 0))
            first += len(tokens)
        return tuple(scores)

    def _group(
        self,
        plan: StepPlan,
        index: int,
        owner: npt.NDArray[np.int64],
        positions: npt.NDArray[np.signedinteger],
        lens: npt.NDArray[np.signedinteger],
    ) -> GroupMetaData:
        layout = self._layout.groups[index]
        size = layout.block_size
        needed = -(-lens // size)
        width = int(needed.max())
        table, table_t = self._tables[index].take(len(plan.sequences), width)
        table[:] = 0
        for row, sequence, n in zip(table, plan.sequences, needed.tolist(), strict=True):
            blocks = sequence.block_ids[index]
            if len(blocks) < n:
                raise InternalError(f"session {sequence.session} has {len(blocks)} blocks and needs {n}")
            row[:n] = blocks[:n]
        if int(table.min()) < 0 or int(table.max()) >= layout.num_blocks:
            raise InternalError(f"step {plan.step} names a block beyond the pool's {layout.num_blocks}")
        slots, slots_t = self._slots[index].take(positions.shape[0])
        np.add(table[owner, positions // size].astype(np.int64) * size, positions % size, out=slots)
        return GroupMetaData(table_t, slots_t)
