"""The virtual clock, and that builders build what the types allow."""

from __future__ import annotations

import pytest

from tests.support import builders
from tests.support.clock import VirtualClock


def test_time_passes_only_when_told() -> None:
    clock = VirtualClock(5.0)
    assert clock() == clock.now == 5.0
    assert clock.advance(1.5) == 6.5
    assert clock.advance_to(6.0) == 6.5
    assert clock.advance_to(8.0) == 8.0
    with pytest.raises(ValueError, match="backwards"):
        clock.advance(-0.1)
    assert clock() == 8.0


def test_layouts_place_groups_one_after_another() -> None:
    two = builders.layout(3, 4, groups=(builders.group(), builders.group(num_heads=1)))
    first, second = two.groups
    assert first.block_bytes == 4 * 2 * 2 * 2 * 8 * 4
    assert (first.offset, second.offset) == (0, 3 * first.block_bytes)
    assert two.region_bytes == second.offset + 3 * second.block_bytes
    assert (first.spec.group_id, second.spec.group_id) == (0, 1)


def test_specs_tickets_and_plans() -> None:
    spec = builders.spec((1, 2), room=3, attempt=1, max_tokens=5, emitted=(9,))
    assert spec.session == builders.session(3, 1)
    assert spec.known_token_ids == (1, 2, 9)
    assert spec.max_total_tokens == 6
    ticket = builders.ticket((4, 5), num_tokens=4, link_id=8)
    assert ticket.shards[0].groups[0].block_ids == (4, 5)
    plan = builders.plan(builders.sequence((1, 2)), builders.sequence((3,), start=4, room=2))
    assert plan.num_tokens == 3
    assert builders.scheduler(2, max_running=1).max_running == 1
