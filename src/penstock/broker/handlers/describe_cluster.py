"""DescribeCluster (key 60), v0-2. Brokers, cluster id and controller, as seen from this listener.

Only brokers are returned, because listeners belong to brokers, not controllers. A node that has not joined a cluster
returns an empty cluster id. The controller id is the active controller if that is a broker which the client can reach;
otherwise it is this node, which forwards requests to the controller.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from kio.schema.describe_cluster.v2.response import DescribeClusterBroker, DescribeClusterResponse

from penstock.broker.network.requests import RequestContext, cluster_operations
from penstock.broker.partition.client_view import (
    ReachableBroker,
    reachable_brokers,
)
from penstock.protocol.errors import ApiError, ErrorCode

_BROKERS: Final = 1
_CONTROLLERS: Final = 2


def handle(ctx: RequestContext, request: Any) -> Any:
    try:
        _refuse_other_endpoints(request.endpoint_type)
    except ApiError as error:
        return _error_response(error)
    services = ctx.services
    brokers = reachable_brokers(services.image, ctx.listener, with_fenced=request.include_fenced_brokers)
    return DescribeClusterResponse(
        throttle_time=timedelta(0),
        error_code=ErrorCode.none,
        endpoint_type=_BROKERS,
        cluster_id=services.cluster_id if services.quorum.has_cluster else "",
        controller_id=_controller(ctx, brokers),
        brokers=tuple(
            DescribeClusterBroker(
                broker_id=broker.id, host=at.host, port=at.port, rack=broker.rack, is_fenced=broker.fenced
            )
            for broker, at in brokers
        ),
        cluster_authorized_operations=cluster_operations(ctx, request),
    )


def _controller(ctx: RequestContext, brokers: list[ReachableBroker]) -> int:
    leader_id = ctx.services.quorum.leader_id
    is_reachable = any(found.broker.id == leader_id and not found.broker.fenced for found in brokers)
    return leader_id if is_reachable else ctx.services.node_id


def _refuse_other_endpoints(endpoint_type: int) -> None:
    if endpoint_type == _CONTROLLERS:
        raise ApiError(
            ErrorCode.mismatched_endpoint_type,
            "The request was sent to an endpoint of type BROKER, but we wanted an endpoint of type CONTROLLER",
        )
    if endpoint_type != _BROKERS:
        raise ApiError(ErrorCode.unsupported_endpoint_type, f"Unsupported endpoint type {endpoint_type}")


def _error_response(error: ApiError) -> Any:
    return DescribeClusterResponse(
        throttle_time=timedelta(0),
        error_code=error.code,
        error_message=error.message,
        cluster_id="",
        brokers=(),
    )
