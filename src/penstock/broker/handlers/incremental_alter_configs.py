"""IncrementalAlterConfigs (key 44), v0-1. Sets, deletes, appends to and subtracts from single settings.

The controller decides for topics, groups, client metrics, one broker, or all brokers (empty name). Settings that a
broker reads only at start are refused. Logger levels belong to this node, so a request that names them is not
forwarded as a whole.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

from kio.schema.incremental_alter_configs.v1.response import (
    AlterConfigsResourceResponse,
    IncrementalAlterConfigsResponse,
)

from penstock.broker.config.broker_loggers import alter_loggers
from penstock.broker.handlers.alter_configs import alter_requested_configs
from penstock.broker.network.requests import RequestContext
from penstock.cluster.controller.alter_configs import ConfigChange, incremental_alter_configs, parse_node_id
from penstock.cluster.image import ResourceType
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.steps import Steps


def is_local(ctx: RequestContext, request: Any) -> bool:
    return any(resource.resource_type == ResourceType.BROKER_LOGGER for resource in request.resources)


async def handle(ctx: RequestContext, request: Any) -> Any:
    if not is_local(ctx, request):
        return await _alter(ctx, request)
    answers, others = await ctx.finish_in_slices(_alter_all_loggers(ctx, request))
    if others:
        answers += await _alter_at_controller(ctx, replace(request, resources=others))
    return IncrementalAlterConfigsResponse(throttle_time=timedelta(0), responses=answers)


def _alter_all_loggers(ctx: RequestContext, request: Any) -> Steps[tuple[tuple[Any, ...], tuple[Any, ...]]]:
    """Return the responses for loggers, and the resources that are none."""
    answers, others = [], []
    for resource in request.resources:
        if resource.resource_type == ResourceType.BROKER_LOGGER:
            answers.append(_alter_loggers(ctx, resource, request.validate_only))
        else:
            others.append(resource)
        yield
    return tuple(answers), tuple(others)


def _alter_loggers(ctx: RequestContext, resource: Any, validate_only: bool) -> AlterConfigsResourceResponse:
    name, error = resource.resource_name, None
    try:
        if parse_node_id(name) != ctx.services.node_id:
            message = f"Unexpected node id. Expected {ctx.services.node_id}, but received {name}"
            raise ApiError(ErrorCode.invalid_request, message)
        alter_loggers(map(_change_of, resource.configs), validate_only=validate_only)
    except ApiError as refusal:
        error = refusal
    return _response(resource, error)


def _response(resource: Any, error: ApiError | None) -> AlterConfigsResourceResponse:
    return AlterConfigsResourceResponse(
        error_code=ErrorCode.none if error is None else error.code,
        error_message=None if error is None else error.message,
        resource_type=resource.resource_type,
        resource_name=resource.resource_name,
    )


async def _alter_at_controller(ctx: RequestContext, request: Any) -> tuple[Any, ...]:
    try:
        altered = await ctx.services.channel.call(ctx.api_key, request, here=lambda: _alter(ctx, request))
        return tuple(altered.responses)
    except ApiError as error:
        refusal = error
    return await ctx.mapped(lambda resource: _response(resource, refusal), request.resources)


async def _alter(ctx: RequestContext, request: Any) -> Any:
    responses = await alter_requested_configs(
        ctx, incremental_alter_configs, request, _change_of, AlterConfigsResourceResponse
    )
    return IncrementalAlterConfigsResponse(throttle_time=timedelta(0), responses=responses)


def _change_of(setting: Any) -> ConfigChange:
    return ConfigChange(setting.name, setting.config_operation, setting.value)
