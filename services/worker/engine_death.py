"""Whether an engine ended by its own doing, or was ended from outside.

Only the first speaks against the requests of the step that was executing. Its own doing: a fault signal, an
exception, an exit that nobody asked for, the kernel's out-of-memory killer, and a step that never ended. From
outside: any other signal, and a process that stood still because somebody had stopped it.
"""

from __future__ import annotations

import signal
from pathlib import Path

_FAULTS = frozenset(
    -number
    for number in (
        signal.SIGSEGV,
        signal.SIGABRT,
        signal.SIGBUS,
        signal.SIGFPE,
        signal.SIGILL,
        signal.SIGTRAP,
        signal.SIGSYS,
    )
)
_ASKED_FOR = frozenset({0, 2, 3, 4})
"""Exit codes of engine_core/host: its service process is gone, it could not start, too much was quarantined, or
the frames between the two broke."""


def own_doing(returncode: int | None, *, out_of_memory: bool) -> bool:
    """True for an end that the engine's work brought about; None, not ended yet, is none."""
    if returncode is None:
        return False
    if returncode == -signal.SIGKILL:
        return out_of_memory
    return returncode in _FAULTS if returncode < 0 else returncode not in _ASKED_FOR


def out_of_memory_kills(vmstat: Path = Path("/proc/vmstat")) -> int:
    """Processes that this kernel has killed for want of memory; 0 where it does not say."""
    try:
        lines = vmstat.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def is_stopped(pid: int, proc: Path = Path("/proc")) -> bool:
    """True while a process stands still by a signal or under a debugger."""
    try:
        stat = (proc / str(pid) / "stat").read_text()
    except OSError:
        return False
    return stat.rpartition(") ")[2][:1] in ("T", "t")
