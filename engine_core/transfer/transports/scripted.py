"""scripted: shm or tcp with a will of its own, for tests of what goes wrong.

DisaggConfig.script is JSON: a list of rules, or {"transport": "auto" | "shm" | "tcp", "rules": [...]}.
For each push the first rule that fits acts; without one the push is what it would be. A rule:

    action   delay              wait `seconds`, then push
             fail               the push fails before its first byte
             short              writes half, and says so: PushDone.bytes is the true, lower count
             short_silent       writes half, and claims all
             corrupt            one byte in each piece arrives flipped; checksums are the source's
             lose               neither ends nor writes until it is cancelled
             hold_until_file    makes the file `path`.held, waits for the file `path` to appear, then pushes
    push     acts on the push with this number (from 1, over all links); absent: on any
    session  acts on the session with this number (in order of first push, from 1); absent: on any
    when     acts only while this file exists; absent: always
    stubborn with hold_until_file: a cancel neither ends the hold nor the push, as of a writer that was stopped
"""

from __future__ import annotations

import dataclasses
import pathlib
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
import numpy as np

from engine_core.plugins import TRANSPORTS, load
from engine_core.transfer.copy_plan import CopyOps
from engine_core.transfer.transport import (
    Cancel,
    Dial,
    Interrupt,
    PushJob,
    Source,
    TransferFault,
    Transport,
    TransportContext,
    Writer,
    Written,
)
from engine_core.transfer.wire import FrameReader, Hello
from engine_core.types.errors import ConfigError, InternalError
from engine_core.types.ids import SessionId
from engine_core.types.kv import TransferDescriptor

Action = Literal["delay", "fail", "short", "short_silent", "corrupt", "lose", "hold_until_file"]

_POLL_SECONDS = 0.01
_FOREVER = 86400.0
_STUBBORN_SECONDS = 60.0
"""A forgotten hold ends, so that its process can."""


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """See the module."""

    action: Action
    push: int | None = None
    session: int | None = None
    seconds: float = 0.0
    path: str = ""
    when: str = ""
    stubborn: bool = False


