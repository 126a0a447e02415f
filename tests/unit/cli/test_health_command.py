"""`pdmesh health`: exit codes and the one line that says why."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import pytest_asyncio

from services.cli import health
from services.cli.main import run
from services.runtime.security import Security
from services.runtime.server import GrpcServer
from services.runtime.tls import MeshTls
from tests.support.certificates import Authority, Files

NAME = "pdmesh.decode.v1.DecodeService"


@pytest_asyncio.fixture
async def server() -> AsyncIterator[GrpcServer]:
    made = await GrpcServer.start("127.0.0.1:0", lambda server: None, [NAME])
    yield made
    await made.stop()


async def ask(*arguments: str) -> int:
    """The exit code, with the server's event loop free to answer."""
    return await asyncio.to_thread(health.main, ["--timeout", "20", *arguments])


async def test_zero_only_while_it_serves(server: GrpcServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert await ask(server.endpoint) == 1
    assert capsys.readouterr().err == f"pdmesh health: {server.endpoint}: NOT_SERVING\n"
    assert await ask(server.endpoint, "--service", "liveness") == 0, "it answers: no reason to restart it"
    await server.set_serving(True)
    assert await ask(server.endpoint) == 0
    assert await ask(server.endpoint, "--service", NAME) == 0
    assert capsys.readouterr() == ("", "")


async def test_a_service_that_is_not_there(server: GrpcServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert await ask(server.endpoint, "--service", "pdmesh.no.Such") == 1
    assert capsys.readouterr().err == f"pdmesh health: {server.endpoint}: it has no service 'pdmesh.no.Such'\n"


async def test_a_unix_socket(tmp_path: Path) -> None:
    made = await GrpcServer.start(f"unix:{tmp_path}/sock", lambda server: None, [NAME])
    await made.set_serving(True)
    assert await ask(f"unix:{tmp_path}/sock") == 0
    await made.stop()


async def test_mtls_by_the_name_that_all_certificates_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    authority = Authority()
    cert, key, ca = (tmp_path / name for name in ("tls.crt", "tls.key", "ca.crt"))
    for path, content in zip((cert, key), authority.issue("pdmesh.mesh"), strict=True):
        path.write_bytes(content)
    ca.write_bytes(authority.pem)
    security = Security(tls=MeshTls(cert, key, ca, "pdmesh.mesh"))
    made = await GrpcServer.start("127.0.0.1:0", lambda server: None, [NAME], security=security)
    await made.set_serving(True)
    files = [f"--tls-cert={cert}", f"--tls-key={key}", f"--tls-ca={ca}"]
    assert await ask(made.endpoint, *files, "--tls-name=pdmesh.mesh") == 0
    assert capsys.readouterr() == ("", "")
    assert await ask(made.endpoint, *files) == 1, "the certificate does not name 127.0.0.1"
    assert await ask(made.endpoint, f"--tls-ca={ca}", "--tls-name=pdmesh.mesh") == 1, "no certificate of its own"
    assert await ask(made.endpoint) == 1, "no TLS"
    assert len(capsys.readouterr().err.splitlines()) == 3
    await made.stop()


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but nobody listens
        port = taken.getsockname()[1]
        assert health.main([f"127.0.0.1:{port}", "--timeout", "20"]) == 1
        assert "Connection refused" in capsys.readouterr().err
        assert health.main([f"http://127.0.0.1:{port}/readiness", "--timeout", "20"]) == 1
        assert "Connection refused" in capsys.readouterr().err


def test_one_that_accepts_and_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        assert health.main([f"127.0.0.1:{port}", "--timeout", "0.2"]) == 1
        assert health.main([f"http://127.0.0.1:{port}/", "--timeout", "0.2"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all(str(port) in line for line in lines)


class _Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        ready = self.path == "/readiness"
        self.send_response(200 if ready else 503)
        self.end_headers()
        self.wfile.write(b"yes" if ready else b"no pair of workers\nis ready")

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _Answers) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_http(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert health.main([f"{url}/readiness"]) == 0
    assert health.main([f"{url}/elsewhere"]) == 1
    assert capsys.readouterr().err == f"pdmesh health: {url}/elsewhere: HTTP 503: no pair of workers is ready\n"


def test_files_that_are_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert health.main(["127.0.0.1:1", "--tls-ca", "/no/such/ca.pem"]) == 1
    assert "/no/such/ca.pem: No such file or directory" in capsys.readouterr().err


def test_both_ways_into_the_command(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["health", f"{url}/readiness", "--timeout", "9"]) == 0
    assert run(["health", f"{url}/elsewhere"]) == 1
    assert "HTTP 503" in capsys.readouterr().err
    program = (
        f"import sys; sys.argv = ['pdmesh', 'health', '{url}/readiness']; from services.cli.entry import main; main()"
    )
    # What is heavy must not be imported: a probe is a new process every few seconds.
    program = program.replace("main()", "import atexit; atexit.register(lambda: print(*sys.modules)); main()")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {"typer", "pydantic", "yaml", "asyncio", "grpc", "torch"} & set(done.stdout.split())


async def test_a_url_whose_certificate_is_unknown_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files, context = Files(tmp_path), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    files.certify(Authority())
    context.load_cert_chain(files.cert, files.key)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 200 OK\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    async with server:
        url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/readiness"
        assert await ask(url) == 1
        assert capsys.readouterr().err.endswith("; name the authority of its certificate with --tls-ca\n")
        assert await ask(url, "--tls-ca", str(files.ca)) == 0
