"""Small builders for specs, layouts, plans and tickets; every test names only what it is about."""

from __future__ import annotations

from collections.abc import Sequence

from engine_core.config import SchedulerConfig
from engine_core.scheduler.step import ScheduledSequence, StepPlan
from engine_core.types.ids import SessionId
from engine_core.types.kv import GroupBlocks, KvGroupLayout, KvGroupSpec, KvLayout, ShardTicket, Ticket
from engine_core.types.request import GenerateSpec
from engine_core.types.sampling import SamplingParams

FAR = 1e12
"""A deadline that no test reaches."""


def session(room: int = 1, attempt: int = 0) -> SessionId:
    """A session id."""
    return SessionId(room, attempt)


def sampling(max_tokens: int = 4, *, seed: int = 0, temperature: float = 0.0, **more: object) -> SamplingParams:
    """Greedy by default."""
    return SamplingParams(max_tokens=max_tokens, seed=seed, temperature=temperature, **more)  # type: ignore[arg-type]


def spec(
    prompt: Sequence[int] = (1, 2, 3),
    *,
    room: int = 1,
    attempt: int = 0,
    max_tokens: int = 4,
    emitted: Sequence[int] = (),
    arrival_ms: int = 0,
    deadline: float = FAR,
    salt: str = "",
    params: SamplingParams | None = None,
) -> GenerateSpec:
    """One attempt of one sample."""
    return GenerateSpec(
        session=SessionId(room, attempt),
        request_id=f"req-{room}",
        prompt_token_ids=tuple(prompt),
        sampling=params if params is not None else sampling(max_tokens),
        arrival_ms=arrival_ms,
        deadline=deadline,
        emitted_token_ids=tuple(emitted),
        cache_salt=salt,
    )


def group(
    *, num_layers: int = 2, num_heads: int = 2, head_size: int = 8, dtype: str = "float32", kv_size: int = 2
) -> KvGroupSpec:
    """A cache group of a tiny model."""
    return KvGroupSpec(num_layers=num_layers, num_heads=num_heads, head_size=head_size, dtype=dtype, kv_size=kv_size)


def layout(num_blocks: int = 5, block_size: int = 2, *, groups: Sequence[KvGroupSpec] | None = None) -> KvLayout:
    """A layout whose groups lie one after another; num_blocks counts the null block."""
    placed, offset = [], 0
    for index, part in enumerate(groups if groups is not None else (group(),)):
        numbered = KvGroupSpec(
            part.num_layers, part.num_heads, part.head_size, part.dtype, kv_size=part.kv_size, group_id=index
        )
        one = KvGroupLayout(spec=numbered, block_size=block_size, num_blocks=num_blocks, offset=offset)
        placed.append(one)
        offset += one.block_bytes * num_blocks
    return KvLayout(groups=tuple(placed), region_bytes=offset)


def ticket(block_ids: Sequence[int], *, num_tokens: int, first_token: int = 0, link_id: int = 1) -> Ticket:
    """A ticket for the one rank of a decode instance, one cache group."""
    shard = ShardTicket(coord=(0, 0, 0), groups=(GroupBlocks(0, tuple(block_ids)),))
    return Ticket(link_id=link_id, first_token=first_token, num_tokens=num_tokens, shards=(shard,))


def scheduler(block_size: int = 2, **more: object) -> SchedulerConfig:
    """A scheduler configuration for tiny pools; unchecked, so that block_size may be 2."""
    return SchedulerConfig(block_size=block_size, **more)  # type: ignore[arg-type]


def sequence(
    token_ids: Sequence[int],
    *,
    start: int = 0,
    block_ids: Sequence[int] = (1,),
    sample: bool = True,
    room: int = 1,
    params: SamplingParams | None = None,
) -> ScheduledSequence:
    """One sequence's part of a step, one cache group."""
    return ScheduledSequence(
        session=SessionId(room, 0),
        token_ids=tuple(token_ids),
        start=start,
        block_ids=(list(block_ids),),
        sample=sample,
        sampling=params if params is not None else sampling(),
    )


def plan(*sequences: ScheduledSequence, step: int = 1) -> StepPlan:
    """A step."""
    return StepPlan(step=step, sequences=tuple(sequences))