class Script(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rules, and what they act upon."""

    rules: tuple[Rule, ...] = ()
    transport: Literal["auto", "shm", "tcp"] = "auto"


def parse_script(text: str) -> Script:
    """Reads a script; empty text is one without rules. Raises ConfigError."""
    if not text.strip():
        return Script()
    try:
        data = msgspec.json.decode(text)
        return msgspec.convert({"rules": data} if isinstance(data, list) else data, Script)
    except msgspec.DecodeError as exc:
        raise ConfigError(f"disagg.script: {exc}") from exc


class ScriptedTransport:
    """The connecting end; the accepting end is that of what it wraps."""

    name = "scripted"
    local_quiet = False

    def __init__(self, context: TransportContext) -> None:
        self._script = parse_script(context.config.script)
        self.kinds: tuple[str, ...] = ("shm", "tcp") if self._script.transport == "auto" else (self._script.transport,)
        self._inner: Mapping[str, Transport] = {
            kind: load(TRANSPORTS, "transport", kind)(context) for kind in self.kinds
        }
        self._progress = _Progress(self._script.rules)

    def listen(self) -> tuple[socket.socket, TransferDescriptor]:
        """Never: links are accepted by the transports it wraps."""
        raise InternalError("the scripted transport accepts no links of its own")

    def refusal(self, hello: Hello) -> str:
        """See listen."""
        return "scripted links are accepted as what they wrap"

    def passed_fds(self) -> Sequence[int]:
        """None."""
        return ()

    def accepted(self, sock: socket.socket) -> None:
        """See listen."""

    def connect(self, dial: Dial) -> Writer:
        """By the transport that the descriptor is for."""
        return ScriptedWriter(self._inner[dial.descriptor.transport].connect(dial), self._progress)

    def close(self) -> None:
        """Closes what it wraps."""
        for transport in self._inner.values():
            transport.close()


class ScriptedWriter:
    """Passes pushes on, or does to them what the script says."""

    def __init__(self, inner: Writer, progress: _Progress) -> None:
        self._inner, self._progress = inner, progress
        self.sock: socket.socket = inner.sock
        self.reader: FrameReader = inner.reader
        self.reason = f"scripted over {inner.reason}"
        self.local_quiet, self.awaits_count = inner.local_quiet, inner.awaits_count

    def write(self, job: PushJob) -> Written:
        """As the first rule that fits says."""
        rule = self._progress.next_rule(job.session)
        if rule is None:
            return self._inner.write(job)
        if rule.action == "fail":
            raise TransferFault("the script lets it fail")
        if rule.action in ("delay", "lose"):
            cancelled = job.cancel.wait(rule.seconds if rule.action == "delay" else _FOREVER)
            return Written(0, 0) if cancelled else self._inner.write(job)
        if rule.action == "hold_until_file":
            return self._hold(job, pathlib.Path(rule.path), stubborn=rule.stubborn)
        if rule.action == "corrupt":
            return self._inner.write(_corrupted(job))
        written = self._inner.write(dataclasses.replace(job, ops=_half(job.ops)))
        return written if rule.action == "short" else Written(written.nbytes, job.ops.total_bytes)

    def send(self, frame: bytes) -> None:
        """Control messages are never tampered with."""
        self._inner.send(frame)

    def release(self) -> None:
        """As what it wraps."""
        self._inner.release()

    def _hold(self, job: PushJob, path: pathlib.Path, *, stubborn: bool) -> Written:
        path.with_name(f"{path.name}.held").touch()
        if not stubborn:
            while not path.exists():
                if job.cancel.wait(_POLL_SECONDS):
                    return Written(0, 0)
            return self._inner.write(job)
        give_up = time.monotonic() + _STUBBORN_SECONDS
        while not path.exists() and time.monotonic() < give_up:
            time.sleep(_POLL_SECONDS)
        deaf = Interrupt()
        try:
            return self._inner.write(dataclasses.replace(job, cancel=Cancel(deaf)))
        finally:
            deaf.close()


class _Progress:
    """Counts pushes and sessions over all links of a process."""

    def __init__(self, rules: tuple[Rule, ...]) -> None:
        self._rules = rules
        self._lock = threading.Lock()
        self._pushes = 0
        self._sessions: dict[SessionId, int] = {}

    def next_rule(self, session: SessionId) -> Rule | None:
        with self._lock:
            self._pushes += 1
            number = self._sessions.setdefault(session, len(self._sessions) + 1)
            return next((rule for rule in self._rules if self._fits(rule, number)), None)

    def _fits(self, rule: Rule, session: int) -> bool:
        if rule.when and not pathlib.Path(rule.when).exists():
            return False
        return rule.push in (None, self._pushes) and rule.session in (None, session)


def _half(ops: CopyOps) -> CopyOps:
    """The first half of the bytes, rounded down."""
    before = np.cumsum(ops.nbytes) - ops.nbytes
    sizes = np.clip(ops.total_bytes // 2 - before, 0, ops.nbytes)
    kept = sizes > 0
    return CopyOps(ops.src_offset[kept], ops.dst_offset[kept], sizes[kept])


def _corrupted(job: PushJob) -> PushJob:
    """The same push out of a private copy of its bytes, in which the middle byte of each piece is flipped."""
    starts = np.cumsum(job.ops.nbytes) - job.ops.nbytes
    scratch = np.empty(job.ops.total_bytes, np.uint8)
    pool = np.frombuffer(job.source.buffer, np.uint8)
    for to, start, n in zip(starts.tolist(), job.ops.src_offset.tolist(), job.ops.nbytes.tolist(), strict=True):
        scratch[to : to + n] = pool[start : start + n]
        scratch[to + n // 2] ^= 0xFF
    source = Source(int(scratch.ctypes.data), scratch.nbytes, scratch.data.cast("B"))
    return dataclasses.replace(job, source=source, ops=CopyOps(starts, job.ops.dst_offset, job.ops.nbytes))
