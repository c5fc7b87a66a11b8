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
        return _response(ctx, error=error)
    asked = request.include_cluster_authorized_operations
    return _response(
        ctx,
        brokers=tuple(
            DescribeClusterBroker(
                broker_id=broker.id, host=at.host, port=at.port, rack=broker.rack, is_fenced=broker.fenced
            )
            for broker, at in reachable_brokers(
                ctx.node.image, ctx.listener, with_fenced=request.include_fenced_brokers
            )
        ),
        operations=CLUSTER_OPERATIONS if asked else OPERATIONS_NOT_ASKED,
    )


def _refuse_other_endpoints(endpoint_type: int) -> None:
    if endpoint_type == _CONTROLLERS:
        raise ApiError(
            ErrorCode.mismatched_endpoint_type,
            "The request was sent to an endpoint of type BROKER, but we wanted an endpoint of type CONTROLLER",
        )
    if endpoint_type != _BROKERS:
        raise ApiError(ErrorCode.unsupported_endpoint_type, f"Unsupported endpoint type {endpoint_type}")


def _response(
    ctx: RequestContext,
    *,
    brokers: tuple[Any, ...] = (),
    operations: int = OPERATIONS_NOT_ASKED,
    error: ApiError | None = None,
) -> Any:
    return DescribeClusterResponse(
        throttle_time=timedelta(0),
        error_code=error.code if error else ErrorCode.none,
        error_message=error.message if error else None,
        endpoint_type=_BROKERS,
        cluster_id=ctx.node.cluster_id,
        controller_id=ctx.node.node_id,
        brokers=brokers,
        cluster_authorized_operations=operations,
    )
