"""No file outgrows what one sitting can read."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("engine_core", "models", "services", "tests", "benchmarks", "protos")
MAX_LINES = 600


def test_no_file_is_longer_than_the_budget() -> None:
    files = [
        path
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if (ROOT / "protos/gen") not in path.parents
    ]
    assert len(files) > 50
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_LINES} == {}
