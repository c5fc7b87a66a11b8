"""CreateAcls (key 30), v1-3. The active controller stores the rules; a rule that exists is no error.

SECURITY_DISABLED for each rule without an authorizer, as in Apache Kafka.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import uuid4

from kio.schema.create_acls.v3.response import AclCreationResult, CreateAclsResponse

from penstock.broker.handlers.describe_acls import NO_AUTHORIZER
from penstock.broker.network.requests import RequestContext
from penstock.cluster.controller.acls import create_acls
from penstock.protocol.acls import AclBinding
from penstock.protocol.errors import ApiError, ErrorCode


async def handle(ctx: RequestContext, request: Any) -> Any:
    if ctx.authorizer is None:
        disabled = ApiError(ErrorCode.security_disabled, NO_AUTHORIZER)
        return await _response(ctx, (disabled,) * len(request.creations))
    acls = await ctx.mapped(_binding, request.creations)
    errors = await ctx.services.controller.propose(lambda image: create_acls(image, acls, new_id=uuid4))
    return await _response(ctx, errors)


def _binding(creation: Any) -> AclBinding:
    return AclBinding(
        creation.resource_type,
        creation.resource_name,
        creation.resource_pattern_type,
        creation.principal,
        creation.host,
        creation.operation,
        creation.permission_type,
    )


async def _response(ctx: RequestContext, errors: tuple[ApiError | None, ...]) -> Any:
    return CreateAclsResponse(throttle_time=timedelta(0), results=await ctx.mapped(_result, errors))


def _result(error: ApiError | None) -> AclCreationResult:
    return AclCreationResult(
        error_code=ErrorCode.none if error is None else error.code,
        error_message=None if error is None else error.message,
    )
