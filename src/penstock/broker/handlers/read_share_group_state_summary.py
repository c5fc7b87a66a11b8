"""ReadShareGroupStateSummary (key 87), v0-1. Where share partitions are, without their batches.

Asked by the group coordinator; changes nothing, and fences nobody. What was never initialised has start offset -1."""

from __future__ import annotations

from typing import Any

from penstock.broker.context import RequestContext
from penstock.broker.share_state.coordinator import serve
from penstock.broker.share_state.wire import SUMMARY


async def handle(ctx: RequestContext, request: Any) -> Any:
    return await serve(ctx, SUMMARY, request)
