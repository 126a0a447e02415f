"""One typed configuration object per process.

Values come from a YAML file, then environment variables PDMESH_…, then flags; the later one wins. Unknown
keys are errors that name the nearest known one. All times are in seconds. This is the only module that
reads the environment.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, TypeVar, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from engine_core.types.errors import ConfigError
from engine_core.types.request import Role
from services.runtime.notify import ManagerAddress, ServiceManager


class _Config(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CommonConfig(_Config):
    """What every process has."""

    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least level that is logged")
    log_format: Literal["text", "json"] = Field("text", description="How a line of the log looks")
    mesh_token_file: str = Field("", description="File with the secret that all processes of a mesh share")
    tls_cert: str = Field("", description="PEM file with this process's certificate chain, for gRPC with mTLS")
    tls_key: str = Field("", description="PEM file with the certificate's key")
    tls_ca: str = Field("", description="PEM file with the authorities whose certificates peers must have")
    tls_name: str = Field("", description="Name that peers' certificates must have; by default the host dialled")
    insecure: bool = Field(False, description="Listen beyond this machine though nothing asks callers who they are")
    log_prompts: bool = Field(False, description="Let logs hold the text of prompts and answers")


class BootstrapConfig(CommonConfig):
    """The rank-table registry."""

    host: str = Field("127.0.0.1", description="Address to listen on")
    port: int = Field(18800, ge=0, le=65535, description="gRPC port; 0 takes a free one")
    lease_ttl: float = Field(15.0, gt=0, description="Seconds after which a silent worker is LOST")
    lease_renewal: float = Field(5.0, gt=0, description="Seconds between renewals by a worker")
    rooms_kept: int = Field(100_000, ge=1, description="Routes of past requests that are kept")
    metrics_port: int = Field(0, ge=-1, le=65535, description="HTTP port of /metrics; 0 takes a free one, -1 none")
    auto_role: bool = Field(False, description="Change roles of workers by queue pressure; of several Bootstraps one")
    auto_role_high: float = Field(4.0, gt=0, description="Waiting requests per worker at which a role needs another")
    auto_role_low: float = Field(1.0, ge=0, description="Waiting requests per worker below which a role can give one")
    auto_role_hold: float = Field(10.0, ge=0, description="Seconds that a need lasts before a worker changes")
    auto_role_cooldown: float = Field(60.0, ge=0, description="Seconds between one change and the next")
    auto_role_limit: float = Field(30.0, ge=0, description="Seconds that a changing worker's streams get to end")

    @model_validator(mode="after")
    def _need_is_above_plenty(self) -> BootstrapConfig:
        if self.auto_role_low >= self.auto_role_high:
            raise ValueError("auto_role_low must be less than auto_role_high, or roles would change back and forth")
        return self


class WorkerConfig(CommonConfig):
    """A prefill, decode or mixed worker: one service process and its engine process."""

    role: Role
    model: str = Field(description="Hugging Face directory, hub id, or demo")
    host: str = Field("127.0.0.1", description="Address to listen on")
    port: int = Field(0, ge=0, le=65535, description="gRPC port; 0 takes a free one")
    bootstrap: tuple[str, ...] = Field(("127.0.0.1:18800",), description="Bootstrap addresses, all of them are told")
    advertise_host: str = Field("", description="Host that peers dial; by default --host, or this machine's address")
    advertise_port: int = Field(0, ge=0, le=65535, description="gRPC port that peers dial; 0: the one listened on")
    metrics_port: int = Field(0, ge=-1, le=65535, description="HTTP port of /metrics; 0 takes a free one, -1 none")
    instance: str = Field("", description="Name in the rank table; made of role and port by default")
    served_model_name: tuple[str, ...] = Field((), description="Names that clients may use; the first is canonical")
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="Compute type; auto is the checkpoint's")
    block_size: Literal[16, 32, 64, 128] = Field(16, description="Tokens per KV block")
    max_model_len: int = Field(0, ge=0, description="Longest sequence in tokens; 0 is the model's context")
    kv_tokens: int = Field(0, ge=0, description="Tokens that the KV pool holds; 0 derives it from kv_memory_mb")
    kv_memory_mb: int = Field(1024, ge=1, description="Memory for KV in MiB")
    max_batch_tokens: int = Field(512, ge=1, description="Token budget of one step")
    max_running: int = Field(64, ge=1, description="Requests in the running batch")
    max_queued: int = Field(256, ge=1, description="Requests that may wait before 429")
    max_local_tokens: int = Field(256, ge=1, description="Prompt tokens per step that a decode worker recomputes")
    max_local_recompute: int = Field(
        4096, ge=0, description="Tokens that a preempted output recomputes at most here; with more it goes to prefill"
    )
    max_step_stretch: float = Field(
        2.0, ge=0, description="How many times longer a step may take when a prompt's chunk rides along; 0: no bound"
    )
    prefix_cache: bool = Field(True, description="Reuse KV of equal prefixes")
    threads: int = Field(0, ge=0, description="Threads of the engine; 0 takes every core")
    attention_backend: str = Field("auto", description="Attention implementation")
    linear_backend: str = Field("auto", description="Linear-layer implementation")
    transfer_backend: Literal["auto", "shm", "tcp", "scripted"] = Field("auto", description="How KV travels")
    transfer_script: str = Field("", description="JSON that the scripted transport reads; for tests")
    fault_script: str = Field("", description="JSON of steps that go wrong; for tests")
    transfer_host: str = Field("", description="Address of the tcp transport; by default what peers dial")
    verify_kv: bool = Field(False, description="Compare checksums of transferred KV")
    socket_dir: str = Field("", description="Directory of link sockets; one that workers in other containers see too")
    queue_timeout: float = Field(60.0, gt=0, description="Seconds that a request may wait")
    kv_progress_timeout: float = Field(15.0, gt=0, description="Seconds without KV before a transfer is given up")
    token_stall_timeout: float = Field(30.0, gt=0, description="Seconds without token or step before a stream ends")
    watchdog_timeout: float = Field(30.0, gt=0, description="Seconds without engine progress before it is killed")
    connect_timeout: float = Field(2.0, gt=0, description="Seconds to reach a peer")
    drain_timeout: float = Field(30.0, ge=0, description="Seconds that open requests get when stopping")
    otlp_endpoint: str = Field("", description="OTLP/gRPC collector of traces: http://HOST:4317; by default none")
    trace_sample_ratio: float = Field(
        1.0, ge=0, le=1, description="Share of requests that are traced, where the client does not say"
    )


class PlacementPolicy(StrEnum):
    """How the router chooses a pair."""

    ROOM_HASH = "room_hash"
    ROUND_ROBIN = "round_robin"
    LEAST_LOAD = "least_load"


_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


class RouterConfig(CommonConfig):
    """The OpenAI-compatible front."""

    model: str = Field(description="Hugging Face directory (its tokenizer is read), hub id, or demo")
    host: str = Field("127.0.0.1", description="Address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="HTTP port; 0 takes a free one")
    advertise_host: str = Field("", description="Host that others dial; by default --host, or this machine's address")
    bootstrap: tuple[str, ...] = Field(("127.0.0.1:18800",), description="Bootstrap addresses")
    served_model_name: tuple[str, ...] = Field((), description="Names that clients may use; the first is canonical")
    policy: PlacementPolicy = Field(PlacementPolicy.LEAST_LOAD, description="How a pair is chosen")
    max_in_flight: int = Field(256, ge=1, description="Requests served at once")
    max_queued: int = Field(256, ge=0, description="Requests that may wait before 429")
    priority_floor: int = Field(
        0, description="Most urgent priority that clients may ask for; below it counts as it. Negative ones go earlier"
    )
    pool_headroom: float = Field(
        1.25, ge=0, description="How many times what the workers' batches and pools hold is sent to them; 0: no limit"
    )
    prompts_ahead: float = Field(
        1.0, ge=0, description="Seconds of prompts that are sent to the workers before their turn; 0: no limit"
    )
    max_body_bytes: int = Field(8 * 1024 * 1024, ge=1024, description="Largest request body")
    max_prompts: int = Field(256, ge=1, description="Prompts in one request")
    max_connections: int = Field(2048, ge=1, description="Open HTTP connections; idle ones make room, then 503")
    max_header_bytes: int = Field(64 * 1024, ge=1024, description="Largest request line and headers, together")
    header_timeout: float = Field(10.0, gt=0, description="Seconds for a request's line and headers to come")
    body_timeout: float = Field(120.0, gt=0, description="Seconds for a request's body to come")
    api_key: tuple[str, ...] = Field(
        (), description="A key that clients must show; several are accepted. Others see it in ps: prefer a file"
    )
    api_key_file: str = Field("", description="File with such keys, one on a line; read anew when it changes")
    cors_origin: tuple[str, ...] = Field((), description="Origin whose pages may call the router: https://HOST, or *")
    max_attempts: int = Field(5, ge=1, description="Attempts in a row that may end without a new token")
    retry_share: float = Field(0.2, ge=0, description="Retries before token 1 that one request more allows")
    retry_floor: float = Field(10.0, ge=0, description="Retries before token 1 that are allowed each second anyway")
    request_timeout: float = Field(600.0, gt=0, description="Seconds for a whole request")
    connect_timeout: float = Field(2.0, gt=0, description="Seconds to reach a worker")
    queue_timeout: float = Field(60.0, gt=0, description="Seconds that a request may wait")
    sse_comment_after: float = Field(15.0, gt=0, description="Seconds before a waiting stream gets SSE comments")
    client_stall_timeout: float = Field(60.0, gt=0, description="Seconds without reading after which a client is gone")
    peer_wait: float = Field(1.0, ge=0, description="Seconds to wait for a worker that the table lacks")
    drain_timeout: float = Field(30.0, ge=0, description="Seconds that open requests get when stopping")
    http_tls_cert: str = Field("", description="PEM file with the certificate chain of the HTTP port")
    http_tls_key: str = Field("", description="PEM file with that certificate's key")
    strict_max_tokens: bool = Field(
        False, description="Refuse a max_tokens that does not fit behind its prompt, rather than cut it to what does"
    )
    chat_template: str = Field("", description="Chat template: a file, or a name such as chatml; else the model's own")
    trust_request_chat_template: bool = Field(
        False, description="Render chat templates that requests bring; only for clients that you trust"
    )
    tool_call_parser: str = Field(
        "auto", description="How the model writes tool calls: a name, auto (by its chat template) or none"
    )
    reasoning_parser: str = Field(
        "auto", description="How the model writes its reasoning: a name, auto (by its chat template) or none"
    )
    max_tokens_default: int = Field(0, ge=0, description="Limit of /v1/completions when a client names none; 0 is 16")
    console: bool | None = Field(None, description="Web console at /console; by default on a loopback address alone")

    @property
    def serves_console(self) -> bool:
        """Whether there is a console: as told, else where only this machine can look."""
        return self.host in _LOOPBACK if self.console is None else self.console

    otlp_endpoint: str = Field("", description="OTLP/gRPC collector of traces: http://HOST:4317; by default none")
    trace_sample_ratio: float = Field(
        1.0, ge=0, le=1, description="Share of requests that are traced, where the client does not say"
    )


class QueryConfig(CommonConfig):
    """A command that asks a running mesh."""

    bootstrap: tuple[str, ...] = Field(("127.0.0.1:18800",), description="Bootstrap addresses; the first that answers")
    query_timeout: float = Field(3.0, gt=0, description="Seconds that one process has to answer")
    http_ca: str = Field("", description="PEM file with authorities of routers' certificates, beside the system's")
    api_key: str = Field("", description="Key that routers ask for; others see it in ps: prefer a file")
    api_key_file: str = Field("", description="File with such a key; the first counts")


ServiceKind = Literal["bootstrap", "router", "prefill", "decode"]

_KINDS: Mapping[ServiceKind, type[CommonConfig]] = {
    "bootstrap": BootstrapConfig,
    "router": RouterConfig,
    "prefill": WorkerConfig,
    "decode": WorkerConfig,
}

_CHOSEN_BY_SERVE = frozenset(
    {
        "role",
        "model",
        "host",
        "port",
        "advertise_host",
        "advertise_port",
        "bootstrap",
        "instance",
        "socket_dir",
        "metrics_port",
    }
)


_OF_ALL = ("mesh_token_file", "tls_cert", "tls_key", "tls_ca", "tls_name", "insecure", "log_prompts")
"""What every process of a mesh must be told alike."""


class ServeConfig(CommonConfig):
    """The whole mesh on this machine.

    `options` are options of the services, handed to every service that knows them; `overrides` go to one kind.
    """

    model: str = Field(description="Hugging Face directory, hub id, or demo")
    prefill: int = Field(1, ge=1, le=64, description="Prefill workers")
    decode: int = Field(1, ge=1, le=64, description="Decode workers")
    aggregated: bool = Field(False, description="One MIXED worker instead of prefill and decode workers")
    host: str = Field("127.0.0.1", description="HTTP address")
    port: int = Field(8000, ge=0, le=65535, description="HTTP port; 0 takes a free one")
    bootstrap_port: int = Field(18800, ge=0, le=65535, description="gRPC port of Bootstrap; 0 takes a free one")
    start_timeout: float = Field(300.0, gt=0, description="Seconds until everything must be ready")
    heartbeat_timeout: float = Field(
        30.0, gt=0, description="Seconds without a sign of life before a process is killed"
    )
    drain_timeout: float = Field(30.0, ge=0, description="Seconds that open requests get when stopping")
    options: dict[str, Any] = Field(default_factory=dict, exclude=True)
    overrides: dict[ServiceKind, dict[str, Any]] = Field(
        default_factory=dict, description="Options of one kind of service: {decode: {kv_tokens: 4096}}"
    )

    @model_validator(mode="after")
    def _children_are_valid(self) -> ServeConfig:
        for kind in _KINDS:
            self.child(kind)
        return self

    def child(self, kind: ServiceKind, **chosen: Any) -> CommonConfig:
        """The configuration of one service of this mesh. Raises ValidationError."""
        return _KINDS[kind](**self.child_values(kind, **chosen))

    def child_values(self, kind: ServiceKind, **chosen: Any) -> dict[str, Any]:
        """The values, by field, that differ from the defaults of that service."""
        fields = _KINDS[kind].model_fields
        names: tuple[str, ...] = ("model", "log_level", "log_format", "drain_timeout")
        own = {n: getattr(self, n) for n in names if n in fields}
        own |= {n: getattr(self, n) for n in _OF_ALL if getattr(self, n)}
        passed = {n: v for n, v in self.options.items() if n in fields}
        values = own | passed | dict(self.overrides.get(kind, {})) | chosen
        if "role" in fields:
            values.setdefault("role", Role.PREFILL if kind == "prefill" else Role.DECODE)
        return values


def serve_options() -> dict[str, type[CommonConfig]]:
    """Options that `serve` passes on, each with a configuration that has it."""
    mine = set(ServeConfig.model_fields) | _CHOSEN_BY_SERVE
    return {n: kind for kind in _KINDS.values() for n in kind.model_fields if n not in mine}


C = TypeVar("C", bound=CommonConfig)

PREFIX = "PDMESH_"
CACHE_VARIABLE = "PDMESH_CACHE"
_SECRETS = ("api_key",)
"""Fields whose values no process list, log or error may show."""
_MANAGER_VARIABLES = frozenset({"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"})


def load(
    kind: type[C],
    *,
    file: Path | None = None,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> C:
    """Reads file, then environment, then flags (None values are absent flags).

    Raises ConfigError: one line that names the field, where the value came from, and what would be right.
    """
    known = _known(kind)
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for name, value in _read_file(file).items():
        if name not in known:
            raise ConfigError(f"{file}: unknown key {name!r}{nearest(name, known)}", field=name)
        values[name], origin[name] = value, f"{file}"
    for name, value in _read_environment(os.environ if environ is None else environ, known).items():
        values[name], origin[name] = value, PREFIX + name.upper()
    for name, value in (flags or {}).items():
        if value is not None:
            values[name] = _from_text(known[name], name, value) if isinstance(value, str) and name in known else value
            origin[name] = "--" + name.replace("_", "-")
    if kind is ServeConfig:
        passed = serve_options()
        options = {n: values.pop(n) for n in list(values) if n in passed}
        values["options"] = options
    try:
        return kind(**values)
    except ValidationError as exc:
        raise _explain(exc, origin, known) from exc


def nearest(name: str, known: Iterable[str]) -> str:
    """ "; did you mean 'x'?" or nothing."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Where models are kept: $PDMESH_CACHE, else ~/.cache/pdmesh."""
    value = (os.environ if environ is None else environ).get(CACHE_VARIABLE, "")
    return Path(value) if value else Path.home() / ".cache" / "pdmesh"


