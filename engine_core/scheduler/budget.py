"""Token budgets. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def split_budget(missing: Iterable[int], budget: int) -> list[int]:
    """Gives each waiting sequence, in order, as many tokens as are left: chunks that sum to <= budget."""
    chunks = []
    for want in missing:
        chunk = min(want, budget)
        chunks.append(chunk)
        budget -= chunk
    return chunks


def blocks_ready(computed: int, total: int, block_size: int) -> int:
    """Blocks whose content is final: full ones, and the last partial one once all tokens are computed."""
    return -(-total // block_size) if computed >= total else computed // block_size


def may_open_leg(waiting_blocks: int, wanted_blocks: int, available_blocks: int) -> bool:
    """Whether one more un-ticketed prompt may be sent to prefill. One always may.

    A count, not a reservation: it bounds how many computed prompts wait for decode's blocks.
    """
    return waiting_blocks == 0 or waiting_blocks + wanted_blocks <= available_blocks


def cut_blocks(blocks: Sequence[Sequence[int]], start: int, end: int) -> tuple[tuple[int, ...], ...]:
    """Blocks [start, end) of every group's table."""
    return tuple(tuple(group[start:end]) for group in blocks)
