"""DeleteAcls (key 31), v1-3. Deletes the rules that match each filter, and returns them.

SECURITY_DISABLED for each filter without an authorizer, as in Apache Kafka.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from kio.schema.delete_acls.v3.response import (
    DeleteAclsFilterResult,
    DeleteAclsMatchingAcl,
    DeleteAclsResponse,
)

from penstock.broker.handlers.describe_acls import NO_AUTHORIZER, filter_of
from penstock.broker.network.requests import RequestContext
from penstock.cluster.controller.acls import DeletedAcls, delete_acls
from penstock.protocol.acls import AclBinding
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.steps import Steps


async def handle(ctx: RequestContext, request: Any) -> Any:
    if ctx.authorizer is None:
        disabled = DeletedAcls(error=ApiError(ErrorCode.security_disabled, NO_AUTHORIZER))
        return await ctx.finish_in_slices(_response((disabled,) * len(request.filters)))
    filters = await ctx.mapped(filter_of, request.filters)
    deleted = await ctx.services.controller.propose(lambda image: delete_acls(image, filters))
    return await ctx.finish_in_slices(_response(deleted))


def _response(results: tuple[DeletedAcls, ...]) -> Steps[Any]:
    found: list[DeleteAclsFilterResult] = []
    for result in results:
        matching = []
        for acl in result.acls:
            matching.append(_matching(acl))
            yield
        found.append(
            DeleteAclsFilterResult(
                error_code=ErrorCode.none if result.error is None else result.error.code,
                error_message=None if result.error is None else result.error.message,
                matching_acls=tuple(matching),
            )
        )
        yield
    return DeleteAclsResponse(throttle_time=timedelta(0), filter_results=tuple(found))


def _matching(acl: AclBinding) -> Any:
    return DeleteAclsMatchingAcl(
        error_code=ErrorCode.none,
        error_message=None,
        resource_type=acl.resource_type,
        resource_name=acl.resource_name,
        pattern_type=acl.pattern_type,
        principal=acl.principal,
        host=acl.host,
        operation=acl.operation,
        permission_type=acl.permission,
    )
