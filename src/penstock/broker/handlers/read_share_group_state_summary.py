"""ReadShareGroupStateSummary (key 87), v0-1. The start offsets of share partitions, without their batches.

Sent by the group coordinator; it changes nothing and fences no leader. State that was never initialised has start
offset -1.
"""

from __future__ import annotations

from typing import Any

from penstock.broker.coordinators.share.coordinator import handle_state_request
from penstock.broker.coordinators.share.state_messages import SUMMARY
from penstock.broker.network.requests import RequestContext


async def handle(ctx: RequestContext, request: Any) -> Any:
    return await handle_state_request(ctx, SUMMARY, request)
