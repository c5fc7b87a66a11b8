"""IncrementalAlterConfigs (key 44), v0-1. Sets, deletes, appends to and subtracts from single settings.

Topics, groups, client metrics, one broker, or all brokers (an empty name): decided by the controller. What a broker
reads only at start is refused. The levels of loggers are this node's own affair, so a request that names them is
not relayed as a whole.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

from kio.schema.incremental_alter_configs.v1.response import (
    AlterConfigsResourceResponse,
    IncrementalAlterConfigsResponse,
)

from penstock.broker.broker_loggers import alter_loggers
from penstock.broker.config_changes import alter_in_cluster
from penstock.broker.context import RequestContext
from penstock.cluster.controller.alter_configs import (
    AlterResource,
    ConfigChange,
    incremental_alter_configs,
)
from penstock.cluster.names import parse_node_id
from penstock.cluster.state import ConfigResource, ResourceType
from penstock.protocol.errors import ApiError, ErrorCode


def is_local(request: Any) -> bool:
    return any(resource.resource_type == ResourceType.BROKER_LOGGER for resource in request.resources)


async def handle(ctx: RequestContext, request: Any) -> Any:
    if not is_local(request):
        return await _decided(ctx, request)
    loggers = tuple(each for each in request.resources if each.resource_type == ResourceType.BROKER_LOGGER)
    others = tuple(each for each in request.resources if each.resource_type != ResourceType.BROKER_LOGGER)
    answers = tuple(_alter_loggers(ctx, resource, request.validate_only) for resource in loggers)
    if others:
        answers += (await _decided_by_controller(ctx, replace(request, resources=others))).responses
    return IncrementalAlterConfigsResponse(throttle_time=timedelta(0), responses=answers)


def _alter_loggers(ctx: RequestContext, resource: Any, validate_only: bool) -> AlterConfigsResourceResponse:
    name, error = resource.resource_name, None
    try:
        if (node_id := parse_node_id(name)) is None:
            raise ApiError(ErrorCode.invalid_request, f"Node id must be an integer, but it is: {name}")
        if node_id != ctx.node.node_id:
            message = f"Unexpected node id. Expected {ctx.node.node_id}, but received {name}"
            raise ApiError(ErrorCode.invalid_request, message)
        changes = (ConfigChange(c.name, c.config_operation, c.value) for c in resource.configs)
        alter_loggers(changes, validate_only=validate_only)
    except ApiError as refusal:
        error = refusal
    return AlterConfigsResourceResponse(
        error_code=ErrorCode.none if error is None else error.code,
        error_message=None if error is None else error.message,
        resource_type=resource.resource_type,
        resource_name=name,
    )


async def _decided_by_controller(ctx: RequestContext, request: Any) -> Any:
    if ctx.node.metadata.is_active:
        return await _decided(ctx, request)
    return await ctx.node.channel.call(ctx.api_key, request)


async def _decided(ctx: RequestContext, request: Any) -> Any:
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
