"""AlterConfigs (key 33), v0-2. Replaces all settings of a resource; settings not in the request get their default.

The active controller decides. IncrementalAlterConfigs shares `alter_requested_configs`.
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


async def alter_requested_configs(
    services: BrokerServices,
    alter: AlterDecision,
    request: Any,
    change_of: Callable[[Any], ConfigChange],
    response_class: Any,
) -> tuple[Any, ...]:
    """Alter the resources of a request; return one response for each. `change_of` reads a setting in the request."""
    resources = [
        AlterConfigsResource(
            resource=ConfigResource(resource.resource_type, resource.resource_name),
            changes=tuple(map(change_of, resource.configs)),
        )
        for resource in request.resources
    ]
    return tuple(
        response_class(
            error_code=result.error,
            error_message=result.message,
            resource_type=result.resource.type,
            resource_name=result.resource.name,
        )
        for result in await alter_cluster_configs(services, alter, resources, request.validate_only)
    )


async def handle(ctx: RequestContext, request: Any) -> Any:
    responses = await alter_requested_configs(
        ctx.services, replace_configs, request, _change_of, AlterConfigsResourceResponse
    )
    return AlterConfigsResponse(throttle_time=timedelta(0), responses=responses)


def _change_of(setting: Any) -> ConfigChange:
    return ConfigChange(setting.name, ConfigOp.SET, setting.value)