def quiet_grpc() -> None:
    """Keeps gRPC's C core from writing to stderr what is raised as an exception anyway; before its first use."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def service_manager(environ: Mapping[str, str] | None = None, *, pid: int | None = None) -> ServiceManager:
    """The manager that started this process by systemd's protocol, by NOTIFY_SOCKET and WATCHDOG_USEC; else nobody.

    A watchdog that is meant for another process (WATCHDOG_PID) is none of ours. Raises ConfigError for a bad number.
    """
    given = os.environ if environ is None else environ
    try:
        microseconds = int(given.get("WATCHDOG_USEC", "0"))
        meant = int(given.get("WATCHDOG_PID", "0")) in (0, os.getpid() if pid is None else pid)
    except ValueError as exc:
        raise ConfigError(f"WATCHDOG_USEC and WATCHDOG_PID must be whole numbers: {exc}") from exc
    watchdog = max(microseconds, 0) / 1e6 if meant else 0.0
    return ServiceManager(ManagerAddress(given.get("NOTIFY_SOCKET", ""), watchdog))


def child_environment() -> dict[str, str]:
    """This process's environment for a service that is told everything by flags. What the manager of this process
    wants to hear, it wants from this process alone."""
    return {
        n: v
        for n, v in os.environ.items()
        if n not in _MANAGER_VARIABLES and (not n.startswith(PREFIX) or n == CACHE_VARIABLE)
    }


def without_secrets(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The values that a child's command line may show, and the environment for those that it may not."""
    hidden = {PREFIX + name.upper(): ",".join(values[name]) for name in _SECRETS if values.get(name)}
    return {name: value for name, value in values.items() if name not in _SECRETS}, hidden


