"""Rows of the rank table for tests."""

from __future__ import annotations

from typing import Any

from engine_core.types.ids import RankCoord
from engine_core.types.kv import KvGroupLayout, KvGroupSpec, KvLayout, KvUsage, TransferDescriptor
from engine_core.types.request import Role
from services.wire.bootstrap import InstanceSpec, Load, RankRow

LEADER = RankCoord()


def instance_spec(name: str = "d0", role: Role = Role.DECODE, fingerprint: str = "fp", **more: Any) -> InstanceSpec:
    """An instance; one rank unless sizes are given."""
    return InstanceSpec(name=name, role=role, fingerprint=fingerprint, **more)


def rank_row(
    name: str = "d0",
    role: Role = Role.DECODE,
    *,
    incarnation: int = 100,
    coord: RankCoord = LEADER,
    endpoint: str = "",
    spec: InstanceSpec | None = None,
    **more: Any,
) -> RankRow:
    """A row whose endpoint is derived from what it is."""
    return RankRow(
        instance=spec or instance_spec(name, role),
        coord=coord,
        endpoint=endpoint or f"{name}.{coord.dp}:1",
        incarnation=incarnation,
        **more,
    )


def full_row() -> RankRow:
    """A row with every field set to something that is not its default."""
    group = KvGroupLayout(
        spec=KvGroupSpec(num_layers=3, num_heads=2, head_size=8, dtype="bfloat16", kv_size=1, group_id=1),
        block_size=16,
        num_blocks=9,
        first_head=2,
        offset=64,
        dim_order="NB_NL_BS_NH_HS",
    )
    spec = InstanceSpec(
        name="p0",
        role=Role.PREFILL,
        fingerprint="abc",
        fingerprint_parts={"dtype": "float32", "tokenizer": "x"},
        served_model_names=("m", "n"),
        max_model_len=4096,
        version="0.1.0",
        tokenizer_digest="t",
        kv_capacity_tokens=1 << 33,
        eos_token_ids=(2, 0),
        dp_size=2,
        cp_size=3,
        tp_size=4,
    )
    return RankRow(
        instance=spec,
        coord=RankCoord(1, 2, 3),
        endpoint="127.0.0.1:8001",
        incarnation=(1 << 63) - 1,
        layout=KvLayout(groups=(group,), region_bytes=1 << 30, tp_size=4, cp_size=3),
        descriptors=(TransferDescriptor("shm", "/run/x.sock", b"\x00\xff"), TransferDescriptor("tcp", "127.0.0.1:9")),
        load=Load(running=1, queued=2, queued_tokens=1 << 40, kv=KvUsage(10, 1, 2, 3, 4, 0)),
        host="h",
        pid=7,
        engine_pid=8,
    )
