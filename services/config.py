"""One typed configuration object per process.

Values come from a YAML file, then environment variables PDMESH_…, then flags; services/cli reads
them. Unknown keys are errors that name the nearest known one. All times are in seconds.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from engine_core.types.request import Role


class _Config(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CommonConfig(_Config):
    """What every process has."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"


class BootstrapConfig(CommonConfig):
    """The rank-table registry."""

    host: str = "127.0.0.1"
    port: int = Field(18800, ge=0, le=65535)
    lease_ttl: float = Field(15.0, gt=0)
    lease_renewal: float = Field(5.0, gt=0)
    rooms_kept: int = Field(100_000, ge=1)


class WorkerConfig(CommonConfig):
    """A prefill, decode or mixed worker: one service process and its engine process."""

    role: Role
    model: str
    host: str = "127.0.0.1"
    port: int = Field(0, ge=0, le=65535)
    bootstrap: tuple[str, ...] = ("127.0.0.1:18800",)
    instance: str = ""
    served_model_name: tuple[str, ...] = ()
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    block_size: Literal[16, 32, 64, 128] = 16
    max_model_len: int = Field(0, ge=0)
    kv_tokens: int = Field(0, ge=0)
    kv_memory_mb: int = Field(1024, ge=1)
    max_batch_tokens: int = Field(512, ge=1)
    max_running: int = Field(64, ge=1)
    max_queued: int = Field(256, ge=1)
    max_local_tokens: int = Field(256, ge=1)
    prefix_cache: bool = True
    threads: int = Field(0, ge=0)
    attention_backend: str = "auto"
    linear_backend: str = "auto"
    transfer_backend: Literal["auto", "shm", "tcp", "scripted"] = "auto"
    transfer_script: str = ""
    """JSON that the scripted transport reads; for tests."""
    transfer_host: str = "127.0.0.1"
    verify_kv: bool = False
    socket_dir: str = ""
    queue_timeout: float = Field(60.0, gt=0)
    kv_progress_timeout: float = Field(15.0, gt=0)
    token_stall_timeout: float = Field(30.0, gt=0)
    watchdog_timeout: float = Field(30.0, gt=0)
    connect_timeout: float = Field(2.0, gt=0)
    drain_timeout: float = Field(30.0, ge=0)


class PlacementPolicy(StrEnum):
    """How the router chooses a pair."""

    ROOM_HASH = "room_hash"
    ROUND_ROBIN = "round_robin"
    LEAST_LOAD = "least_load"


class RouterConfig(CommonConfig):
    """The OpenAI-compatible front."""

    model: str
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    bootstrap: tuple[str, ...] = ("127.0.0.1:18800",)
    served_model_name: tuple[str, ...] = ()
    policy: PlacementPolicy = PlacementPolicy.LEAST_LOAD
    max_in_flight: int = Field(256, ge=1)
    max_queued: int = Field(256, ge=0)
    max_body_bytes: int = Field(8 * 1024 * 1024, ge=1024)
    max_prompts: int = Field(256, ge=1)
    max_attempts: int = Field(3, ge=1)
    request_timeout: float = Field(600.0, gt=0)
    connect_timeout: float = Field(2.0, gt=0)
    queue_timeout: float = Field(60.0, gt=0)
    sse_comment_after: float = Field(15.0, gt=0)
    peer_wait: float = Field(1.0, ge=0)
    drain_timeout: float = Field(30.0, ge=0)
    max_tokens_default: int = Field(0, ge=0)
    """Used by /v1/completions when the client names no limit; 0 is 16, as OpenAI has it."""


class ServeConfig(CommonConfig):
    """The whole mesh on this machine."""

    model: str
    prefill: int = Field(1, ge=0, le=64)
    decode: int = Field(1, ge=0, le=64)
    aggregated: bool = False
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    bootstrap_port: int = Field(18800, ge=0, le=65535)
    drain_timeout: float = Field(30.0, ge=0)
