"""What a seed decides before anything runs."""

from __future__ import annotations

import random
from typing import Literal

import msgspec

from engine_core.config import SchedulerConfig
from engine_core.types.sampling import SamplingParams
from tests.support.explorer.symbols import VOCABULARY

Kind = Literal["calm", "cancel", "rough"]


class Ask(msgspec.Struct, frozen=True):
    """One request of a user."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    salt: str
    deadline_after: float
    fits: bool = True
    """False: longer than the smaller pool, to be refused before any work."""
    priority: int = 0


class Scenario(msgspec.Struct, frozen=True):
    """Sizes, topology and budgets of faults. `calm` has no fault, so that every request must succeed."""

    kind: Kind
    mixed: bool
    prefills: int
    decodes: int
    flavour: Literal["shm", "tcp"]
    prefill_blocks: int
    decode_blocks: int
    prefill_config: SchedulerConfig
    decode_config: SchedulerConfig
    verify_kv: bool
    resume: bool
    asks: tuple[Ask, ...]
    cancels: int
    kills: int
    stops: int
    breaks: int
    link_breaks: int
    short_pushes: int
    corruptions: int
    jumps: int
    encode_frames: bool

    @property
    def damaging(self) -> bool:
        """True when pushes may be cut short or corrupted: errors of kind InternalError are then right."""
        return bool(self.short_pushes or self.corruptions)


def scenario_of(rng: random.Random) -> Scenario:
    """Draws a scenario."""
    kind: Kind = rng.choices(("calm", "cancel", "rough"), (4, 3, 6))[0]
    rough, block_size = kind == "rough", rng.choice((2, 2, 2, 1, 3))
    mixed = rng.random() < 0.08
    decode_blocks, prefill_blocks = rng.choice((4, 4, 4, 5, 6)), rng.choice((4, 4, 4, 5, 3))
    count = rng.choices((1, 2, 3, 4), (1, 10, 4, 1))[0]
    if rng.random() < 0.08:
        decode_blocks, prefill_blocks, count = rng.choice((6, 8)), rng.choice((4, 6, 8)), rng.randint(5, 8)
    verify = rng.random() < 0.25
    asks = _asks(rng, count, block_size, decode_blocks if mixed else prefill_blocks, decode_blocks, rough)
    return Scenario(
        kind=kind,
        mixed=mixed,
        prefills=0 if mixed else rng.choice((1, 1, 2)),
        decodes=rng.choice((1, 1, 1, 2)),
        flavour=rng.choice(("shm", "shm", "tcp")),
        prefill_blocks=prefill_blocks,
        decode_blocks=decode_blocks,
        prefill_config=_config(rng, block_size, prefill_blocks),
        decode_config=_config(rng, block_size, decode_blocks),
        verify_kv=verify,
        resume=rng.random() < 0.7,
        asks=asks,
        cancels=0 if kind == "calm" else rng.choice((1, 1, 2)) if kind == "cancel" else rng.choice((0, 0, 1)),
        kills=rng.choice((0, 1, 1, 2)) if rough else 0,
        stops=rng.choice((0, 1, 1, 2)) if rough else 0,
        breaks=rng.choice((0, 1, 2)) if rough else 0,
        link_breaks=rng.choice((0, 0, 1)) if rough else 0,
        short_pushes=rng.choice((0, 0, 0, 1)) if rough else 0,
        corruptions=rng.choice((0, 1)) if rough and verify else 0,
        jumps=rng.choice((0, 2, 4)) if rough else 0,
        encode_frames=rng.random() < 0.06,
    )


def _config(rng: random.Random, block_size: int, blocks: int) -> SchedulerConfig:
    return SchedulerConfig(
        max_batch_tokens=rng.choice((2, 3, 4, 8)),
        max_running=rng.choice((2, 2, 4, 1)),
        max_queued=8,
        block_size=block_size,
        kv_tokens=block_size * blocks,
        num_reserved_decode_tokens=rng.choice((0, 0, 1, 2)),
        enable_prefix_cache=rng.random() < 0.8,
        max_local_tokens=rng.choice((1, 2, 4)),
        queue_timeout=60.0,
        kv_progress_timeout=15.0,
    )


def _asks(
    rng: random.Random, count: int, block_size: int, prefill_blocks: int, decode_blocks: int, rough: bool
) -> tuple[Ask, ...]:
    """Prompts that share prefixes; each fits alone into both pools."""
    common = tuple(rng.randrange(VOCABULARY) for _ in range(8 * block_size))
    other = tuple(rng.randrange(VOCABULARY) for _ in range(8 * block_size))
    asks = []
    for _ in range(count):
        longest = block_size * min(prefill_blocks, decode_blocks)
        size = rng.randint(1, longest)
        if rng.random() < 0.4:
            size = rng.randint(max(1, longest - block_size), longest)
        stem = common if rng.random() < 0.6 else other
        shared = rng.choice((size, size, size // 2, 0))
        prompt = stem[:shared] + tuple(rng.randrange(VOCABULARY) for _ in range(size - shared))
        own = random.Random(repr(prompt))  # leaves what else a seed means as it is
        room = longest - size + 1  # the router clamps to both pools
        params = SamplingParams(
            max_tokens=min(room, rng.choice((1, 2, 3, 5, 8))),
            seed=rng.randrange(4),
            temperature=rng.choice((0.0, 1.0)),
            min_tokens=rng.choice((0, 0, 0, 2)),
            stop_token_ids=rng.choice(((), (), (3,))),
            ignore_eos=rng.random() < 0.5,
            logprobs=own.choice((None, None, 0)),
            prompt_logprobs=own.choice((None, None, 0)),
        )
        if params.min_tokens > params.max_tokens:
            params = msgspec.structs.replace(params, min_tokens=0)
        salt = rng.choice(("", "", "", "s"))
        fits = rng.random() > 0.03
        if not fits:
            prompt += tuple(rng.randrange(VOCABULARY) for _ in range(longest - size + 1))
        # One step outweighs all that lies between two arrivals here, so any order of them comes up.
        priority = own.choice((0, 0, 0, 1, 2, -1))
        asks.append(Ask(prompt, params, salt, rng.choice((20.0, 90.0, 600.0)) if rough else 600.0, fits, priority))
    return tuple(asks)
