"""AlterConfigs (key 33), v0-2. Replaces all of a resource's settings; what is not named returns to its default."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from kio.schema.alter_configs.v2.response import AlterConfigsResourceResponse, AlterConfigsResponse

from penstock.broker.config_changes import alter_in_cluster
from penstock.broker.context import RequestContext
from penstock.cluster.controller.alter_configs import (
    AlterResource,
    ConfigChange,
    ConfigOp,
    replace_configs,
)
from penstock.cluster.state import ConfigResource


async def handle(ctx: RequestContext, request: Any) -> Any:
    resources = [
        AlterResource(
            resource=ConfigResource(resource.resource_type, resource.resource_name),
            changes=tuple(ConfigChange(c.name, ConfigOp.SET, c.value) for c in resource.configs),
        )
        for resource in request.resources
    ]
    results = await alter_in_cluster(ctx.node, replace_configs, resources, request.validate_only)
    return AlterConfigsResponse(
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
