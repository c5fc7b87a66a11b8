"""DeleteShareGroupState (key 86), v0. Deletes the state of share partitions; state that does not exist is no error.

Sent by the group coordinator. A partition number below -1 is not a partition: it carries the group epoch at which the
deletion was decided, and state initialised later is kept (FENCED_STATE_EPOCH). An at-most-once group keeps its state
(POLICY_VIOLATION). Dead letters that are still pending are written nevertheless.
"""

from __future__ import annotations

from typing import Any

from penstock.broker.coordinators.share.coordinator import handle_state_request
from penstock.broker.coordinators.share.state_messages import DELETE
from penstock.broker.network.requests import RequestContext


async def handle(ctx: RequestContext, request: Any) -> Any:
    return await handle_state_request(ctx, DELETE, request)
