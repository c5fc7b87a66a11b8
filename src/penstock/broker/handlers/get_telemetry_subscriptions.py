"""GetTelemetrySubscriptions (key 71), v0. The metrics that a client must push, by matching subscriptions (KIP-714).

Without a matching subscription the client pushes nothing, and requests its subscription again after the interval.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from kio.schema.get_telemetry_subscriptions.v0.response import GetTelemetrySubscriptionsResponse

from penstock.broker.metrics.client_telemetry import ACCEPTED_COMPRESSION
from penstock.broker.network.requests import RequestContext
from penstock.protocol.errors import ErrorCode


def handle(ctx: RequestContext, request: Any) -> Any:
    telemetry = ctx.services.telemetry
    instance_id, asked = telemetry.ask(ctx, request.client_instance_id)
    return GetTelemetrySubscriptionsResponse(
        throttle_time=timedelta(0),
        error_code=ErrorCode.none,
        client_instance_id=instance_id,
        subscription_id=asked.subscription_id,
        accepted_compression_types=ACCEPTED_COMPRESSION,
        push_interval=timedelta(milliseconds=asked.interval_ms),
        telemetry_max_bytes=telemetry.payload_bytes_max,
        delta_temporality=True,
        requested_metrics=asked.metrics,
    )
