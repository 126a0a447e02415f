"""The command line of `pdmesh bench`: wrong options are one line that says what would be right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.bench.report import read_report
from services.cli import main
from services.cli.bench import _command_line
from tests.unit.services.bench.test_bench_report import report, to_json


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main.run(("bench", *arguments))
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize(
    ("arguments", "line"),
    (
        (
            ("--rate", "1", "--concurrency", "2"),
            "--concurrency, --rate and --trace are three kinds of load: give one of",
        ),
        (("--concurrency", "1,x"), "--concurrency '1,x': 'x' is no whole number above 0"),
        (("--concurrency", "1.5"), "--concurrency '1.5': '1.5' is no whole number above 0"),
        (("--rate", "0"), "--rate '0': '0' is no number above 0"),
        (("--rate", "nan"), "--rate 'nan': 'nan' is no number above 0"),
        (("--prompt-tokens", "many"), "--prompt-tokens 'many': 'many' is no number of tokens; write it like 128, "),
        (("--output-tokens", "0"), "--output-tokens '0': token counts are 1 or more"),
        (("--url", "localhost:8000"), "--url 'localhost:8000' is no address: write it like http://127.0.0.1:8000"),
        (("--endpoint", "chats"), "--endpoint 'chats': there are completions and chat"),
        (("--requests", "0"), "--requests must be 1 or more, not 0"),
        (("--slo-ttft", "0"), "--slo-ttft must be above 0, not 0"),
        (("--slo-share", "90"), "--slo-share is a share of 1, not 90"),
        (("--extra-body", "[]"), "--extra-body must be a JSON object: Expected `object`, got `array`"),
        (("--trace", "/no/such"), "--trace /no/such can't be read: No such file or directory"),
        (("--json", "/no/such/x.json"), "there is no folder /no/such to write x.json to"),
        (("--api-key", "a", "--api-key-file", "b"), "--api-key and --api-key-file: give one of them"),
        (("--api-key-file", "/no/such"), "--api-key-file /no/such can't be read: No such file or directory"),
        (("--rate", "0.001", "--duration", "1"), "at 0.001 requests/s no request arrives in 1 s"),
        (("--concurency", "1"), "No such option: --concurency (Possible options: --concurrency)"),
        (("compare", "/no/a.json", "/no/b.json"), "/no/a.json can't be read: No such file or directory"),
    ),
)
def test_wrong_options_are_one_line(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], line: str) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"pdmesh: error: {line}")


def test_a_server_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--url", "http://127.0.0.1:9")
    line = "pdmesh: error: http://127.0.0.1:9/v1 does not answer: can't connect: Connection refused\n"
    assert (code, out, err) == (1, "", line)


def test_help_explains_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    for option in (
        "--url", "--model", "--endpoint", "--concurrency", "--rate", "--arrival", "--trace", "--requests", "--duration",
        "--prompt-tokens", "--output-tokens", "--shared-prefix", "--prefix-groups", "--ignore-eos", "--slo-ttft",
        "--slo-itl", "--seed", "--api-key", "--json", "--html",
    ):  # fmt: skip
        assert f"  {option} " in out


def test_the_command_in_a_report_holds_no_key() -> None:
    for given in (["--api-key", "s3cret"], ["--api-key=s3cret"]):
        shown = _command_line(["/bin/pdmesh", "bench", "--rate", "1", *given, "--label", "two words"])
        assert "s3cret" not in shown and shown.startswith("pdmesh bench --rate 1 --api-key")
        assert shown.endswith("--label 'two words'")


def test_two_files_are_compared(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, slower in zip(files, (1.0, 0.5), strict=True):
        file.write_bytes(to_json(report(file.stem, slower=slower)))
    page = tmp_path / "change.html"
    code, out, err = run(capsys, "compare", *map(str, files), "--html", str(page))
    assert (code, err) == (0, "") and "0.50 ×" in out
    assert "<h1>a against b</h1>" in page.read_text() and read_report(files[0]).label == "a"
    files[1].write_text(json.dumps({"format": "x"}))
    code, _, err = run(capsys, "compare", *map(str, files))
    assert code == 2 and "b.json is no result of pdmesh bench --json: " in err
