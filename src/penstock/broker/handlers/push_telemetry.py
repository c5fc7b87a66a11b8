"""PushTelemetry (key 72), v0. Metrics of a client: checked, bounded and counted, never decoded.

After UNKNOWN_SUBSCRIPTION_ID the client sends GetTelemetrySubscriptions again; a push before its interval gets
THROTTLING_QUOTA_EXCEEDED.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from kio.schema.push_telemetry.v0.response import PushTelemetryResponse

from penstock.broker.metrics.client_telemetry import MetricsPush
from penstock.broker.network.requests import RequestContext
from penstock.protocol.errors import ApiError, ErrorCode


def handle(ctx: RequestContext, request: Any) -> Any:
    push = MetricsPush(len(request.metrics), request.compression_type, request.terminating)
    code = ErrorCode.none
    try:
        ctx.services.telemetry.record_push(ctx, request.client_instance_id, request.subscription_id, push)
    except ApiError as error:
        code = error.code
        ctx.services.metrics.count_error("push_telemetry", code.name)
    return PushTelemetryResponse(throttle_time=timedelta(0), error_code=code)
