"""DeleteAcls (key 31), v1-3. SECURITY_DISABLED for each filter, as Apache Kafka answers without an authorizer."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from kio.schema.delete_acls.v3.response import DeleteAclsFilterResult, DeleteAclsResponse

from penstock.broker.handlers.describe_acls import NO_AUTHORIZER
from penstock.broker.network.requests import RequestContext
from penstock.protocol.errors import ErrorCode


def handle(_: RequestContext, request: Any) -> Any:
    refused = DeleteAclsFilterResult(
        error_code=ErrorCode.security_disabled, error_message=NO_AUTHORIZER, matching_acls=()
    )
    return DeleteAclsResponse(throttle_time=timedelta(0), filter_results=(refused,) * len(request.filters))
