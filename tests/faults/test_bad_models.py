"""Model directories that can't be served: one line that says why, a non-zero exit, nothing registered."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from services.cli.status import get_table
from services.config import child_environment
from services.runtime.channels import ChannelPool
from tests.support.bootstraps import LocalBootstrap
from tests.support.models import tiny_model
from tests.support.serving import PDMESH

pytestmark = pytest.mark.timeout(180)


def missing(model: Path) -> str:
    shutil.rmtree(model)
    return str(model)


def truncated(model: Path) -> str:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    return str(weights)


def cut_to_nothing(model: Path) -> str:
    weights = model / "model.safetensors"
    weights.write_bytes(b"")
    return str(weights)


def without_weights(model: Path) -> str:
    (model / "model.safetensors").unlink()
    return str(model)


def broken_config(model: Path) -> str:
    (model / "config.json").write_text('{"architectures": ["LlamaFor')
    return "config.json"


def unknown_architecture(model: Path) -> str:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps(config | {"architectures": ["MambaForCausalLM"], "model_type": "mamba"})
    )
    return "MambaForCausalLM"


def lacking_a_tensor(model: Path) -> str:
    tensors = load_file(model / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    return "model.layers.1.mlp.up_proj.weight"


def tensor_of_another_shape(model: Path) -> str:
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.0.self_attn.k_proj.weight"] = tensors["model.layers.0.self_attn.k_proj.weight"][:-1].clone()
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    return "model.layers.0.self_attn.k_proj.weight"


Damage = Callable[[Path], str]
"""Spoils a model directory; returns what the message must name."""

SHORT: list[tuple[str, Damage]] = [
    ("prefill", missing),
    ("prefill", truncated),
    ("decode", unknown_architecture),
    ("decode", lacking_a_tensor),
]
DAMAGES: list[Damage] = [
    missing, truncated, cut_to_nothing, without_weights, broken_config, unknown_architecture, lacking_a_tensor,
    tensor_of_another_shape,
]  # fmt: skip
LONG = [(role, damage) for role in ("prefill", "decode") for damage in DAMAGES if (role, damage) not in SHORT]


async def run(*arguments: str) -> tuple[int, str, str]:
    """A command to its end: exit code, stdout, stderr."""
    process = await asyncio.create_subprocess_exec(
        *PDMESH, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=child_environment()
    )
    async with asyncio.timeout(90.0):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def check_worker(role: str, damage: Damage, folder: Path, bootstrap: str) -> None:
    model = folder / f"{role}-{damage.__name__}"
    shutil.copytree(tiny_model(), model)
    named = damage(model)
    code, out, err = await run(
        role, "--model", str(model), "--bootstrap", bootstrap, "--threads", "1", "--kv-tokens", "1024",
        "--log-level", "warning",
    )  # fmt: skip
    told = f"{role}, {damage.__name__}: exit code {code}\n{err}"
    assert code == 2 and out == "", told
    assert len(err.splitlines()) == 1 and err.startswith("pdmesh: error: "), told
    assert named in err, told


async def check_workers(cases: list[tuple[str, Damage]], folder: Path) -> None:
    """All of them against one Bootstrap, two at a time."""
    slots = asyncio.Semaphore(2)
    async with LocalBootstrap(folder / "b") as bootstrap:

        async def one(role: str, damage: Damage) -> None:
            async with slots:
                await check_worker(role, damage, folder, bootstrap.endpoint)

        await asyncio.gather(*(one(role, damage) for role, damage in cases))
        pool = ChannelPool()
        table = await get_table(pool, bootstrap.endpoint, 5.0)
        await pool.close()
        assert (list(table.rows), table.revision.n) == ([], 0), "something has registered"


async def test_a_worker_says_what_is_wrong_with_its_model(tmp_path: Path) -> None:
    await check_workers(SHORT, tmp_path)


@pytest.mark.slow
async def test_either_worker_says_so_of_every_damage(tmp_path: Path) -> None:
    await check_workers(LONG, tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        missing,
        *(pytest.param(damage, marks=pytest.mark.slow) for damage in DAMAGES if damage is not missing),
    ],
)
async def test_serve_ends_with_what_is_wrong(tmp_path: Path, damage: Damage) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model(), model)
    named = damage(model)
    code, out, err = await run(
        "serve", "--model", str(model), "--port", "0", "--bootstrap-port", "0", "--threads", "1", "--kv-tokens", "1024",
        "--log-level", "warning",
    )  # fmt: skip
    assert code == 2 and out == "", err
    errors = [line for line in err.splitlines() if line.startswith("pdmesh: error: ")]
    assert len(errors) == 1 and named in errors[0], err
    assert "Traceback" not in err
