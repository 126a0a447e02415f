"""The service processes run without torch: importing any of their modules brings in none of it."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import services

ROOT = Path(__file__).resolve().parents[2]

PACKAGES = ("router", "bootstrap", "worker", "prefill", "decode", "cli", "wire", "runtime", "bench")

PROBE = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    if "torch" in sys.modules:
        sys.exit(f"{name} imports torch")
print(len(sys.argv) - 1)
"""


def modules_of(package: str) -> list[str]:
    """The package and every module below it, but for what only `python -m` runs."""
    folder = Path(services.__file__).parent / package
    walked = pkgutil.walk_packages([str(folder)], f"services.{package}.")
    return [f"services.{package}", *(m.name for m in walked if not m.name.endswith("__main__"))]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_service_package_imports_no_torch(package: str) -> None:
    names = modules_of(package)
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *names], cwd=ROOT, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(len(names))


def test_the_vocabulary_that_services_share_with_the_engine_imports_no_torch() -> None:
    names = ["services.config", "engine_core.config", "engine_core.plugins", "engine_core.host.frames"]
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *names], cwd=ROOT, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr


def test_no_package_of_services_is_forgotten() -> None:
    found = {m.name for m in pkgutil.iter_modules([str(Path(services.__file__).parent)]) if m.ispkg}
    assert found == set(PACKAGES)
