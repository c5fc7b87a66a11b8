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
from penstock.protocol.steps import Steps

if TYPE_CHECKING:
    from penstock.broker.services import BrokerServices


AlterDecision = Callable[..., Steps[Decision[tuple[AlterConfigsResult, ...]]]]


async def alter_cluster_configs(
    services: BrokerServices,
    alter: AlterDecision,
    resources: Sequence[AlterConfigsResource],
    validate_only: bool,
) -> tuple[AlterConfigsResult, ...]:
    authorizer = services.authorizer
    rules = NodeConfig(
        node_settings=NODE_SETTINGS,
        node=node_layers(services.settings, services.image),
        super_users=frozenset(name for _, name in (authorizer.super_users if authorizer is not None else ())),
    )
    return await services.controller.propose(
        lambda image: alter(image, resources, rules=rules, validate_only=validate_only)
    )


async def alter_requested_configs(
    ctx: RequestContext,
    alter: AlterDecision,
    request: Any,
    change_of: Callable[[Any], ConfigChange],
    response_class: Any,
) -> tuple[Any, ...]:
    """Alter the resources of a request; return one response for each. `change_of` reads a setting in the request."""

    def alteration(resource: Any) -> AlterConfigsResource:
        return AlterConfigsResource(
            resource=ConfigResource(resource.resource_type, resource.resource_name),
            changes=tuple(map(change_of, resource.configs)),
        )

    def response(result: AlterConfigsResult) -> Any:
        return response_class(
            error_code=result.error,
            error_message=result.message,
            resource_type=result.resource.type,
            resource_name=result.resource.name,
        )

    resources = await ctx.mapped(alteration, request.resources)
    results = await alter_cluster_configs(ctx.services, alter, resources, request.validate_only)
    return await ctx.mapped(response, results)


async def handle(ctx: RequestContext, request: Any) -> Any:
    responses = await alter_requested_configs(
        ctx, replace_configs, request, _change_of, AlterConfigsResourceResponse
    )
    return AlterConfigsResponse(throttle_time=timedelta(0), responses=responses)


def _change_of(setting: Any) -> ConfigChange:
    return ConfigChange(setting.name, ConfigOp.SET, setting.value)
