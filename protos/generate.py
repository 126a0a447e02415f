"""Regenerates protos/gen from protos/pdmesh; with --check, fails when they differ.

buf has no plug-in for gRPC Python here, so grpc_tools does it.
"""

from __future__ import annotations

import argparse
import filecmp
import shutil
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).parent


def generate(out: Path) -> None:
    """Writes the generated package `pdmesh` below `out`."""
    import grpc_tools

    sources = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "pdmesh").rglob("*.proto"))
    include = Path(grpc_tools.__file__).parent / "_proto"
    code = protoc.main(
        ["protoc", f"-I{ROOT}", f"-I{include}", f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}"]
        + [str(ROOT / s) for s in sources]
    )
    if code:
        raise SystemExit(f"protoc failed with exit code {code}")
    for folder in [out / "pdmesh", *[p for p in (out / "pdmesh").rglob("*") if p.is_dir()]]:
        (folder / "__init__.py").write_text("")


def differences(left: Path, right: Path) -> list[str]:
    """Relative paths that differ between two trees; empty when they are equal."""
    names = {
        str(p.relative_to(base)) for base in (left, right) for p in base.rglob("*.py*") if "__pycache__" not in p.parts
    }
    return sorted(
        n
        for n in names
        if not ((left / n).is_file() and (right / n).is_file() and filecmp.cmp(left / n, right / n, shallow=False))
    )


def main() -> int:
    """Entry point of `make protos` and of the freshness check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing, fail when generated code is stale")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as tmp:
        fresh = Path(tmp)
        generate(fresh)
        stale = differences(fresh, ROOT / "gen")
        if args.check:
            for name in stale:
                print(f"stale: protos/gen/{name} (run `make protos`)", file=sys.stderr)
            return 1 if stale else 0
        shutil.rmtree(ROOT / "gen", ignore_errors=True)
        shutil.copytree(fresh, ROOT / "gen")
    return 0


if __name__ == "__main__":
    sys.exit(main())
