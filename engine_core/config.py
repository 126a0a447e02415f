"""InferenceConfig: everything that an engine process is told. Plain data, checked once.

Names follow the CANN executor's configuration (DataConfig, ModelConfig, ParallelConfig,
SchedulerConfig, DisaggConfig). Unknown keys are errors that name the nearest known one.
"""

from __future__ import annotations

import difflib
from typing import Any, Literal

import msgspec

from engine_core.types.errors import ConfigError
from engine_core.types.request import Role

DType = Literal["auto", "float32", "bfloat16"]


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to serve. `dtype` auto takes the checkpoint's."""

    model_path: str
    model_name: str = ""
    dtype: DType = "auto"
    exe_mode: Literal["eager"] = "eager"
    max_model_len: int = 0
    with_ckpt: bool = True
    attention_backend: str = "auto"
    linear_backend: str = "auto"
    platform: str = "auto"
    num_threads: int = 0


class ParallelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Ranks of an instance."""

    world_size: int = 1
    attn_tp_size: int = 1
    cp_size: int = 1
    attn_dp_size: int = 1


class SchedulerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Budgets and bounds. Tokens are counted per step; blocks exclude the null block.

    kv_tokens 0 derives the pool from kv_memory_bytes. max_step_stretch bounds how much longer a step takes for
    the running sequences when a chunk of a prompt rides along; 0 is no bound. A preempted session with more than
    max_local_recompute tokens to compute anew goes back to the router, and through prefill.
    """

    max_batch_tokens: int = 512
    max_running: int = 64
    max_queued: int = 256
    block_size: int = 16
    kv_tokens: int = 0
    kv_memory_bytes: int = 1 << 30
    num_reserved_decode_tokens: int = 64
    enable_prefix_cache: bool = True
    max_local_tokens: int = 256
    max_local_recompute: int = 4096
    max_step_stretch: float = 2.0
    queue_timeout: float = 60.0
    kv_progress_timeout: float = 15.0
    quarantine_refuse_share: float = 0.25


class DisaggConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The role, and how KV travels."""

    disaggregation_mode: Role = Role.MIXED
    transfer_backend: str = "auto"
    socket_dir: str = ""
    tcp_host: str = "127.0.0.1"
    verify_kv: bool = False
    script: str = ""


class InferenceConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole."""

    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    disagg: DisaggConfig = DisaggConfig()
    fault_script: str = ""
    """JSON of steps that go wrong, for tests; see host/faults.py."""

    def check(self) -> None:
        """Raises ConfigError naming the field and what would be right."""
        s = self.scheduler
        if s.block_size not in (16, 32, 64, 128):
            raise ConfigError(f"scheduler.block_size is {s.block_size}; it must be 16, 32, 64 or 128")
        for name in ("max_batch_tokens", "max_running", "max_queued", "max_local_tokens"):
            if getattr(s, name) < 1:
                raise ConfigError(f"scheduler.{name} is {getattr(s, name)}; it must be at least 1")
        for name in ("kv_tokens", "kv_memory_bytes", "num_reserved_decode_tokens", "max_local_recompute"):
            if getattr(s, name) < 0:
                raise ConfigError(f"scheduler.{name} is {getattr(s, name)}; it must not be negative")
        if s.max_step_stretch != 0 and not s.max_step_stretch > 1:
            raise ConfigError(f"scheduler.max_step_stretch is {s.max_step_stretch}; it must be 0 or above 1")
        p = self.parallel
        if p.world_size != p.attn_tp_size * p.cp_size * p.attn_dp_size:
            raise ConfigError(
                f"parallel.world_size is {p.world_size}; it must be attn_tp_size * cp_size * attn_dp_size "
                f"= {p.attn_tp_size * p.cp_size * p.attn_dp_size}"
            )


def load_config(data: dict[str, Any]) -> InferenceConfig:
    """Reads and checks plain data. Raises ConfigError naming the field and the nearest known one."""
    try:
        config = msgspec.convert(data, InferenceConfig)
    except msgspec.ValidationError as exc:
        raise ConfigError(_explain(str(exc))) from exc
    config.check()
    return config


def _explain(message: str) -> str:
    known = [f for part in (ModelConfig, ParallelConfig, SchedulerConfig, DisaggConfig) for f in part.__struct_fields__]
    if "unknown field" in message:
        name = message.split("`")[1]
        near = difflib.get_close_matches(name, [*known, *InferenceConfig.__struct_fields__], n=1)
        return f"{message}{f'; did you mean `{near[0]}`?' if near else ''}"
    return message
