"""A mesh with a token and mTLS: right as any other, closed to all who lack either, changed without a restart."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio

from pdmesh.bootstrap.v1 import bootstrap_service_pb2, bootstrap_service_pb2_grpc
from services.config import QueryConfig, child_environment
from services.runtime.channels import ChannelPool
from services.runtime.security import Security
from tests.support.asking import Asker, random_prompt, until, until_async
from tests.support.certificates import Authority, Files
from tests.support.mesh import Mesh
from tests.support.models import tiny_model
from tests.support.oracle import oracle_for

pytestmark = pytest.mark.asyncio(loop_scope="module")

OLD, NEW, OTHER = "the-token-of-yesterday", "the-token-of-today", "somebody-elses-token"
PDMESH = (sys.executable, "-m", "services.cli.main")
PROCESSES = ("bootstrap", "router", "prefill-0", "decode-0")
LONG = 60.0
"""Seconds for what takes a few on a machine with time."""


@dataclass
class Secure:
    """The mesh, its client, its files, and the authority that signed its certificates."""

    mesh: Mesh
    asker: Asker
    files: Files
    authority: Authority

    async def table(self, **options: str) -> str:
        """How a caller that asks for the rank table with these options fares."""
        pool = ChannelPool(security=Security.of(QueryConfig(**options)))
        stub = bootstrap_service_pb2_grpc.BootstrapServiceStub(pool.get(self.mesh.bootstrap))
        try:
            await stub.GetRankTable(bootstrap_service_pb2.GetRankTableRequest(), timeout=20)
        except grpc.aio.AioRpcError as exc:
            return exc.code().name
        finally:
            await pool.close()
        return "OK"

    async def said(self, name: str, text: str, times: int = 1) -> None:
        """Waits until a process has said something so often."""
        await until(
            lambda: sum(text in line for line in self.mesh.lines(name)) >= times,
            LONG,
            lambda: f"{name} has not said {text!r}: {self.mesh.lines(name)[-20:]}",
        )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def secure(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Secure]:
    """One pair over tcp, at debug level, with all that it ever logs."""
    files, authority = Files(tmp_path_factory.mktemp("keys")), Authority()
    files.tokens(OLD)
    files.certify(authority)
    options = {**files.token_options, **files.tls_options, "kv_tokens": 1024, "log_level": "debug"}
    overrides = {"prefill-0": {"transfer_backend": "tcp"}}
    mesh = Mesh(tiny_model("llama"), options=options, overrides=overrides, kept_lines=1_000_000)
    async with mesh, Asker(mesh) as asker:
        yield Secure(mesh, asker, files, authority)


async def test_answers_are_right(secure: Secure) -> None:
    """Token for token what the model gives, as of a mesh that asks nobody who he is."""
    prompts = [random_prompt(40 + i, i) for i in range(3)]
    answers = [await secure.asker.generate(prompt, max_tokens=12, ignore_eos=True) for prompt in prompts]
    oracle_for(tiny_model("llama")).assert_right([answer.claim() for answer in answers])
    assert [(answer.path, answer.transport, answer.attempts) for answer in answers] == [("pd", "tcp", 1)] * 3


async def test_callers_without_token_or_certificate_are_refused(secure: Secure, tmp_path: Path) -> None:
    stranger, wrong, right = Authority(), Files(tmp_path), secure.files
    wrong.tokens(OTHER)
    wrong.certify(stranger, trusted=secure.authority.pem + stranger.pem)
    assert await secure.table(**right.token_options, **right.tls_options) == "OK"
    assert await secure.table(**right.tls_options) == "UNAUTHENTICATED"
    assert await secure.table(**wrong.token_options, **right.tls_options) == "UNAUTHENTICATED"
    assert await secure.table(**right.token_options) == "UNAVAILABLE"
    assert await secure.table(**right.token_options, **wrong.tls_options) == "UNAVAILABLE"
    refused = "peer ipv4:127.0.0.1:[0-9]+: refused /pdmesh.bootstrap.v1.BootstrapService/GetRankTable: "
    for why in ("the call came without a mesh token", "the mesh token that came is wrong"):
        await secure.said("bootstrap", why)
        assert any(re.search(refused + why, line) for line in secure.mesh.lines("bootstrap"))

    async def noticed() -> bool:
        # gRPC tells a server nothing of it: who is gone before it looks at its connections is seen the next time.
        assert await secure.table(**right.token_options) == "UNAVAILABLE"
        return any("refused by TLS, or gone before its first call" in line for line in secure.mesh.lines("bootstrap"))

    await until_async(noticed, LONG, lambda: f"{secure.mesh.lines('bootstrap')[-20:]}")


async def test_a_process_with_a_wrong_token_is_told_and_joins_nothing(secure: Secure, tmp_path: Path) -> None:
    wrong = Files(tmp_path)
    wrong.tokens(OTHER)
    options = {"model": str(tiny_model("llama")), "port": "0", "bootstrap": secure.mesh.bootstrap}
    intruder = await asyncio.create_subprocess_exec(
        *PDMESH, "router", *flags(**options, **wrong.token_options, **secure.files.tls_options),
        stderr=asyncio.subprocess.PIPE, env=child_environment(),
    )  # fmt: skip
    line = ""
    try:
        assert intruder.stderr is not None
        async with asyncio.timeout(LONG):
            while "services.worker.roster" not in line:
                line = (await intruder.stderr.readline()).decode()
                assert line, "it ended without a word"
        assert "the mesh token that came is wrong; look at --mesh-token-file of the caller" in line
        await secure.said("bootstrap", "refused /pdmesh.bootstrap.v1.BootstrapService/WatchRankTable: the mesh token")
        assert len([s for s in (await secure.mesh.status())["services"] if s["name"] == "router"]) == 1
    finally:
        with contextlib.suppress(ProcessLookupError):
            intruder.kill()
        await intruder.wait()


def flags(**options: str) -> list[str]:
    return [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", value)]


@pytest.mark.slow
async def test_commands_show_token_and_certificate(secure: Secure) -> None:
    async def pdmesh(*arguments: str, **options: str) -> tuple[int, str]:
        process = await asyncio.create_subprocess_exec(
            *PDMESH, *arguments, *flags(bootstrap=secure.mesh.bootstrap, **options),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env=child_environment(),
        )  # fmt: skip
        async with asyncio.timeout(LONG):
            output, _ = await process.communicate()
        assert process.returncode is not None
        return process.returncode, output.decode()

    right = {**secure.files.token_options, **secure.files.tls_options}
    (good, status), (bad, refusal) = await asyncio.gather(
        pdmesh("status", "--json", **right), pdmesh("status", **secure.files.tls_options)
    )
    assert good == 0 and '"instance": "decode-0"' in status
    assert bad == 1 and refusal.count("\n") == 1
    assert "UNAUTHENTICATED" in refusal and "the call came without a mesh token; look at --mesh-token-file" in refusal


async def test_token_and_authority_change_under_load_without_a_failure(secure: Secure, tmp_path: Path) -> None:
    mesh, files, before, after = secure.mesh, secure.files, secure.authority, Authority()
    former = Files(tmp_path)
    former.tokens(OLD)
    former.certify(before, trusted=before.pem + after.pem)
    old = {**former.token_options, **former.tls_options}
    assert await secure.table(**old) == "OK"
    done, answers = asyncio.Event(), []

    async def load(number: int) -> None:
        while not done.is_set():
            prompt = random_prompt(30, 1000 * number + len(answers))
            answers.append(await secure.asker.generate(prompt, max_tokens=8, ignore_eos=True))

    running = asyncio.gather(*(load(number) for number in range(2)))
    both = before.pem + after.pem
    steps = (((OLD, NEW), before, both), ((NEW, OLD), after, both), ((NEW,), after, after.pem))
    try:
        for step, (tokens, issuer, trusted) in enumerate(steps, 1):
            files.tokens(*tokens)
            files.certify(issuer, trusted=trusted)
            for name in PROCESSES:
                await secure.said(name, "the mesh token was read anew", step)
                await secure.said(name, f"the TLS certificate was read anew from {files.cert}", step)
            at = len(answers)
            await until(lambda at=at: len(answers) >= at + 4 or running.done(), LONG, lambda: f"{len(answers)} answers")
    finally:
        done.set()
        await running
    assert all((answer.path, answer.attempts) == ("pd", 1) for answer in answers)
    # What was good before is refused now, and what starts now proves its links by the new token.
    assert await secure.table(**old) == "UNAVAILABLE"
    assert await secure.table(**former.token_options, **files.tls_options) == "UNAUTHENTICATED"
    await secure.said("bootstrap", "the mesh token that came has expired: it was removed from the file")
    await mesh.start("prefill-1")

    async def linked() -> bool:
        return any(pair["up"] for pair in (await mesh.rank("prefill-1"))["pairs"])

    await until_async(linked, LONG, lambda: "no link of prefill-1")
    mesh.kill("prefill-0")
    await mesh.gone("prefill-0")
    answer = await secure.asker.generate(random_prompt(30, 5), max_tokens=4)
    assert (answer.path, answer.prefill) == ("pd", "prefill-1")


async def test_logs_at_debug_level_hold_neither_text_nor_token_ids(secure: Secure) -> None:
    """Whole and streamed answers, refusals of every kind, a worker's death: none quotes what was asked or said."""
    mesh, marker = secure.mesh, "xylophone quartz zebra juggling"
    async with httpx.AsyncClient(base_url=mesh.url, timeout=60.0, trust_env=False) as http:
        asked = [(await http.post(path, json=body)).status_code for path, body in bodies(marker)]
        asked.append((await http.post("/v1/completions", content=f'{{"prompt": "{marker}"')).status_code)
        asked.append((await http.post(f"/{marker}", json={})).status_code)
        ids = (await http.post("/tokenize", json={"prompt": marker})).json()["tokens"]
    assert asked[:4] == [200] * 4 and set(asked[4:]) <= {400, 404, 405, 422} and len(asked) == 12
    running = secure.asker.start(tuple(ids) * 3, max_tokens=600, ignore_eos=True)
    await running.tokens(3)  # by then its KV is all there
    await mesh.kill_engine("prefill-1")
    await mesh.gone("prefill-1")
    assert (await running.whole()).ok
    for name in (*PROCESSES, "prefill-1"):
        assert quoted(mesh.lines(name), marker, ids) == []
    assert len(mesh.lines("router")) > 12  # a line for each request, at least


