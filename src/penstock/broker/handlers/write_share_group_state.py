"""WriteShareGroupState (key 85), v0-1. Changes the state of share partitions.

Sent by the leader of the topic partition. FENCED_LEADER_EPOCH and FENCED_STATE_EPOCH are final. All parts of a
request that belong to one shard are stored as one batch. Delivery states 32 to 34 are our own: archived, with a dead
letter still to be written.
"""

from __future__ import annotations

from typing import Any

from penstock.broker.coordinators.share.coordinator import handle_state_request
from penstock.broker.coordinators.share.state_messages import WRITE
from penstock.broker.network.requests import RequestContext


async def handle(ctx: RequestContext, request: Any) -> Any:
    return await handle_state_request(ctx, WRITE, request)
