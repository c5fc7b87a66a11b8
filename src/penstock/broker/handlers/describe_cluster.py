"""DescribeCluster (key 60), v0-2. Brokers and cluster id; this listener knows brokers, not controllers."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from kio.schema.describe_cluster.v2.response import DescribeClusterBroker, DescribeClusterResponse

from penstock.broker.context import RequestContext
from penstock.broker.topology import CLUSTER_OPERATIONS, OPERATIONS_NOT_ASKED, reachable_brokers
from penstock.protocol.errors import ApiError, ErrorCode

_BROKERS: Final = 1
_CONTROLLERS: Final = 2


def handle(ctx: RequestContext, request: Any) -> Any:
    try:
        _refuse_other_endpoints(request.endpoint_type)
    except ApiError as error:
        return _refused(error)
    asked = request.include_cluster_authorized_operations
    return DescribeClusterResponse(
        throttle_time=timedelta(0),
        error_code=ErrorCode.none,
        endpoint_type=_BROKERS,
        cluster_id=ctx.node.cluster_id,
        controller_id=ctx.node.node_id,
        brokers=tuple(
            DescribeClusterBroker(
                broker_id=broker.id, host=at.host, port=at.port, rack=broker.rack, is_fenced=broker.fenced
            )
            for broker, at in reachable_brokers(
                ctx.node.image, ctx.listener, with_fenced=request.include_fenced_brokers
            )
        ),
        cluster_authorized_operations=CLUSTER_OPERATIONS if asked else OPERATIONS_NOT_ASKED,
    )


def _refuse_other_endpoints(endpoint_type: int) -> None:
    if endpoint_type == _CONTROLLERS:
        raise ApiError(
            ErrorCode.mismatched_endpoint_type,
            "The request was sent to an endpoint of type BROKER, but we wanted an endpoint of type CONTROLLER",
        )
    if endpoint_type != _BROKERS:
        raise ApiError(ErrorCode.unsupported_endpoint_type, f"Unsupported endpoint type {endpoint_type}")


def _refused(error: ApiError) -> Any:
    return DescribeClusterResponse(
        throttle_time=timedelta(0),
        error_code=error.code,
        error_message=error.message,
        cluster_id="",
        brokers=(),
    )
