"""ForwardMetaData: what one forward has to know beside its tokens. Passed as an argument, never global."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class GroupMetaData:
    """Where the KV of one cache group lies.

    block_tables [B, M] int32, rows padded with the null block 0; slot_mapping [T] int64: the slot
    (block * block_size + offset) that each new token's K and V go to.
    """

    block_tables: torch.Tensor
    slot_mapping: torch.Tensor


@dataclass(frozen=True, slots=True)
class ForwardMetaData:
    """Shape of a packed batch of B sequences with T new tokens in all.

    query_starts [B + 1] int32: sequence b's tokens are rows query_starts[b] to query_starts[b + 1].
    seq_lens [B] int32: tokens known to sequence b after this step, so its first new token stands at
    seq_lens[b] minus its number of new tokens. The first num_decodes sequences have one new token each.
    sample_rows [S] int64: rows whose logits are wanted, sampled ones before scored ones.
    wants_all: they are all T rows, in order.
    """

    num_decodes: int
    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    max_query_len: int
    max_seq_len: int
    sample_rows: torch.Tensor
    groups: tuple[GroupMetaData, ...]
    wants_all: bool = False

    @property
    def num_sequences(self) -> int:
        """B."""
        return self.seq_lens.shape[0]
