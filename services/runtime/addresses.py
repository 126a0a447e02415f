"""What peers dial: the address that a process gives for itself, from the one that it listens on."""

from __future__ import annotations

import ipaddress
import socket

WILDCARDS = frozenset({"0.0.0.0", "::", "[::]", ""})
"""Hosts that mean every address of this machine."""
_LOOPBACK = "127.0.0.1"
_FAR_AWAY = ("192.0.2.1", 9)
"""An address that stands for any other machine (RFC 5737); nothing is ever sent there."""


def dialable(host: str, advertised: str = "") -> str:
    """The host, IPv6 in brackets, under which peers reach what listens on `host`: `advertised` when it is given,
    `host` itself, or for a wildcard this machine's own address."""
    return bracketed(advertised or (own_address() if host in WILDCARDS else host))


def bracketed(host: str) -> str:
    """The host as it stands before ":port": IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def own_address() -> str:
    """An address of this machine that others may reach: the one of its name, unless that is a loopback one; then that
    from which it would speak to others; 127.0.0.1 when it has none."""
    try:
        named = socket.gethostbyname(socket.gethostname())
    except OSError:
        named = _LOOPBACK
    if not is_loopback(named):
        return named
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.connect(_FAR_AWAY)  # of a datagram socket: chooses a route, sends nothing
            return str(sock.getsockname()[0])
    except OSError:
        return _LOOPBACK


def is_loopback(host: str) -> bool:
    """True for addresses that mean this machine alone; a name is one only as "localhost"."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
