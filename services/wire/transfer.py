"""pdmesh.transfer.v1: layouts, descriptors, tickets, counts.

Destination blocks come from another process and end up as addresses to copy to, so they are checked
here for form; the engine checks them against its own pool.
"""

from __future__ import annotations

from engine_core.types.errors import InvalidRequestError
from engine_core.types.ids import RankCoord
from engine_core.types.kv import (
    DTYPE_BYTES,
    GroupBlocks,
    KvGroupLayout,
    KvGroupSpec,
    KvLayout,
    ShardCount,
    ShardTicket,
    Ticket,
    TransferDescriptor,
)
from pdmesh.common.v1 import identity_pb2
from pdmesh.transfer.v1 import kv_layout_pb2, ticket_pb2
from services.wire.common import (
    MAX_ENDPOINT,
    MAX_INT32,
    MAX_PARALLEL,
    checked_int,
    checked_size,
    checked_text,
    coord_from_proto,
)

MAX_GROUPS = 64
MAX_SHARDS = 4_096
MAX_BLOCKS = 1 << 22
MAX_DESCRIPTORS = 16
MAX_NONCE = 256
_MAX_DIM = 1 << 20


def layout_to_proto(layout: KvLayout) -> kv_layout_pb2.KvLayout:
    """KvLayout as a message."""
    return kv_layout_pb2.KvLayout(
        tp_size=layout.tp_size,
        cp_size=layout.cp_size,
        region_bytes=layout.region_bytes,
        groups=[
            kv_layout_pb2.KvGroupLayout(
                group_id=group.spec.group_id,
                num_layers=group.spec.num_layers,
                kv_size=group.spec.kv_size,
                num_heads=group.spec.num_heads,
                first_head=group.first_head,
                head_size=group.spec.head_size,
                block_size=group.block_size,
                dtype=group.spec.dtype,
                dim_order=group.dim_order,
                offset=group.offset,
                num_blocks=group.num_blocks,
            )
            for group in layout.groups
        ],
    )


def layout_from_proto(message: kv_layout_pb2.KvLayout, field: str = "layout") -> KvLayout:
    """Refuses groups that don't fit their region, and data types that are not known."""
    checked_size(message.groups, f"{field}.groups", MAX_GROUPS)
    region = checked_int(message.region_bytes, f"{field}.region_bytes")
    groups = []
    for index, group in enumerate(message.groups):
        name = f"{field}.groups[{index}]"
        layout = _group_from_proto(group, name)
        if layout.offset + layout.num_blocks * layout.block_bytes > region:
            raise InvalidRequestError(f"{name} does not fit a region of {region} bytes", field=name)
        groups.append(layout)
    return KvLayout(
        groups=tuple(groups),
        region_bytes=region,
        tp_size=checked_int(message.tp_size, f"{field}.tp_size", 1, MAX_PARALLEL),
        cp_size=checked_int(message.cp_size, f"{field}.cp_size", 1, MAX_PARALLEL),
    )


def _group_from_proto(message: kv_layout_pb2.KvGroupLayout, field: str) -> KvGroupLayout:
    if message.dtype not in DTYPE_BYTES:
        known = ", ".join(sorted(DTYPE_BYTES))
        raise InvalidRequestError(f"{field}.dtype is {message.dtype[:40]!r}, known are {known}", field=f"{field}.dtype")
    spec = KvGroupSpec(
        num_layers=checked_int(message.num_layers, f"{field}.num_layers", 1, _MAX_DIM),
        num_heads=checked_int(message.num_heads, f"{field}.num_heads", 1, _MAX_DIM),
        head_size=checked_int(message.head_size, f"{field}.head_size", 1, _MAX_DIM),
        dtype=message.dtype,
        kv_size=checked_int(message.kv_size, f"{field}.kv_size", 1, 2),
        group_id=checked_int(message.group_id, f"{field}.group_id", 0, MAX_GROUPS - 1),
    )
    return KvGroupLayout(
        spec=spec,
        block_size=checked_int(message.block_size, f"{field}.block_size", 1, _MAX_DIM),
        num_blocks=checked_int(message.num_blocks, f"{field}.num_blocks", 1, MAX_INT32),
        first_head=checked_int(message.first_head, f"{field}.first_head", 0, _MAX_DIM),
        offset=checked_int(message.offset, f"{field}.offset"),
        dim_order=checked_text(message.dim_order, f"{field}.dim_order", 64, empty=False),
    )


def descriptor_to_proto(descriptor: TransferDescriptor) -> kv_layout_pb2.TransferDescriptor:
    """TransferDescriptor as a message."""
    return kv_layout_pb2.TransferDescriptor(
        transport=descriptor.transport, address=descriptor.address, nonce=descriptor.nonce
    )


