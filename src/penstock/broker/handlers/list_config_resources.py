"""ListConfigResources (key 74), v0-1. What DescribeConfigs may be asked about: all topics and brokers, and the groups
and client metrics subscriptions that have settings of their own.

v0 asks for client metrics only. An empty list of types asks for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any, Final

from kio.schema.list_config_resources.v1.response import ConfigResource, ListConfigResourcesResponse

from penstock.broker.context import RequestContext
from penstock.cluster.state import ResourceType
from penstock.protocol.errors import ErrorCode

_ONLY_CLIENT_METRICS_BELOW: Final = 1


def handle(ctx: RequestContext, request: Any) -> Any:
    asked = _asked(ctx, request)
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


def _asked(ctx: RequestContext, request: Any) -> Iterable[int]:
    if ctx.version < _ONLY_CLIENT_METRICS_BELOW:
        return (ResourceType.CLIENT_METRICS,)
    return tuple(dict.fromkeys(request.resource_types)) or tuple(ResourceType)


def _names(ctx: RequestContext, kind: int) -> Iterable[str]:
    image = ctx.node.image
    match kind:
        case ResourceType.TOPIC:
            return sorted(image.topics)
        case ResourceType.BROKER | ResourceType.BROKER_LOGGER:
            return [str(broker) for broker in sorted(image.brokers)]
        case ResourceType.GROUP | ResourceType.CLIENT_METRICS:
            return sorted(name for kind_of, name in image.configs if kind_of == kind)
        case _:
            return ()
