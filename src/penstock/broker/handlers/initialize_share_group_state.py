"""InitializeShareGroupState (key 83), v0. Sets the state epoch and start offset of share partitions (-1: unknown).

Sent by the group coordinator. A repeated request changes nothing; a reset needs a larger state epoch, or it gets
FENCED_STATE_EPOCH.
"""

from __future__ import annotations

from typing import Any

from penstock.broker.coordinators.share.coordinator import handle_state_request
from penstock.broker.coordinators.share.state_messages import INITIALIZE
from penstock.broker.network.requests import RequestContext


async def handle(ctx: RequestContext, request: Any) -> Any:
    return await handle_state_request(ctx, INITIALIZE, request)
