"""DescribeAcls (key 29), v1-3. The rules that match a filter. SECURITY_DISABLED without an authorizer.

The rules that follow from tenants are among them, although DeleteAcls does not delete them.
"""

from __future__ import annotations

from collections import defaultdict
from datetime import timedelta
from typing import Any, Final

from kio.schema.describe_acls.v3.response import AclDescription, DescribeAclsResource, DescribeAclsResponse

from penstock.broker.network.requests import RequestContext, in_slices
from penstock.cluster.controller.acls import check_filter
from penstock.protocol.acls import AclBinding, AclFilter
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.steps import Steps

NO_AUTHORIZER: Final = "No Authorizer is configured on the broker"


@in_slices
def handle(ctx: RequestContext, request: Any) -> Steps[Any]:
    """All rules are those of the image at the beginning, which does not change."""
    if ctx.authorizer is None:
        return _response(ErrorCode.security_disabled, NO_AUTHORIZER)
    wanted = filter_of(request)
    try:
        check_filter(wanted)
    except ApiError as error:
        return _response(error.code, error.message)
    found: dict[tuple[int, str, int], list[AclBinding]] = defaultdict(list)
    for acl in {*ctx.services.image.security.acl_ids, *ctx.services.tenants.rules.values()}:
        if wanted.matches(acl):
            found[acl.resource_type, acl.resource_name, acl.pattern_type].append(acl)
        yield
    resources = []
    for acls in found.values():
        resources.append(_resource(acls))
        yield
    return _response(ErrorCode.none, None, tuple(resources))


def filter_of(asked: Any) -> AclFilter:
    """Read a filter from a DescribeAcls request, or from one of a DeleteAcls request."""
    return AclFilter(
        asked.resource_type_filter,
        asked.resource_name_filter,
        asked.pattern_type_filter,
        asked.principal_filter,
        asked.host_filter,
        asked.operation,
        asked.permission_type,
    )


def _resource(acls: list[AclBinding]) -> Any:
    first = acls[0]
    return DescribeAclsResource(
        resource_type=first.resource_type,
        resource_name=first.resource_name,
        pattern_type=first.pattern_type,
        acls=tuple(
            AclDescription(
                principal=acl.principal,
                host=acl.host,
                operation=acl.operation,
                permission_type=acl.permission,
            )
            for acl in acls
        ),
    )


def _response(error: ErrorCode, message: str | None, resources: tuple[Any, ...] = ()) -> Any:
    return DescribeAclsResponse(
        throttle_time=timedelta(0), error_code=error, error_message=message, resources=resources
    )
