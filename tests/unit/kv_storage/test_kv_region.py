"""The pool's memory: shared by handle, sealed, told apart by its nonce."""

from __future__ import annotations

import ctypes
import fcntl
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import torch

from engine_core.kv.storage import KvRegion, open_region
from engine_core.types.errors import InternalError


def mappings() -> int:
    """Pools that are mapped in this process."""
    return pathlib.Path("/proc/self/maps").read_text().count("pdmesh-kv")


def test_create_gives_zeroed_writable_memory() -> None:
    region = KvRegion.create(10_000)
    assert region.nbytes == len(region.buffer) == 10_000 and len(region.nonce) == 16
    assert bytes(region.buffer) == bytes(10_000)
    region.buffer[0] = 7
    assert ctypes.string_at(region.address, 1) == b"\x07"
    assert region.address % 64 == 0  # blocks keep the alignment that kernels like
    region.close()


@pytest.mark.parametrize("nbytes", [0, -1])
def test_create_refuses_sizes_below_one(nbytes: int) -> None:
    with pytest.raises(ValueError, match=str(nbytes)):
        KvRegion.create(nbytes)


def test_peer_sees_the_same_bytes_at_another_address() -> None:
    region = KvRegion.create(8192)
    peer = open_region(region.fd, region.nbytes, region.nonce)
    peer.buffer[8191] = 9
    assert region.buffer[8191] == 9 and peer.address != region.address
    peer.populate()
    peer.close()
    peer.close()
    with pytest.raises(InternalError, match="closed"):
        _ = peer.buffer
    region.close()


def test_open_refuses_wrong_nonce_size_and_unsealed_memory() -> None:
    region = KvRegion.create(4096)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(InternalError, match="nonce"):
        open_region(region.fd, 4096, bytes(16))
    with pytest.raises(InternalError, match="4096 bytes instead of 8192"):
        open_region(region.fd, 8192, region.nonce)
    loose = os.memfd_create("loose")
    os.ftruncate(loose, 8192)
    with pytest.raises(InternalError, match="sealed"):
        open_region(loose, 4096, region.nonce)
    os.close(loose)
    assert len(os.listdir("/proc/self/fd")) == before
    region.close()


def test_nobody_can_resize_it() -> None:
    region = KvRegion.create(4096)
    for size in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(region.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(region.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    region.close()


def test_tensor_outlives_close() -> None:
    region = KvRegion.create(4096)
    tensor = torch.frombuffer(region.buffer, dtype=torch.float32)
    tensor[0] = 1.5
    region.close()
    region.close()
    assert tensor[0].item() == 1.5 and tensor.numel() == 1024


def test_closing_frees_memory_and_handle() -> None:
    fds = len(os.listdir("/proc/self/fd"))
    region = KvRegion.create(1 << 20)
    before = mappings()
    region.close()
    del region
    assert mappings() == before - 1
    assert len(os.listdir("/proc/self/fd")) == fds


def test_slices_in_use_keep_a_peer_mapped() -> None:
    region = KvRegion.create(4096)
    peer = open_region(region.fd, 4096, region.nonce)
    part = np.frombuffer(peer.buffer, np.uint8)
    with pytest.raises(BufferError):
        peer.close()
    del part
    peer.close()
    region.close()


def test_children_inherit_neither_handle_nor_mapping() -> None:
    region = KvRegion.create(4096)
    script = "import os; print([os.readlink(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd') if int(n) > 2])"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, close_fds=False, check=False)
    assert "pdmesh-kv" not in out.stdout
    pid = os.fork()
    if pid == 0:  # MADV_DONTFORK: the child has no such mapping
        os._exit(mappings())
    assert os.waitpid(pid, 0)[1] == 0
    region.close()
