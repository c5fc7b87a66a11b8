"""InitializeShareGroupState (key 83), v0. Gives share partitions a state epoch and a start offset (-1: not yet known).

Asked by the group coordinator. The same again changes nothing; what is to be reset needs a larger state epoch:
FENCED_STATE_EPOCH otherwise."""

from __future__ import annotations

from typing import Any

from penstock.broker.context import RequestContext
from penstock.broker.share_state.coordinator import serve
from penstock.broker.share_state.wire import INITIALIZE


async def handle(ctx: RequestContext, request: Any) -> Any:
    return await serve(ctx, INITIALIZE, request)
