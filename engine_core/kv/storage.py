"""The memory of a KV pool: a sealed memfd that peers on this host can map.

    page 0     header: magic, nonce, payload size      never part of an address, an offset or a buffer
    page 1 …   payload: the blocks, as the KvLayout has them (offset 0 is the payload's first byte)

The memfd has no name and dies with its last holder, so that kill -9 leaves nothing behind. Sealed
against shrinking and growing, it cannot turn a peer's access into SIGBUS. The nonce, read back by a
peer through its own mapping, proves that both ends see the same memory.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import secrets
import struct

from engine_core.types.errors import InternalError

NONCE_BYTES = 16

_PAGE = mmap.PAGESIZE
_MAGIC = b"PDMESHKV"
_HEADER = struct.Struct(f"<8s{NONCE_BYTES}sQ")
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python names it from 3.13 on


class KvRegion:
    """A mapped pool: this process's own, or (open_region) a peer's.

    fd        the memfd, CLOEXEC; what is passed to a peer by SCM_RIGHTS
    nbytes    payload bytes
    address   where the payload starts in this process; means nothing in another
    buffer    the payload as a writable memoryview of bytes, for torch.frombuffer
    nonce     16 bytes that name this pool

    The mapping is shared, not inherited over fork, and lasts until `close`; an own pool's memory lasts
    as long as anything made from `buffer` does, so that a forgotten tensor never dangles.
    """

    def __init__(self, fd: int, mapping: mmap.mmap, nbytes: int, nonce: bytes, *, own: bool) -> None:
        self._fd, self._mapping, self._own = fd, mapping, own
        self._nbytes, self._nonce = nbytes, nonce
        self._view = memoryview(mapping)
        self._buffer: memoryview | None = self._view[_PAGE : _PAGE + nbytes]
        base = ctypes.c_char.from_buffer(mapping)
        self._address = ctypes.addressof(base) + _PAGE

    @classmethod
    def create(cls, nbytes: int) -> KvRegion:
        """Makes a pool of nbytes, all pages touched. Raises ValueError on nbytes < 1, OSError without memory."""
        if nbytes < 1:
            raise ValueError(f"a KV pool of {nbytes} bytes was asked for")
        fd = os.memfd_create("pdmesh-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, _PAGE + nbytes)  # no memory: an error here instead of SIGBUS later
            nonce = secrets.token_bytes(NONCE_BYTES)
            os.pwrite(fd, _HEADER.pack(_MAGIC, nonce, nbytes), 0)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            mapping = mmap.mmap(fd, _PAGE + nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            mapping.madvise(mmap.MADV_DONTFORK)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, mapping, nbytes, nonce, own=True)

    @staticmethod
    def open_peer(fd: int, nbytes: int, nonce: bytes) -> KvRegion:
        """See open_region."""
        return open_region(fd, nbytes, nonce)

    @property
    def fd(self) -> int:
        """The memfd."""
        return self._fd

    @property
    def nbytes(self) -> int:
        """Payload bytes."""
        return self._nbytes

    @property
    def nonce(self) -> bytes:
        """Names this pool."""
        return self._nonce

    @property
    def address(self) -> int:
        """Address of the payload in this process. Raises InternalError once closed."""
        if self._buffer is None:
            raise InternalError("the KV pool is closed")
        return self._address

    @property
    def buffer(self) -> memoryview:
        """The payload. Raises InternalError once closed."""
        if self._buffer is None:
            raise InternalError("the KV pool is closed")
        return self._buffer

    def populate(self) -> None:
        """Maps every page now, so that the first copy takes no faults. Best effort."""
        try:
            self._mapping.madvise(_MADV_POPULATE_WRITE)
        except (OSError, ValueError):
            return

    def close(self) -> None:
        """Lets go of the pool; a peer's is unmapped when this returns. Idempotent.

        Raises BufferError for a peer's pool while a slice of its buffer is still in use.
        """
        if self._buffer is None:
            return
        if not self._own:
            self._buffer.release()
            self._view.release()
            self._mapping.close()
        self._buffer = None
        os.close(self._fd)
        del self._view, self._mapping


def open_region(fd: int, nbytes: int, nonce: bytes) -> KvRegion:
    """Maps a peer's pool and compares the nonce in its header. Owns a duplicate of fd, never fd itself.

    Raises InternalError when the memory is not sealed, has another size, or carries another nonce.
    """
    size = os.fstat(fd).st_size
    if size != _PAGE + nbytes:
        raise InternalError(f"the pool that was passed has {size - _PAGE} bytes instead of {nbytes}")
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise InternalError("the pool that was passed is not sealed against being resized")
    own_fd = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0)
    try:
        mapping = mmap.mmap(own_fd, size, flags=mmap.MAP_SHARED)
        mapping.madvise(mmap.MADV_DONTFORK)
    except BaseException:
        os.close(own_fd)
        raise
    magic, found, found_bytes = _HEADER.unpack_from(mapping, 0)
    if (magic, found, found_bytes) != (_MAGIC, nonce, nbytes):
        mapping.close()
        os.close(own_fd)
        raise InternalError("the pool that was passed does not carry the expected nonce")
    return KvRegion(own_fd, mapping, nbytes, nonce, own=False)
