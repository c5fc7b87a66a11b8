"""BrokerHeartbeat (key 63), v0-1. A broker reports that it is alive, and its metadata offset.

The broker also requests to be unfenced or to shut down. The controller remembers the connection: if it closes, the
controller fences the broker sooner. Only the active controller serves this API. A broker that was replaced or
unregistered gets STALE_BROKER_EPOCH and registers again.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from kio.schema.broker_heartbeat.v1.response import BrokerHeartbeatResponse

from penstock.broker.network.requests import RequestContext
from penstock.cluster.controller.heartbeats import BrokerHeartbeat
from penstock.protocol.errors import ApiError, ErrorCode


async def handle(ctx: RequestContext, request: Any) -> Any:
    try:
        reply = await ctx.services.controller.heartbeat(
            BrokerHeartbeat(
                broker_id=request.broker_id,
                broker_epoch=request.broker_epoch,
                metadata_offset=request.current_metadata_offset,
                want_fence=request.want_fence,
                want_shutdown=request.want_shut_down,
            ),
            ctx.connection,
        )
    except ApiError as error:
        return BrokerHeartbeatResponse(
            throttle_time=timedelta(0), error_code=error.code, should_shut_down=False
        )
    return BrokerHeartbeatResponse(
        throttle_time=timedelta(0),
        error_code=ErrorCode.none,
        is_caught_up=reply.is_caught_up,
        is_fenced=reply.is_fenced,
        should_shut_down=reply.should_shut_down,
    )
