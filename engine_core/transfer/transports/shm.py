"""shm: prefill maps decode's pool and copies into it. Same host, one copy, no receiver at work.

Decode listens on a unix socket and passes its pool's memfd to whoever greets it rightly; prefill maps it
and compares the nonce in the header with the descriptor's: the proof that both see the same memory.

The link's socket stays open as long as the pool is mapped, and no longer: end-of-file on it tells decode
that nobody writes any more, also after kill -9 (the kernel drops a process's memory before its files).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import pathlib
import socket
import tempfile
from collections.abc import Sequence

from engine_core.transfer.native import batch_copy
from engine_core.transfer.outgoing import Greeting, Outgoing, close_fds
from engine_core.transfer.transport import (
    ConnectFailed,
    Dial,
    PoolRegion,
    PushJob,
    TransferFault,
    TransportContext,
    Writer,
    Written,
)
from engine_core.transfer.wire import FrameReader, Hello
from engine_core.types.errors import ConfigError, InternalError
from engine_core.types.kv import TransferDescriptor

log = logging.getLogger(__name__)

_MAX_PATH = 107  # sockaddr_un
_BACKLOG = 64
_PRIVATE = "pdmesh-kv-"


class ShmTransport:
    """Both ends of shm."""

    name = "shm"
    kinds: tuple[str, ...] = ("shm",)
    local_quiet = False

    def __init__(self, context: TransportContext) -> None:
        self._context = context
        self._path: pathlib.Path | None = None
        self._private: pathlib.Path | None = None
        batch_copy()  # compiled now, not at the first push

    def listen(self) -> tuple[socket.socket, TransferDescriptor]:
        """A unix socket in config.socket_dir, or in a fresh folder that only this user enters."""
        name = f"kv-{self._context.incarnation:x}.sock"
        folder = self._folder(len(name))
        path = folder / name
        if len(os.fsencode(path)) > _MAX_PATH:
            raise ConfigError(f"disagg.socket_dir is too long for a unix socket: {path} has over {_MAX_PATH} bytes")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # Under its final name only once it listens: what refuses connections there is a dead process's.
            hidden = folder / f".{name[3:]}"
            sock.bind(str(hidden))
            sock.listen(_BACKLOG)
            sock.setblocking(False)
            hidden.rename(path)
        except OSError as exc:
            sock.close()
            raise ConfigError(f"no unix socket at {path}: {exc.strerror or exc}") from exc
        self._path = path
        return sock, TransferDescriptor("shm", str(path), self._context.region.nonce)

    def refusal(self, hello: Hello) -> str:
        """Nothing to add: who can open the socket may have the pool, and the writer checks the nonce."""
        return ""

    def passed_fds(self) -> Sequence[int]:
        """The pool."""
        return (self._context.region.fd,)

    def accepted(self, sock: socket.socket) -> None:
        """Nothing to set."""

    def connect(self, dial: Dial) -> Writer:
        """Maps the peer's pool."""
        greeting = Greeting(self._context, dial, self.name, take_fds=True)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        region: PoolRegion | None = None
        try:
            sock.setblocking(False)
            try:
                sock.connect(dial.descriptor.address)
            except OSError as exc:
                why = f"unix socket {dial.descriptor.address} not reachable ({exc.strerror or exc})"
                raise ConnectFailed(f"shm: {why}") from exc
            reader, welcome = greeting.hello(sock)
            try:
                if len(reader.fds) != 1:
                    raise ConnectFailed(f"shm: {len(reader.fds)} descriptors were passed instead of the pool's")
                region = self._context.region.open_peer(reader.fds[0], welcome.region_bytes, dial.descriptor.nonce)
            except (OSError, InternalError) as exc:
                raise ConnectFailed(f"shm: {exc}") from exc
            finally:
                close_fds(reader)
            reason = "shm: nonce read back through the shared region"
            greeting.ready(sock, reason)
        except BaseException:
            if region is not None:
                region.close()
            sock.close()
            raise
        region.populate()
        return ShmWriter(sock, reader, reason, region, Outgoing(sock, dial))

    def close(self) -> None:
        """Removes the socket from the file system."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        if self._private is not None:
            try:
                self._private.rmdir()
            except OSError as exc:
                log.warning("%s is left behind: %s", self._private, exc.strerror)
        self._path = self._private = None

    def _folder(self, name_bytes: int) -> pathlib.Path:
        if self._context.config.socket_dir:
            folder = pathlib.Path(self._context.config.socket_dir)
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as exc:
                raise ConfigError(f"disagg.socket_dir {folder} can't be made: {exc.strerror}") from exc
            _sweep(folder)
            return folder
        made = pathlib.Path(tempfile.mkdtemp(prefix=_PRIVATE))  # 0700
        if len(os.fsencode(made)) + 1 + name_bytes > _MAX_PATH:
            made.rmdir()
            made = pathlib.Path(tempfile.mkdtemp(prefix=_PRIVATE, dir="/tmp"))
        self._private = made
        for old in made.parent.glob(f"{_PRIVATE}*"):
            # Only a folder that held a dead process's socket: an empty one may be about to get its own.
            with contextlib.suppress(OSError):  # another process may be sweeping too
                if old.lstat().st_uid == os.getuid() and _sweep(old):
                    old.rmdir()
        return made


class ShmWriter:
    """One native copy per push, into the mapped pool."""

    local_quiet = False
    awaits_count = False

    def __init__(
        self, sock: socket.socket, reader: FrameReader, reason: str, region: PoolRegion, outgoing: Outgoing
    ) -> None:
        self.sock, self.reader, self.reason = sock, reader, reason
        self._region: PoolRegion | None = region
        self._outgoing = outgoing
        self._copy = batch_copy()

    def write(self, job: PushJob) -> Written:
        """Copies; stops within about a millisecond of the cancel."""
        if self._region is None:
            raise TransferFault("the peer's pool is no longer mapped")
        destination = (self._region.address, self._region.nbytes)
        copied = self._copy(destination, (job.source.address, job.source.nbytes), job.ops, job.cancel.flag)
        if copied < job.ops.total_bytes and not job.cancel.is_set():
            raise TransferFault(f"the copy ended after {copied} of {job.ops.total_bytes} bytes")
        return Written(copied, copied)

    def send(self, frame: bytes) -> None:
        """A control message."""
        self._outgoing.send([memoryview(frame)])

    def release(self) -> None:
        """Unmaps the pool."""
        if self._region is not None:
            self._region.close()
        self._region = None


def _sweep(folder: pathlib.Path) -> int:
    """Removes sockets that dead processes left in the folder; how many."""
    removed = 0
    for path in folder.glob("kv-*.sock"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            if probe.connect_ex(str(path)) == errno.ECONNREFUSED:
                path.unlink(missing_ok=True)
                removed += 1
    return removed
