"""Ends of an engine: which are its own doing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from services.worker.engine_death import is_stopped, out_of_memory_kills, own_doing


@pytest.mark.parametrize(
    ("returncode", "out_of_memory", "own"),
    [
        (-signal.SIGSEGV, False, True),
        (-signal.SIGABRT, False, True),
        (-signal.SIGBUS, False, True),
        (-signal.SIGFPE, False, True),
        (-signal.SIGILL, False, True),
        (1, False, True),
        (70, False, True),
        (-signal.SIGKILL, True, True),
        (-signal.SIGKILL, False, False),
        (-signal.SIGTERM, True, False),
        (-signal.SIGINT, False, False),
        (-signal.SIGHUP, False, False),
        (0, False, False),
        (2, False, False),
        (3, False, False),
        (4, False, False),
        (None, True, False),
    ],
)
def test_own_doing(returncode: int | None, out_of_memory: bool, own: bool) -> None:
    assert own_doing(returncode, out_of_memory=out_of_memory) is own


def test_the_kernels_count_of_kills(tmp_path: Path) -> None:
    (tmp_path / "vmstat").write_text("nr_free_pages 7\noom_kill 12\noom_kill_extra 3\n")
    assert out_of_memory_kills(tmp_path / "vmstat") == 12
    (tmp_path / "old").write_text("nr_free_pages 7\n")
    assert out_of_memory_kills(tmp_path / "old") == 0
    assert out_of_memory_kills(tmp_path / "none") == 0
    assert out_of_memory_kills() >= 0


def test_a_stopped_process_is_seen() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert not is_stopped(process.pid)
        os.kill(process.pid, signal.SIGSTOP)
        deadline = time.monotonic() + 20
        while not is_stopped(process.pid):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        process.kill()
        process.communicate()
    assert not is_stopped(process.pid)
