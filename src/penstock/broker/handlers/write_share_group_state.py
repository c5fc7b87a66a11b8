"""WriteShareGroupState (key 85), v0-1. Changes the state of share partitions.

Asked by the leader of the source partition. FENCED_LEADER_EPOCH and FENCED_STATE_EPOCH are final. All of one request
that belongs to one shard is stored as one batch. Delivery states 32 to 34 are our own: archived, and to be buried in
the dead-letter topic."""

from __future__ import annotations

from typing import Any

from penstock.broker.context import RequestContext
from penstock.broker.share_state.coordinator import serve
from penstock.broker.share_state.wire import WRITE


async def handle(ctx: RequestContext, request: Any) -> Any:
    return await serve(ctx, WRITE, request)
