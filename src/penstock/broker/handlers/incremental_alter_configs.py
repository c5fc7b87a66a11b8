"""IncrementalAlterConfigs (key 44), v0-1. Sets, deletes, appends to and subtracts from single settings.

Topics, groups, one broker, or all brokers (an empty name). What a broker reads only at start is refused, and so are
loggers and client metrics, which have no settings here.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from kio.schema.incremental_alter_configs.v1.response import (
    AlterConfigsResourceResponse,
    IncrementalAlterConfigsResponse,
)

from penstock.broker.config_changes import alter_in_cluster
from penstock.broker.context import RequestContext
from penstock.cluster.controller.alter_configs import (
    AlterResource,
    ConfigChange,
    incremental_alter_configs,
)
from penstock.cluster.state import ConfigResource


async def handle(ctx: RequestContext, request: Any) -> Any:
    resources = [
        AlterResource(
            resource=ConfigResource(resource.resource_type, resource.resource_name),
            changes=tuple(ConfigChange(c.name, c.config_operation, c.value) for c in resource.configs),
        )
        for resource in request.resources
    ]
    results = await alter_in_cluster(ctx.node, incremental_alter_configs, resources, request.validate_only)
    return IncrementalAlterConfigsResponse(
        throttle_time=timedelta(0),
        responses=tuple(
            AlterConfigsResourceResponse(
                error_code=result.error,
                error_message=result.message,
                resource_type=result.resource.type,
                resource_name=result.resource.name,
            )
            for result in results
        ),
    )
