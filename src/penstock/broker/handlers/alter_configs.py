"""AlterConfigs (key 33), v0-2. Replaces all settings of a resource; settings not in the request get their default.

The active controller decides. IncrementalAlterConfigs shares `alter_cluster_configs`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from kio.schema.alter_configs.v2.response import AlterConfigsResourceResponse, AlterConfigsResponse

from penstock.broker.config.definitions import NODE_SETTINGS
from penstock.broker.config.effective_settings import node_layers
from penstock.broker.network.requests import RequestContext
from penstock.cluster.controller.alter_configs import (
    AlterConfigsResource,
    AlterConfigsResult,
    ConfigChange,
    ConfigOp,
    NodeConfig,
    replace_configs,
)
from penstock.cluster.controller.decision import Decision
from penstock.cluster.image import ConfigResource

if TYPE_CHECKING:
    from penstock.broker.services import BrokerServices


AlterDecision = Callable[..., Decision[tuple[AlterConfigsResult, ...]]]


async def alter_cluster_configs(
    services: BrokerServices,
    alter: AlterDecision,
    resources: Sequence[AlterConfigsResource],
    validate_only: bool,
) -> tuple[AlterConfigsResult, ...]:
    rules = NodeConfig(node_settings=NODE_SETTINGS, node=node_layers(services.settings, services.image))
    return await services.controller.propose(
        lambda image: alter(image, resources, rules=rules, validate_only=validate_only)
    )


async def handle(ctx: RequestContext, request: Any) -> Any:
    resources = [
        AlterConfigsResource(
            resource=ConfigResource(resource.resource_type, resource.resource_name),
            changes=tuple(ConfigChange(c.name, ConfigOp.SET, c.value) for c in resource.configs),
        )
        for resource in request.resources
    ]
    results = await alter_cluster_configs(ctx.services, replace_configs, resources, request.validate_only)
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
