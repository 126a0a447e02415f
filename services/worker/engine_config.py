"""What an engine is told, from what its worker was told."""

from __future__ import annotations

from typing import Any

import msgspec

from engine_core.config import DisaggConfig, InferenceConfig, ModelConfig, SchedulerConfig
from services.config import WorkerConfig
from services.runtime.addresses import dialable


def inference_config(config: WorkerConfig, socket_dir: str) -> dict[str, Any]:
    """What the engine is told, as plain data."""
    names = config.served_model_name
    whole = InferenceConfig(
        model=ModelConfig(
            model_path=config.model,
            model_name=names[0] if names else "",
            dtype=config.dtype,
            max_model_len=config.max_model_len,
            attention_backend=config.attention_backend,
            linear_backend=config.linear_backend,
            num_threads=config.threads,
        ),
        scheduler=SchedulerConfig(
            max_batch_tokens=config.max_batch_tokens,
            max_running=config.max_running,
            max_queued=config.max_queued,
            block_size=config.block_size,
            kv_tokens=config.kv_tokens,
            kv_memory_bytes=config.kv_memory_mb << 20,
            enable_prefix_cache=config.prefix_cache,
            max_local_tokens=config.max_local_tokens,
            max_local_recompute=config.max_local_recompute,
            max_step_stretch=config.max_step_stretch,
            queue_timeout=config.queue_timeout,
            kv_progress_timeout=config.kv_progress_timeout,
        ),
        disagg=DisaggConfig(
            disaggregation_mode=config.role,
            transfer_backend=config.transfer_backend,
            socket_dir=socket_dir,
            tcp_host=config.transfer_host or dialable(config.host, config.advertise_host).strip("[]"),
            verify_kv=config.verify_kv,
            script=config.transfer_script,
        ),
        fault_script=config.fault_script,
    )
    whole.check()
    plain: dict[str, Any] = msgspec.to_builtins(whole)
    return plain
