"""BrokerRegistration (key 62), v0-4. A broker joins the cluster; only the active controller serves it.

The reply carries the broker epoch, and the broker starts fenced. By sending `previous_broker_epoch` the broker promises
that it has lost nothing it wrote under that epoch. A second live broker with the same id gets
DUPLICATE_BROKER_REGISTRATION.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from kio.schema.broker_registration.v4.response import BrokerRegistrationResponse

from penstock.broker.network.requests import RequestContext
from penstock.cluster.controller.brokers import BrokerRegistration
from penstock.cluster.metadata_records import BrokerEndpoint, BrokerFeature
from penstock.protocol.errors import ApiError, ErrorCode


async def handle(ctx: RequestContext, request: Any) -> Any:
    try:
        if request.cluster_id != ctx.services.cluster_id:
            raise ApiError(ErrorCode.inconsistent_cluster_id)
        epoch = await ctx.services.controller.register(
            _registration(request), previous_epoch=request.previous_broker_epoch
        )
    except ApiError as error:
        return BrokerRegistrationResponse(throttle_time=timedelta(0), error_code=error.code)
    return BrokerRegistrationResponse(
        throttle_time=timedelta(0), error_code=ErrorCode.none, broker_epoch=epoch
    )


def _registration(request: Any) -> BrokerRegistration:
    if request.incarnation_id is None or not request.listeners:
        raise ApiError(ErrorCode.invalid_registration)
    return BrokerRegistration(
        broker_id=request.broker_id,
        incarnation=request.incarnation_id,
        endpoints=tuple(
            BrokerEndpoint(
                name=listener.name,
                host=listener.host,
                port=listener.port,
                security_protocol=listener.security_protocol,
            )
            for listener in request.listeners
        ),
        features=tuple(
            BrokerFeature(
                name=feature.name,
                min_supported_version=feature.min_supported_version,
                max_supported_version=feature.max_supported_version,
            )
            for feature in request.features
        ),
        rack=request.rack,
        log_dirs=tuple(directory for directory in request.log_dirs if directory is not None),
    )
