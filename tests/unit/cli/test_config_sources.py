"""File, then environment, then flags; errors in one line that names the field and the nearest known one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine_core.types.errors import ConfigError
from engine_core.types.request import Role
from services.config import (
    BootstrapConfig,
    PlacementPolicy,
    RouterConfig,
    ServeConfig,
    WorkerConfig,
    cache_dir,
    child_environment,
    engine_environment,
    load,
    serve_options,
)


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "mesh.yaml"
    file.write_text(text)
    return file


def failure(kind: Any, **sources: Any) -> str:
    sources.setdefault("environ", {})
    with pytest.raises(ConfigError) as caught:
        load(kind, **sources)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_later_sources_win(tmp_path: Path) -> None:
    file = write(tmp_path, "port: 1\nlease_ttl: 2\nlease_renewal: 3\n")
    config = load(
        BootstrapConfig, file=file, environ={"PDMESH_LEASE_TTL": "20", "PDMESH_LEASE_RENEWAL": "30"},
        flags={"lease_renewal": "300", "host": None},
    )  # fmt: skip
    assert (config.port, config.lease_ttl, config.lease_renewal, config.host) == (1, 20.0, 300.0, "127.0.0.1")


def test_every_type_reads_from_the_environment() -> None:
    environ = {
        "PDMESH_MODEL": "m",
        "PDMESH_BOOTSTRAP": "a:1, b:2",
        "PDMESH_PREFIX_CACHE": "false",
        "PDMESH_BLOCK_SIZE": "32",
        "PDMESH_KV_TOKENS": "512",
    }
    config = load(WorkerConfig, environ=environ, flags={"role": Role.DECODE})
    assert config.bootstrap == ("a:1", "b:2")
    assert (config.prefix_cache, config.block_size, config.kv_tokens) == (False, 32, 512)


def test_flags_are_text_too() -> None:
    config = load(RouterConfig, environ={}, flags={"model": "m", "policy": "room_hash", "bootstrap": ("x:1",)})
    assert config.policy is PlacementPolicy.ROOM_HASH
    assert config.bootstrap == ("x:1",)


def test_a_variable_of_another_service_is_none_of_our_business() -> None:
    assert load(BootstrapConfig, environ={"PDMESH_KV_TOKENS": "5", "PDMESH_CACHE": "/c"}).port == 18800


def test_unknown_names_are_errors_with_the_nearest_known_one(tmp_path: Path) -> None:
    file = write(tmp_path, "leese_ttl: 3\n")
    assert failure(BootstrapConfig, file=file) == f"{file}: unknown key 'leese_ttl'; did you mean 'lease_ttl'?"
    assert failure(BootstrapConfig, environ={"PDMESH_KV_TOKEN": "1"}) == (
        "unknown environment variable PDMESH_KV_TOKEN; did you mean PDMESH_KV_TOKENS?"
    )
    assert failure(BootstrapConfig, file=write(tmp_path, "zzz: 3\n")).endswith("unknown key 'zzz'")


def test_wrong_values_name_field_and_source(tmp_path: Path) -> None:
    assert failure(RouterConfig) == "model is required: give --model"
    message = failure(BootstrapConfig, environ={"PDMESH_PORT": "eighty"})
    assert message.startswith("port (from PDMESH_PORT): ") and message.endswith("got 'eighty'")
    assert failure(BootstrapConfig, flags={"port": "70000"}).startswith("port (from --port): ")
    file = write(tmp_path, "lease_ttl: 0\n")
    assert failure(BootstrapConfig, file=file).startswith(f"lease_ttl (from {file}): ")


@pytest.mark.parametrize("text", ["- a\n", "3\n", "{a: [\n", "1: 2\n"])
def test_a_file_that_is_no_mapping(tmp_path: Path, text: str) -> None:
    assert failure(BootstrapConfig, file=write(tmp_path, text)).startswith(str(tmp_path))


def test_missing_and_empty_file(tmp_path: Path) -> None:
    assert failure(BootstrapConfig, file=tmp_path / "no.yaml").endswith("No such file or directory")
    assert load(BootstrapConfig, file=write(tmp_path, ""), environ={}) == BootstrapConfig()


def test_serve_passes_options_on_to_those_who_know_them() -> None:
    config = load(
        ServeConfig, environ={"PDMESH_KV_TOKENS": "640"},
        flags={"model": "m", "max_queued": "7", "policy": "round_robin", "lease_ttl": "3", "log_level": "debug"},
    )  # fmt: skip
    worker, router = config.child("prefill"), config.child("router")
    assert isinstance(worker, WorkerConfig) and isinstance(router, RouterConfig)
    assert (worker.kv_tokens, worker.max_queued, worker.log_level, worker.role) == (640, 7, "debug", Role.PREFILL)
    assert (router.policy, router.max_queued) == (PlacementPolicy.ROUND_ROBIN, 7)
    assert config.child_values("bootstrap") == {
        "log_level": "debug", "log_format": "text", "lease_ttl": "3",
    }  # fmt: skip


def test_serve_overrides_one_kind(tmp_path: Path) -> None:
    file = write(tmp_path, "model: m\nkv_tokens: 640\noverrides:\n  decode: {kv_tokens: 320}\n")
    config = load(ServeConfig, file=file, environ={})
    decode, prefill = config.child("decode"), config.child("prefill")
    assert isinstance(decode, WorkerConfig) and isinstance(prefill, WorkerConfig)
    assert (decode.kv_tokens, prefill.kv_tokens) == (320, 640)


def test_serve_checks_what_it_passes_on(tmp_path: Path) -> None:
    assert failure(ServeConfig, flags={"model": "m", "kv_tokens": "x"}).startswith("kv_tokens (from --kv-tokens): ")
    file = write(tmp_path, "model: m\noverrides:\n  decode: {kv_tokns: 320}\n")
    assert failure(ServeConfig, file=file) == "unknown key 'kv_tokns'; did you mean 'kv_tokens'?"
    file = write(tmp_path, "model: m\noverrides:\n  dekode: {kv_tokens: 320}\n")
    assert "overrides" in failure(ServeConfig, file=file)


def test_what_serve_decides_itself_is_no_option() -> None:
    assert not {"role", "instance", "bootstrap", "socket_dir", "port"} & set(serve_options())


def test_cache_directory_and_children_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_dir({"PDMESH_CACHE": "/c"}) == Path("/c")
    assert cache_dir({}) == Path.home() / ".cache" / "pdmesh"
    monkeypatch.setenv("PDMESH_KV_TOKENS", "3")
    monkeypatch.setenv("PDMESH_CACHE", "/c")
    inherited = child_environment()
    assert inherited["PDMESH_CACHE"] == "/c" and "PDMESH_KV_TOKENS" not in inherited


def test_an_engine_waits_passively_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    policy = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "2000"}
    assert policy.items() <= engine_environment().items()
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert engine_environment()["OMP_WAIT_POLICY"] == "ACTIVE"
    assert "GOMP_SPINCOUNT" not in engine_environment()
