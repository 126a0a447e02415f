"""Command lines: exit codes, and one line per error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from services.cli import main


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main.run(arguments)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("decode", "--kv-token", "3"), "No such option: --kv-token (Possible options: --kv-tokens)"),
        (("serv",), "No such command 'serv'. Did you mean 'serve'?"),
        (("decode",), "model is required: give --model"),
        (("prefill", "--model", "/no/such/dir"), "model directory /no/such/dir does not exist"),
        (("serve", "--model", "/no/such/dir"), "model directory /no/such/dir does not exist"),
        (("serve", "--model", "x", "--prefill", "0"),
         "prefill (from --prefill): Input should be greater than or equal to 1, got '0'"),
        (("model", "tiny", "x", "--arch", "llamma"), "unknown architecture 'llamma'; did you mean 'llama'?"),
        (("model", "fetch", "other"), "unknown model 'other': only demo can be fetched"),
        (("explain",), "Missing argument 'REQUEST_ID'."),
        (("role", "decode-0", "BOTH"), "the role must be one of PREFILL, DECODE, MIXED"),
    ],
)  # fmt: skip
def test_errors_are_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], line: str
) -> None:
    assert run(capsys, *arguments) == (2, "", f"pdmesh: error: {line}\n")


def test_a_file_is_no_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, _, err = run(capsys, "router", "--model", str(tmp_path / "file"))
    assert (code, err) == (2, f"pdmesh: error: model {tmp_path / 'file'} is not a directory\n")


def test_the_demo_model_must_be_there(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDMESH_CACHE", str(tmp_path))
    code, _, err = run(capsys, "decode", "--model", "demo")
    assert code == 2
    assert err == (
        f"pdmesh: error: the demo model is not in {tmp_path}/models/SmolLM2-135M-Instruct: "
        "run `pdmesh model fetch demo`\n"
    )


@pytest.mark.parametrize("command", [("status",), ("explain", "some-request")])
def test_without_a_mesh_there_is_no_answer(capsys: pytest.CaptureFixture[str], command: tuple[str, ...]) -> None:
    code, out, err = run(capsys, *command, "--bootstrap", "127.0.0.1:1", "--query-timeout", "0.5")
    assert (code, out) == (1, "")
    assert err.startswith("pdmesh: error: Bootstrap at 127.0.0.1:1 does not answer: ") and err.count("\n") == 1


def test_every_flag_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "serve", "--help")
    for flag in ("--model", "--prefill", "--aggregated", "--no-prefix-cache", "--kv-tokens", "--policy", "--lease-ttl"):
        assert flag in out
    for internal in ("--ready-fd", "--socket-dir", "--instance"):
        assert internal not in out


def test_the_help_gives_seconds_only_where_seconds_are_meant(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "serve", "--help")
    for flag in ("--drain-timeout SECONDS", "--lease-renewal SECONDS", "--auto-role-hold SECONDS"):
        assert flag in out
    for flag in ("--auto-role-high X", "--pool-headroom X", "--retry-share X", "--trace-sample-ratio X"):
        assert flag in out


def test_the_command_line_needs_no_torch() -> None:
    code = "import sys, services.cli.main; sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_version_by_either_name(capsys: pytest.CaptureFixture[str]) -> None:
    told = {run(capsys, name)[:2] for name in ("version", "--version")}
    assert len(told) == 1
    code, line = told.pop()
    assert code == 0 and line.startswith("pdmesh ")
