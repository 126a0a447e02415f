"""Workers that leave, come and change under load, without an error at any client."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from engine_core.types.request import Role
from engine_core.types.sampling import SamplingParams
from services.cli.drain import drain
from services.cli.role import change_role
from services.config import QueryConfig
from tests.support.load import Answer, Ask
from tests.support.mesh import Mesh
from tests.support.oracle import Claim, oracle_for


def some_asks(count: int, max_tokens: int, *, seed: int = 1, longest: int = 200) -> list[Ask]:
    """Random prompts of various lengths, one in four not streamed."""
    draw = random.Random(seed)
    return [
        Ask(tuple(draw.randrange(3, 300) for _ in range(draw.randint(1, longest))), max_tokens, stream=i % 4 != 3)
        for i in range(count)
    ]


def assert_whole(answers: Sequence[Answer], model: Path, calm: Mapping[Ask, Sequence[int]] | None = None) -> None:
    """No error, nothing lost, nothing twice, right text: as in the calm run, or as the oracle accepts it."""
    doubtful: list[Claim] = []
    for answer in answers:
        assert answer.ok and answer.done and answer.status == 200, str(answer)
        assert len(answer.token_ids) == answer.ask.max_tokens, str(answer)
        if calm is None or answer.token_ids != list(calm[answer.ask]):
            doubtful.append(claim_of(answer))
    if doubtful:
        torch.set_num_threads(1)  # the mesh's own processes want the cores
        oracle_for(model).assert_right(doubtful)


def claim_of(answer: Answer) -> Claim:
    """What has come so far, for the oracle."""
    ask = answer.ask
    params = SamplingParams(max_tokens=ask.max_tokens, temperature=ask.temperature, seed=ask.seed, ignore_eos=True)
    return Claim(ask.prompt, tuple(answer.token_ids), params)


async def drained(mesh: Mesh, *names: str, **order: Any) -> None:
    """`pdmesh drain NAMES --wait`. Raises AssertionError when it takes longer than a minute."""
    config = QueryConfig(bootstrap=(mesh.bootstrap,))
    full = {"limit": None, "force": False, "stop": False, "wait": True, "timeout": 60.0, **order}
    assert await drain(config, list(names), **full) == 0


async def changed(mesh: Mesh, name: str, role: Role, **order: Any) -> None:
    """`pdmesh role NAME ROLE`. Raises AssertionError when it takes longer than a minute."""
    full = {"limit": None, "force": False, "wait": True, "timeout": 60.0, **order}
    assert await change_role(QueryConfig(bootstrap=(mesh.bootstrap,)), name, role=role, **full) == 0
