"""A prefill worker refuses just as its ticket is written: decode's engine learns what it said."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from engine_core.host import frames
from engine_core.types.errors import FencedError, Leg, PdmeshError, UnavailableError
from engine_core.types.ids import RankCoord
from engine_core.types.kv import ShardTicket, Ticket
from engine_core.types.request import Role
from services.decode.prefill_leg import PrefillLeg
from services.runtime.channels import ChannelPool
from services.runtime.errors import to_error_info
from services.wire.bootstrap import InstanceSpec, RankRow
from services.worker.identity import WorkerIdentity
from services.worker.session_handle import SessionHandle
from tests.support.builders import layout, spec
from tests.support.early_end import TIMEOUT, early_end

TICKET = Ticket(link_id=1, first_token=0, num_tokens=3, shards=(ShardTicket((0, 0, 0), ()),))
READY = frames.Ready(
    pid=1, layout=layout(), descriptors=(), fingerprint_parts={}, max_model_len=64, num_kv_tokens=64, eos_token_ids=()
)
PAUSES = (0.05, 0.5)
"""Seconds for the refusal to arrive unseen; the second for a machine that is too slow for the first."""


@pytest.mark.parametrize(
    "refusal",
    [
        UnavailableError("the link is down", leg=Leg.TRANSFER, reason="LINK_DOWN", peer_incarnation=8),
        FencedError("another life", leg=Leg.PREFILL, reason="INCARNATION_MISMATCH", peer_incarnation=9),
    ],
    ids=lambda refusal: refusal.reason,
)
async def test_a_refusal_beside_the_ticket(refusal: PdmeshError) -> None:
    channels = ChannelPool()
    with early_end(refusal) as service:
        row = RankRow(InstanceSpec("prefill-0", Role.PREFILL, "f", {}), RankCoord(), service.endpoint, 8)
        for pause in PAUSES:
            sent: list[Any] = []
            opened = frames.Open(spec=spec(deadline=time.monotonic() + TIMEOUT), remote=True, link_id=1)
            handle = SessionHandle(opened.spec.session, Leg.DECODE, sent.append, lambda handle, reason: None)
            leg = PrefillLeg(opened, handle, WorkerIdentity("decode-0", Role.DECODE, 7, READY), row, channels)
            running = asyncio.ensure_future(leg.run())
            async with asyncio.timeout(TIMEOUT):
                while not sent:  # noqa: ASYNC110  # frames have no event
                    await asyncio.sleep(0.001)
            assert sent == [frames.LegStarted(session=opened.spec.session)]
            service.end(pause)
            await leg.send_ticket(TICKET)
            await running
            assert sent[1:] == [frames.LegFailed(session=opened.spec.session, error=to_error_info(refusal))]
    await channels.close()