def bodies(marker: str) -> list[tuple[str, dict[str, Any]]]:
    """Requests that hold the marker: four good ones, then some that are refused."""
    chat = {"model": "default", "messages": [{"role": "user", "content": marker}], "max_tokens": 4}
    complete = {"model": "default", "prompt": marker, "max_tokens": 4}
    return [
        ("/v1/completions", complete),
        ("/v1/completions", {**complete, "stream": True}),
        ("/v1/chat/completions", {**chat, "stream": True}),
        ("/generate", {"text": marker, "max_tokens": 4}),
        ("/v1/completions", {**complete, "prompt": f"{marker} " * 400}),
        ("/v1/completions", {**complete, "prompt": {"text": marker}}),
        ("/v1/completions", {**complete, "temperature": marker}),
        ("/v1/chat/completions", {**chat, "messages": [{"role": marker, "content": marker}]}),
        ("/v1/chat/completions", {**chat, "messages": marker}),
        ("/v1/completions", {**complete, "model": marker}),
    ]


def quoted(lines: Sequence[str], marker: str, ids: Sequence[int]) -> list[str]:
    """Lines with a word of the marker, or four of its token ids in a row, whatever stands between them."""
    words = [re.escape(word) for word in marker.split()]
    runs = [r"(?<!\d)" + r"\D{1,4}".join(map(str, ids[i : i + 4])) + r"(?!\d)" for i in range(len(ids) - 3)]
    pattern = re.compile("|".join([*words, *runs]))
    return [line for line in lines if pattern.search(line)]
