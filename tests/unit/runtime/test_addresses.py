"""What a process tells its peers to dial."""

from __future__ import annotations

import pytest

from engine_core.types.request import Role
from services.config import BootstrapConfig, RouterConfig, WorkerConfig
from services.runtime import addresses
from services.runtime.addresses import bracketed, dialable, is_loopback, own_address
from services.worker.engine_config import inference_config
from services.worker.life import _default_name


def worker(**values: object) -> WorkerConfig:
    return WorkerConfig(role=Role.DECODE, model="/models/m", **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("host", "advertised", "dialled"),
    [
        ("127.0.0.1", "", "127.0.0.1"),
        ("decode.internal", "", "decode.internal"),
        ("::1", "", "[::1]"),
        ("0.0.0.0", "10.1.2.3", "10.1.2.3"),
        ("::", "fd00::7", "[fd00::7]"),
        ("[::]", "[fd00::7]", "[fd00::7]"),
        ("10.0.0.5", "worker-5.example.net", "worker-5.example.net"),
    ],
)
def test_what_peers_dial(host: str, advertised: str, dialled: str) -> None:
    assert dialable(host, advertised) == dialled


@pytest.mark.parametrize("wildcard", ["0.0.0.0", "::", "[::]", ""])
def test_a_wildcard_is_never_told(wildcard: str) -> None:
    assert dialable(wildcard) == bracketed(own_address())
    assert own_address() not in addresses.WILDCARDS


def test_a_name_that_means_loopback_is_not_told_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    # Debian writes the machine's name into /etc/hosts as 127.0.1.1.
    monkeypatch.setattr(addresses.socket, "gethostbyname", lambda name: "127.0.1.1")
    found = own_address()
    assert found != "127.0.1.1"
    assert found == "127.0.0.1" or not is_loopback(found)
    monkeypatch.setattr(addresses.socket, "gethostbyname", lambda name: "10.9.8.7")
    assert own_address() == "10.9.8.7"


def test_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.0.1.1", "::1", "[::1]", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "10.0.0.1", "::", "worker-1", "")))


def test_kv_is_sent_to_the_address_that_is_advertised() -> None:
    def tcp_host(**values: object) -> str:
        host = inference_config(worker(**values), "/run/pdmesh")["disagg"]["tcp_host"]
        assert isinstance(host, str)
        return host

    assert tcp_host() == "127.0.0.1"
    assert tcp_host(host="0.0.0.0", advertise_host="10.1.2.3") == "10.1.2.3"
    assert tcp_host(host="::", advertise_host="[fd00::7]") == "fd00::7"
    assert tcp_host(host="0.0.0.0", advertise_host="10.1.2.3", transfer_host="192.168.7.3") == "192.168.7.3"


def test_two_hosts_have_two_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "node-7")
    assert _default_name(worker(), 8100) == "decode-8100"
    assert _default_name(worker(host="0.0.0.0"), 8100) == "decode-node-7-8100"
    assert _default_name(worker(host="0.0.0.0", advertise_host="127.0.0.1"), 8100) == "decode-8100"


def test_who_advertises() -> None:
    assert "advertise_host" in WorkerConfig.model_fields and "advertise_host" in RouterConfig.model_fields
    assert "advertise_host" not in BootstrapConfig.model_fields, "it is dialled as its callers are told, never found"
