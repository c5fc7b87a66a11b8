"""ReadShareGroupState (key 84), v0. The state of share partitions, for a leader that begins.

Asked by the leader of the source partition: its leader epoch is stored, and earlier leaders are fenced from then on
(FENCED_LEADER_EPOCH). INVALID_REQUEST for what was never initialised."""

from __future__ import annotations

from typing import Any

from penstock.broker.context import RequestContext
from penstock.broker.share_state.coordinator import serve
from penstock.broker.share_state.wire import READ


async def handle(ctx: RequestContext, request: Any) -> Any:
    return await serve(ctx, READ, request)
