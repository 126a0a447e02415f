"""This machine: what pdmesh needs of it. examine() gathers facts, the checks judge them."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import importlib.util
import os
import resource
import shutil
import socket
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil
from packaging.requirements import Requirement

from engine_core.types.errors import ConfigError
from services.cli.doctor.findings import Finding, error, ok, warning
from services.cli.model_path import resolve
from services.config import QueryConfig
from services.runtime.security import Security
from services.runtime.token import OPTION as TOKEN_OPTION

_FILES_WANTED = 4096
_SOCKET_PATH = 107
"""Bytes of a unix socket's path."""
_LINK_NAME = 24
"""Of them, what a link socket's own name takes."""
_SMALL_SHM = 64 * 2**20
_STA_UNSYNC = 0x40
_PORTS = {8000: "router", 18800: "bootstrap"}

Check = Callable[[], Iterator[Finding]]


def examine(config: QueryConfig, model: str, socket_dir: str) -> list[Finding]:
    """All checks of this machine. One that fails in itself is a finding too."""
    checks: Sequence[tuple[str, Check]] = (
        ("packages", packages),
        ("kernels", kernels),
        ("memory", shared_memory),
        ("sockets", lambda: sockets(socket_dir)),
        ("limits", lambda: limits(resource.getrlimit(resource.RLIMIT_NOFILE)[0])),
        ("clock", lambda: clock(_kernel_clock())),
        ("ports", lambda: ports(_PORTS, _listens)),
        ("security", lambda: security(config)),
        ("model", lambda: model_files(model)),
        ("devices", lambda: devices(Path("/"))),
    )
    findings: list[Finding] = []
    for area, check in checks:
        try:
            findings += check()
        except Exception as exc:  # noqa: BLE001  # a check that can't look must not hide the others
            findings.append(warning(area, f"could not be examined: {type(exc).__name__}: {exc}", "look by hand"))
    return findings


def packages(
    requirements: Sequence[str] | None = None, version: Callable[[str], str] = importlib.metadata.version
) -> Iterator[Finding]:
    """Python and the packages that pdmesh asks for, by the versions that it asks for."""
    found = ".".join(map(str, sys.version_info[:3]))
    if requirements is None:
        requirements = importlib.metadata.requires("pdmesh") or ()
    wrong = 0
    for text in requirements:
        wanted = Requirement(text)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        try:
            there = version(wanted.name)
        except importlib.metadata.PackageNotFoundError:
            wrong += 1
            yield error("packages", f"{wanted.name} is not installed", f"pip install '{wanted}'")
            continue
        if not wanted.specifier.contains(there, prereleases=True):
            wrong += 1
            yield error(
                "packages", f"{wanted.name} is {there}; pdmesh needs {wanted.specifier}", f"pip install '{wanted}'"
            )
    if not wrong:
        yield ok("packages", f"Python {found}; all packages have the versions that pdmesh needs")
    yield from _device_pair(version)


def _device_pair(version: Callable[[str], str]) -> Iterator[Finding]:
    """torch_npu belongs to one version of torch."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        npu, torch = version("torch_npu"), version("torch")
        if npu.split("+")[0].rsplit(".post", 1)[0] != torch.split("+")[0]:
            yield error(
                "packages",
                f"torch_npu {npu} beside torch {torch}",
                f"install torch_npu of version {torch.split('+')[0]}",
            )


def kernels(
    which: Callable[[str], str | None] = shutil.which, cpuinfo: Path = Path("/proc/cpuinfo")
) -> Iterator[Finding]:
    """The CPU's kernels are compiled where they run."""
    compiler = next((name for name in ("c++", "g++", "clang++") if which(name)), None)
    if compiler is None:
        yield warning(
            "kernels", "there is no C++ compiler", "install g++: the CPU's kernels are compiled at the first start"
        )
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    if "avx512f" not in text:
        yield warning(
            "kernels", "the CPU has no AVX-512", "nothing has to be done; decoding on it is slower than documented"
        )
    elif compiler is not None:
        yield ok("kernels", f"{compiler} is there, and the CPU has AVX-512")


def shared_memory(shm: Path = Path("/dev/shm")) -> Iterator[Finding]:
    """KV pools are sealed memfds."""
    try:
        fd = os.memfd_create("pdmesh-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.close(fd)
    except OSError as exc:
        yield error(
            "memory",
            f"memfd_create fails: {exc.strerror}",
            "allow memfd_create (seccomp), or use --transfer-backend tcp",
        )
        return
    free = psutil.virtual_memory().available
    yield ok("memory", f"sealed memfds work; {free / 2**30:.1f} GiB of memory are available")
    if shm.is_dir():
        size = shutil.disk_usage(shm).total
        if size < _SMALL_SHM:
            yield warning("memory", f"{shm} has {size // 2**20} MiB", "give the container more (--shm-size, shm_size)")


def sockets(socket_dir: str) -> Iterator[Finding]:
    """Link sockets of the shm transport."""
    directory = Path(socket_dir or tempfile.gettempdir())
    room = _SOCKET_PATH - _LINK_NAME - len(os.fsencode(directory))
    if not directory.is_dir() or not os.access(directory, os.W_OK):
        yield error("sockets", f"{directory} is no directory that can be written", "choose another with --socket-dir")
    elif room < 0:
        yield error("sockets", f"{directory} is too long a path for unix sockets", "choose a shorter --socket-dir")
    else:
        yield ok("sockets", f"unix sockets can be made in {directory}")


def limits(files: int) -> Iterator[Finding]:
    """Every stream and every link is a file."""
    if 0 <= files < _FILES_WANTED:
        yield warning(
            "limits", f"{files} open files per process", f"raise it to {_FILES_WANTED} (ulimit -n, LimitNOFILE)"
        )
    else:
        yield ok("limits", f"{'unlimited' if files < 0 else files} open files per process")


class _Timex(ctypes.Structure):
    # struct timex of linux/timex.h; what is behind `status` is not read.
    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 512),
    )


