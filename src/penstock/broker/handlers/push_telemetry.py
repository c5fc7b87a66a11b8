"""PushTelemetry (key 72), v0. Metrics that a client was asked for: checked, bounded and counted, never unpacked.

UNKNOWN_SUBSCRIPTION_ID sends the client back to GetTelemetrySubscriptions; a push before its time is
THROTTLING_QUOTA_EXCEEDED.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from kio.schema.push_telemetry.v0.response import PushTelemetryResponse

from penstock.broker.context import RequestContext
from penstock.broker.telemetry import Push
from penstock.protocol.errors import ApiError, ErrorCode


def handle(ctx: RequestContext, request: Any) -> Any:
    push = Push(len(request.metrics), request.compression_type, request.terminating)
    code = ErrorCode.none
    try:
        ctx.node.telemetry.pushed(ctx, request.client_instance_id, request.subscription_id, push)
    except ApiError as error:
        code = error.code
        ctx.node.metrics.count_error("push_telemetry", code.name)
    return PushTelemetryResponse(throttle_time=timedelta(0), error_code=code)
