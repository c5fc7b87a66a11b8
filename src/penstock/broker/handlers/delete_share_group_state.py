"""DeleteShareGroupState (key 86), v0. Forgets the state of share partitions; what was never there is no error.

Asked by the group coordinator. A number below -1 after a partition is not one, but says at which epoch of the group
that was decided: what was begun later stays (FENCED_STATE_EPOCH). A group that is at-most-once forgets nothing
(POLICY_VIOLATION). Dead letters that are still to be buried are buried nevertheless."""

from __future__ import annotations

from typing import Any

from penstock.broker.context import RequestContext
from penstock.broker.share_state.coordinator import serve
from penstock.broker.share_state.wire import DELETE


async def handle(ctx: RequestContext, request: Any) -> Any:
    return await serve(ctx, DELETE, request)