def descriptor_from_proto(message: kv_layout_pb2.TransferDescriptor, field: str = "descriptor") -> TransferDescriptor:
    """Handles of bounded length; what they mean is for the transport to judge."""
    checked_size(message.nonce, f"{field}.nonce", MAX_NONCE)
    return TransferDescriptor(
        transport=checked_text(message.transport, f"{field}.transport", 32, empty=False),
        address=checked_text(message.address, f"{field}.address", MAX_ENDPOINT),
        nonce=message.nonce,
    )


def _coord_to_proto(coord: tuple[int, int, int]) -> identity_pb2.RankCoord:
    return identity_pb2.RankCoord(dp=coord[0], cp=coord[1], tp=coord[2])


def _coord_tuple(message: identity_pb2.RankCoord, field: str) -> tuple[int, int, int]:
    coord: RankCoord = coord_from_proto(message, field)
    return (coord.dp, coord.cp, coord.tp)


def ticket_to_proto(ticket: Ticket) -> ticket_pb2.Ticket:
    """Ticket as a message."""
    return ticket_pb2.Ticket(
        link_id=ticket.link_id,
        first_token=ticket.first_token,
        num_tokens=ticket.num_tokens,
        shards=[
            ticket_pb2.ShardTicket(
                coord=_coord_to_proto(shard.coord),
                groups=[ticket_pb2.GroupBlocks(group_id=g.group_id, block_ids=g.block_ids) for g in shard.groups],
            )
            for shard in ticket.shards
        ],
    )


def ticket_from_proto(message: ticket_pb2.Ticket, field: str = "ticket") -> Ticket:
    """Refuses the null block, doubled blocks, doubled ranks or groups, and tokens that run backwards."""
    checked_size(message.shards, f"{field}.shards", MAX_SHARDS)
    shards = tuple(_shard_from_proto(shard, f"{field}.shards[{i}]") for i, shard in enumerate(message.shards))
    if len({shard.coord for shard in shards}) != len(shards):
        raise InvalidRequestError(f"{field}.shards names a rank twice", field=f"{field}.shards")
    num_tokens = checked_int(message.num_tokens, f"{field}.num_tokens", 1, MAX_INT32)
    return Ticket(
        link_id=checked_int(message.link_id, f"{field}.link_id", 1),
        first_token=checked_int(message.first_token, f"{field}.first_token", 0, num_tokens),
        num_tokens=num_tokens,
        shards=shards,
    )


def _shard_from_proto(message: ticket_pb2.ShardTicket, field: str) -> ShardTicket:
    checked_size(message.groups, f"{field}.groups", MAX_GROUPS)
    groups = []
    for index, group in enumerate(message.groups):
        name = f"{field}.groups[{index}].block_ids"
        checked_size(group.block_ids, name, MAX_BLOCKS)
        blocks = tuple(group.block_ids)
        if blocks and min(blocks) < 1:
            raise InvalidRequestError(
                f"{name} holds {min(blocks)}; blocks that can be written count from 1", field=name
            )
        if len(set(blocks)) != len(blocks):
            raise InvalidRequestError(f"{name} names a block twice", field=name)
        group_id = checked_int(group.group_id, f"{field}.groups[{index}].group_id", 0, MAX_GROUPS - 1)
        groups.append(GroupBlocks(group_id, blocks))
    if len({group.group_id for group in groups}) != len(groups):
        raise InvalidRequestError(f"{field}.groups names a group twice", field=f"{field}.groups")
    return ShardTicket(_coord_tuple(message.coord, f"{field}.coord"), tuple(groups))


def shard_count_to_proto(count: ShardCount) -> ticket_pb2.ShardCount:
    """ShardCount as a message; the checksum stays unset when there is none."""
    return ticket_pb2.ShardCount(
        coord=_coord_to_proto(count.coord), bytes=count.bytes, blocks=count.blocks, checksum=count.checksum
    )


def shard_count_from_proto(message: ticket_pb2.ShardCount, field: str = "shard") -> ShardCount:
    """Counts are not negative; the caller compares them with its plan."""
    return ShardCount(
        coord=_coord_tuple(message.coord, f"{field}.coord"),
        bytes=checked_int(message.bytes, f"{field}.bytes"),
        blocks=checked_int(message.blocks, f"{field}.blocks"),
        checksum=message.checksum if message.HasField("checksum") else None,
    )


def shard_counts_from_proto(messages: list[ticket_pb2.ShardCount], field: str = "shards") -> tuple[ShardCount, ...]:
    """All counts of one Delivered."""
    checked_size(messages, field, MAX_SHARDS)
    return tuple(shard_count_from_proto(message, f"{field}[{i}]") for i, message in enumerate(messages))