def _kernel_clock() -> bool | None:
    """True when the kernel's clock is kept in step by NTP; None when the kernel doesn't say."""
    timex = _Timex()
    try:
        if ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex)) < 0:
            return None
    except (OSError, AttributeError):
        return None
    return not timex.status & _STA_UNSYNC


def clock(in_step: bool | None) -> Iterator[Finding]:  # noqa: FBT001
    """Incarnations and ages are ordered by clocks."""
    if in_step is None:
        yield warning("clock", "the kernel does not tell whether its clock is kept in step", "see to NTP by hand")
    elif in_step:
        yield ok("clock", "it is kept in step")
    else:
        yield warning(
            "clock", "it is not kept in step by NTP", "run chrony, ntpd or systemd-timesyncd on every machine"
        )


def _listens(port: int) -> str:
    """Who listens on a port of this machine; empty when it is free."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("0.0.0.0", port))
        except OSError:
            pass
        else:
            return ""
    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            local = connection.laddr
            if connection.status == psutil.CONN_LISTEN and local and local.port == port and connection.pid:
                return f"{psutil.Process(connection.pid).name()}, pid {connection.pid}"
    return "another process"


def ports(wanted: Mapping[int, str], listens: Callable[[int], str]) -> Iterator[Finding]:
    """The default ports: free, or taken by whom."""
    for port, service in wanted.items():
        if who := listens(port):
            yield ok(
                "ports", f"{port} ({service}) is taken by {who}: right if that is pdmesh, else choose another port"
            )
        else:
            yield ok("ports", f"{port} ({service}) is free")


def security(config: QueryConfig) -> Iterator[Finding]:
    """Token and certificates, as the services read them."""
    try:
        Security.of(config)
    except ConfigError as exc:
        yield error("security", exc.message, "put the file right; docs/security.md says what belongs into it")
        return
    secret = [Path(p) for p in (config.mesh_token_file, config.tls_key) if p]
    for path in secret:
        mode = path.stat().st_mode
        if mode & (stat.S_IROTH | stat.S_IWOTH):
            yield warning("security", f"{path} can be read by every user", f"chmod 600 {path}")
    if config.mesh_token_file or config.tls_cert:
        names = [n for n, given in (("mesh token", config.mesh_token_file), ("mTLS", config.tls_cert)) if given]
        yield ok("security", f"{' and '.join(names)} can be read and hold{'' if len(names) > 1 else 's'}")
    else:
        yield ok("security", f"none is given: right on one machine alone; beyond it use {TOKEN_OPTION} or --tls-cert")


def model_files(model: str) -> Iterator[Finding]:
    """The model's directory and its size against the memory there is."""
    if not model:
        return
    try:
        directory = resolve(model)
    except ConfigError as exc:
        yield error("model", exc.message, "name a directory with config.json and *.safetensors, a hub id, or demo")
        return
    weights = sorted(directory.glob("*.safetensors"))
    missing = [name for name in ("config.json", "tokenizer.json") if not (directory / name).is_file()]
    if missing or not weights:
        lacks = ", ".join([*missing, *([] if weights else ["*.safetensors"])])
        yield error("model", f"{directory} lacks {lacks}", "fetch the model again, whole")
        return
    size, free = sum(path.stat().st_size for path in weights), psutil.virtual_memory().available
    told = f"{directory.name}: {size / 2**30:.1f} GiB of weights"
    if size > free:
        yield error(
            "model", f"{told}, and {free / 2**30:.1f} GiB of memory available", "take a smaller model or machine"
        )
    else:
        yield ok("model", told)


def devices(root: Path) -> Iterator[Finding]:
    """Accelerators and RDMA ports, where there are any."""
    npus = sorted(path.name for path in (root / "dev").glob("davinci[0-9]*"))
    if npus:
        yield ok("devices", f"{len(npus)} Ascend NPUs: {', '.join(npus)}")
        if not (root / "dev/davinci_manager").exists():
            yield error(
                "devices", "/dev/davinci_manager is not there", "pass it into the container beside the davinciN devices"
            )
        if not (root / "etc/hccn.conf").is_file():
            yield error(
                "devices", "/etc/hccn.conf is not there", "mount it: without it HCCL finds no addresses for KV transfer"
            )
        if importlib.util.find_spec("torch_npu") is None:
            yield error("devices", "torch_npu is not installed", "pip install 'pdmesh[npu]'")
    gpus = sorted(path.name for path in (root / "dev").glob("nvidia[0-9]*"))
    if gpus:
        yield ok("devices", f"{len(gpus)} NVIDIA GPUs: {', '.join(gpus)}")
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        name = f"{port.parent.parent.name} port {port.name}"
        state = (port / "state").read_text().strip() if (port / "state").exists() else "unknown"
        if "ACTIVE" in state:
            yield ok("devices", f"RDMA {name} is {state}")
        else:
            yield warning("devices", f"RDMA {name} is {state}", "bring the link up, or leave the port out")
    if not npus and not gpus:
        yield ok("devices", "no accelerator: models run on the CPU")
