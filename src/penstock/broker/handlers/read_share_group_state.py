"""ReadShareGroupState (key 84), v0. The state of share partitions, for a new share partition leader.

Sent by the leader of the topic partition. The coordinator stores its leader epoch and from then on fences earlier
leaders (FENCED_LEADER_EPOCH). State that was never initialised is INVALID_REQUEST.
"""

from __future__ import annotations

from typing import Any

from penstock.broker.coordinators.share.coordinator import handle_state_request
from penstock.broker.coordinators.share.state_messages import READ
from penstock.broker.network.requests import RequestContext


async def handle(ctx: RequestContext, request: Any) -> Any:
    return await handle_state_request(ctx, READ, request)