def engine_environment() -> dict[str, str]:
    """This process's environment for an engine.

    Engines share cores with others: a thread that waits for its team spins for some microseconds, which
    saves a wake-up between two small operations, and then sleeps. A policy that is set stays as it is.
    """
    own = {n: v for n, v in os.environ.items() if n not in _MANAGER_VARIABLES}
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & own.keys():
        own |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "2000"}
    return own


def _known(kind: type[CommonConfig]) -> dict[str, type[CommonConfig]]:
    own: dict[str, type[CommonConfig]] = {n: kind for n in kind.model_fields if n not in ("options", "role")}
    return serve_options() | own if kind is ServeConfig else own


def _read_file(file: Path | None) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        data = yaml.safe_load(file.read_text())
    except OSError as exc:
        raise ConfigError(f"{file}: {exc.strerror or exc}") from exc
    except (yaml.YAMLError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{file}: not YAML: {' '.join(str(exc).split())}") from exc
    if data is None:
        return {}
    if not isinstance(data, dict) or not all(isinstance(k, str) for k in data):
        raise ConfigError(f"{file}: it must hold one mapping of names to values")
    return data


def _read_environment(environ: Mapping[str, str], known: Mapping[str, type[CommonConfig]]) -> dict[str, Any]:
    kinds: tuple[type[CommonConfig], ...] = (*_KINDS.values(), ServeConfig, QueryConfig)
    anywhere = {n for kind in kinds for n in kind.model_fields} | {"cache"}
    values: dict[str, Any] = {}
    for variable, text in sorted(environ.items()):
        if not variable.startswith(PREFIX):
            continue
        name = variable.removeprefix(PREFIX).lower()
        if name in known:
            values[name] = _from_text(known[name], name, text)
        elif name not in anywhere:
            near = difflib.get_close_matches(name, sorted(anywhere), n=1)
            hint = f"; did you mean {PREFIX}{near[0].upper()}?" if near else ""
            raise ConfigError(f"unknown environment variable {variable}{hint}", field=name)
    return values


def _from_text(kind: type[CommonConfig], name: str, text: str) -> Any:
    origin = get_origin(kind.model_fields[name].annotation)
    if origin is tuple:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if origin in (dict, Literal):
        return yaml.safe_load(text)
    return text


def _explain(exc: ValidationError, origin: Mapping[str, str], known: Iterable[str]) -> ConfigError:
    first = exc.errors(include_url=False)[0]
    path = [str(p) for p in first["loc"]]
    name = path[0] if path else ""
    if first["type"] == "missing":
        return ConfigError(f"{name} is required: give --{name.replace('_', '-')}", field=name)
    if first["type"] == "extra_forbidden":
        return ConfigError(f"unknown key {'.'.join(path)!r}{nearest(path[-1], known)}", field=name)
    message = first["msg"].removeprefix("Value error, ")
    source = origin.get(name, "")
    place = f" (from {source})" if source else ""
    got = "" if name in _SECRETS else f", got {first['input']!r}"
    return ConfigError(f"{'.'.join(path) or 'configuration'}{place}: {message}{got}", field=name)
