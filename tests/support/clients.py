"""Client programs in processes and environments of their own, and what they print.

A program prints one line of JSON per case: {"case": NAME, "value": ...} or {"case": NAME, "error": TEXT}
(tests/clients/programs). The environments are made by `make`, from tests/clients/requirements-NAME.txt.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CLIENTS = Path(__file__).parent.parent / "clients"
PROGRAMS = CLIENTS / "programs"
DATA = CLIENTS / "data"
_KEPT = ("PATH", "LANG", "LC_ALL", "TMPDIR")


@dataclass(frozen=True)
class Ended:
    """A program that has ended by itself."""

    code: int
    output: str
    errors: str

    def __str__(self) -> str:
        return f"exit code {self.code}\n{self.output[-6000:]}\n--- stderr\n{self.errors[-6000:]}"

    @property
    def cases(self) -> Cases:
        """What a program of tests/clients/programs has printed. Raises AssertionError unless it ended well."""
        assert self.code == 0, str(self)
        lines = [json.loads(line) for line in self.output.splitlines() if line.startswith('{"case"')]
        return Cases({line["case"]: line for line in lines}, self)


@dataclass(frozen=True)
class Cases:
    """The cases of one program."""

    lines: dict[str, dict[str, Any]]
    ended: Ended

    def __getitem__(self, name: str) -> Any:
        assert name in self.lines, f"{name} was not run: {self.ended}"
        assert "error" not in self.lines[name], self.lines[name]["error"]
        return self.lines[name]["value"]


def environment(name: str, program: str = "python") -> str:
    """A program in one of the clients' environments."""
    path = Path(sys.prefix) / "clients" / name / "bin" / program
    assert path.exists(), f"{path} is not there: `make test-slow` makes the clients' environments"
    return str(path)


async def run(command: Sequence[str], folder: Path, within: float, **variables: str) -> Ended:
    """Runs a program in a folder, which is its home too, without a hub and without this process's settings.

    Raises AssertionError with what it has printed, and ends it and its children, when it takes too long.
    """
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
    env = kept | offline | {"HOME": str(folder), "PYTHONUNBUFFERED": "1", "NO_PROXY": "*", **variables}
    out, err = folder / "stdout.txt", folder / "stderr.txt"
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            *command, cwd=folder, env=env, stdin=asyncio.subprocess.DEVNULL, stdout=stdout, stderr=stderr,
            start_new_session=True,
        )  # fmt: skip
    try:
        async with asyncio.timeout(within):
            await process.wait()
    except TimeoutError:
        seen = Ended(-1, out.read_text(errors="replace"), err.read_text(errors="replace"))
        raise AssertionError(f"{command[0]} did not end within {within:g} s: {seen}") from None
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    return Ended(process.returncode or 0, out.read_text(errors="replace"), err.read_text(errors="replace"))


def greedy_model(model: Path, folder: Path, **generation: Any) -> Path:
    """The same model, which is greedy where a client says nothing: what clients get is then the same each time.
    `generation` changes its generation_config.json further."""
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).symlink_to(file)
    path = folder / "generation_config.json"
    was = json.loads(path.read_text(encoding="utf-8"))
    path.unlink()
    path.write_text(json.dumps({**was, "temperature": 0.0, **generation}), encoding="utf-8")
    return folder


def node() -> str:
    """Of the system."""
    found = shutil.which("node")
    assert found is not None, "node is not there"
    return found
