"""Compiles the native kernels where they run, once per source, compiler flags and kind of CPU.

The library lands in a cache folder under a name that says all of these, in one rename, so that engine
processes that start together need no lock. Without a compiler the callers fall back to torch.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

_SOURCES = Path(__file__).parent / "native"
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-std=c++17", "-shared",
          "-fPIC", "-w")  # fmt: skip
_TIMEOUT = 300.0
_log = logging.getLogger(__name__)


class NativeUnavailable(Exception):
    """The kernels can't be had here; the message is the reason."""


@functools.cache
def load_kernels() -> ctypes.CDLL:
    """Returns the loaded kernels, compiled first where they are not in the cache yet.

    Calls release the GIL. Raises NativeUnavailable with the reason; blocks while it compiles.
    """
    import torch  # noqa: F401  its OpenMP runtime must be the one that the kernels find

    library = _library()
    try:
        return ctypes.CDLL(str(library))
    except OSError as exc:
        raise NativeUnavailable(f"{library} can't be loaded: {exc}") from exc


def _library() -> Path:
    sources = sorted(_SOURCES.glob("*.cpp"))
    key = hashlib.sha256()
    for path in sorted(_SOURCES.iterdir()):
        if path.suffix in (".cpp", ".h"):
            key.update(path.read_bytes())
    key.update(repr((_FLAGS, platform.machine(), _cpu_flags())).encode())
    name = f"kernels-{key.hexdigest()[:24]}.so"
    reason = ""
    for folder in _cache_folders():
        target = folder / name
        if target.is_file():
            return target
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _compile(sources, target)
            return target
        except OSError as exc:
            reason = str(exc)
    raise NativeUnavailable(f"no folder to put the kernels in: {reason}")


def _cache_folders() -> tuple[Path, ...]:
    return Path.home() / ".cache" / "pdmesh" / "native", Path(tempfile.gettempdir()) / "pdmesh-native"


def _compile(sources: list[Path], target: Path) -> None:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise NativeUnavailable("there is no C++ compiler (c++, g++ or clang++)")
    with tempfile.TemporaryDirectory(prefix=".build-", dir=target.parent) as work:
        out = Path(work) / target.name
        command = [compiler, *_FLAGS, "-o", str(out), *map(str, sources)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
        except subprocess.TimeoutExpired as exc:
            raise NativeUnavailable(f"{compiler} did not end within {_TIMEOUT:.0f} s") from exc
        if done.returncode != 0:
            errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
            raise NativeUnavailable(f"{compiler} failed: {errors[0] if errors else done.returncode}")
        out.replace(target)
    _log.info("compiled native kernels into %s", target)


def _cpu_flags() -> str:
    """What distinguishes this CPU's instructions: a home folder may be shared by unlike machines."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor()
    return next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), "")
