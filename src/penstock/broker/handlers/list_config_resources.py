"""ListConfigResources (key 74), v0-1. The resources that DescribeConfigs can describe.

All topics and brokers, and the groups, client metrics subscriptions and tenants that have settings of their own. v0
lists client metrics only. An empty list of types selects all types of Kafka: only who knows of tenants asks for them.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any, Final

from kio.schema.list_config_resources.v1.response import ConfigResource, ListConfigResourcesResponse

from penstock.broker.network.requests import RequestContext
from penstock.cluster.image import ResourceType
from penstock.protocol.errors import ErrorCode

_ONLY_CLIENT_METRICS_BELOW: Final = 1


def handle(ctx: RequestContext, request: Any) -> Any:
    asked = _requested_types(ctx, request)
    unknown = any(kind not in ResourceType.__members__.values() for kind in asked)
    return ListConfigResourcesResponse(
        throttle_time=timedelta(0),
        error_code=ErrorCode.unsupported_version if unknown else ErrorCode.none,
        config_resources=()
        if unknown
        else tuple(
            ConfigResource(resource_name=name, resource_type=kind)
            for kind in asked
            for name in _names(ctx, kind)
        ),
    )


def _requested_types(ctx: RequestContext, request: Any) -> Iterable[int]:
    if ctx.version < _ONLY_CLIENT_METRICS_BELOW:
        return (ResourceType.CLIENT_METRICS,)
    return tuple(dict.fromkeys(request.resource_types)) or tuple(
        kind for kind in ResourceType if kind is not ResourceType.TENANT
    )


def _names(ctx: RequestContext, kind: int) -> Iterable[str]:
    image = ctx.services.image
    match kind:
        case ResourceType.TOPIC:
            return sorted(image.topics)
        case ResourceType.BROKER | ResourceType.BROKER_LOGGER:
            return [str(broker) for broker in sorted(image.brokers)]
        case ResourceType.GROUP | ResourceType.CLIENT_METRICS | ResourceType.TENANT:
            return sorted(name for kind_of, name in image.configs if kind_of == kind)
        case _:
            return ()
