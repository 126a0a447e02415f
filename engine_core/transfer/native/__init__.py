"""The batched copy: C when the host has a compiler, ctypes.memmove otherwise.

The C file is compiled once per host and source into a cache folder. Both run without the interpreter's
lock, check every piece before they write one, and stop between pieces when the flag is set.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable

import numpy as np

from engine_core.transfer.copy_plan import CopyOps

log = logging.getLogger(__name__)

Span = tuple[int, int]
"""(address, bytes) of a region mapped in this process."""

BatchCopy = Callable[[Span, Span, CopyOps, "ctypes.c_int32"], int]
"""(destination, source, ops, cancel flag) -> bytes copied; raises ValueError for a piece outside a region."""

_SOURCE = pathlib.Path(__file__).with_name("copy.c")
_FLAGS = ("-O3", "-shared", "-fPIC", "-std=c11")
_COMPILE_SECONDS = 60


@functools.cache
def batch_copy() -> BatchCopy:
    """The best copy there is here. The first call may take the compiler's time."""
    try:
        return _native(_library())
    except (OSError, subprocess.SubprocessError) as exc:
        log.warning("KV is copied piece by piece from Python: the native copy can't be built (%s)", exc)
        return copy_in_python


def copy_in_python(dst: Span, src: Span, ops: CopyOps, cancel: ctypes.c_int32) -> int:
    """The same contract without a compiler."""
    _check(dst, src, ops)
    copied = 0
    for s, d, n in zip(ops.src_offset.tolist(), ops.dst_offset.tolist(), ops.nbytes.tolist(), strict=True):
        if cancel.value:
            break
        ctypes.memmove(dst[0] + d, src[0] + s, n)
        copied += n
    return copied


def _check(dst: Span, src: Span, ops: CopyOps) -> None:
    bad = (ops.nbytes < 0) | (ops.dst_offset < 0) | (ops.src_offset < 0)
    bad |= (ops.dst_offset > dst[1] - ops.nbytes) | (ops.src_offset > src[1] - ops.nbytes)
    if bad.any():
        raise _outside(int(np.flatnonzero(bad)[0]), ops)


def _outside(i: int, ops: CopyOps) -> ValueError:
    return ValueError(
        f"piece {i} of {len(ops.nbytes)} lies outside a region: {int(ops.nbytes[i])} bytes "
        f"from {int(ops.src_offset[i])} to {int(ops.dst_offset[i])}"
    )


def _native(path: pathlib.Path) -> BatchCopy:
    function = ctypes.CDLL(str(path)).pdmesh_copy  # CDLL, not PyDLL: calls release the interpreter's lock
    i64, ptr = ctypes.c_int64, ctypes.c_void_p
    function.argtypes = (ptr, i64, ptr, i64, ptr, ptr, ptr, i64, ptr)
    function.restype = i64

    def copy(dst: Span, src: Span, ops: CopyOps, cancel: ctypes.c_int32) -> int:
        columns = [np.ascontiguousarray(c, dtype=np.int64) for c in (ops.dst_offset, ops.src_offset, ops.nbytes)]
        copied = int(function(*dst, *src, *(c.ctypes.data for c in columns), len(columns[0]), ctypes.addressof(cancel)))
        if copied < 0:
            raise _outside(-1 - copied, ops)
        return copied

    return copy


def _library() -> pathlib.Path:
    """Path of the compiled library, compiled if need be. Raises OSError or SubprocessError."""
    digest = hashlib.sha256(_SOURCE.read_bytes() + " ".join((*_FLAGS, os.uname().machine)).encode()).hexdigest()[:16]
    folder = _cache_folder()
    path = folder / f"copy-{digest}.so"
    if path.exists():
        return path
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise OSError("there is no C compiler")
    handle, building = tempfile.mkstemp(suffix=".so", dir=folder)
    os.close(handle)
    try:
        command = [compiler, *_FLAGS, "-o", building, str(_SOURCE)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_SECONDS, check=False)
        if done.returncode:
            raise OSError(f"{compiler} failed: {done.stderr.strip()[:500]}")
        os.replace(building, path)  # whoever compiles at the same time makes the same file
    finally:
        pathlib.Path(building).unlink(missing_ok=True)
    return path


def _cache_folder() -> pathlib.Path:
    """A folder that only this user writes: what lies in it is loaded as code."""
    temporary = pathlib.Path(tempfile.gettempdir()) / f"pdmesh-{os.getuid()}"
    for folder in (pathlib.Path(os.path.expanduser("~"), ".cache", "pdmesh"), temporary):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = folder.lstat()
        except OSError:
            continue
        private = found.st_uid == os.getuid() and not found.st_mode & 0o022 and not folder.is_symlink()
        if folder.is_absolute() and private and os.access(folder, os.W_OK):
            return folder
    raise OSError("no private cache folder can be written")
