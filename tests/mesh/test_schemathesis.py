"""What schemathesis makes of /openapi.json: whatever it sends, no 5xx, no hang, no answer that breaks its schema."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from tests.support.mesh import Mesh
from tests.support.raw import unharmed

pytestmark = pytest.mark.asyncio(loop_scope="session")

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "unsupported_method",
    "negative_data_rejection",
)
LIMIT = 500.0


async def run(mesh: Mesh, folder: Path, *options: str) -> tuple[int, str]:
    """Exit code and output of one run. Each request has twenty seconds to be answered."""
    command = [
        sys.executable, "-m", "schemathesis.cli", "run", f"{mesh.url}/openapi.json", "--checks", ",".join(CHECKS),
        "--request-timeout", "20", "--continue-on-failure", "--no-color",
        "--generation-deterministic", *options,
    ]  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        *command, cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        async with asyncio.timeout(LIMIT):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode or 0, output.decode()


@pytest.mark.timeout(600)
async def test_requests_that_follow_the_schema_and_some_that_do_not(small_mesh: Mesh, tmp_path: Path) -> None:
    async with unharmed(small_mesh):
        code, output = await run(small_mesh, tmp_path, "--phases", "fuzzing", "--max-examples", "6")
        assert code == 0, output


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_every_border_of_every_field(small_mesh: Mesh, tmp_path: Path) -> None:
    async with unharmed(small_mesh):
        code, output = await run(small_mesh, tmp_path, "--phases", "coverage,fuzzing", "--max-examples", "40")
        assert code == 0, output
