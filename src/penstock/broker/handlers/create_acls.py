"""CreateAcls (key 30), v1-3. SECURITY_DISABLED for each rule, as Apache Kafka answers without an authorizer."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from kio.schema.create_acls.v3.response import AclCreationResult, CreateAclsResponse

from penstock.broker.handlers.describe_acls import NO_AUTHORIZER
from penstock.broker.network.requests import RequestContext
from penstock.protocol.errors import ErrorCode


def handle(_: RequestContext, request: Any) -> Any:
    refused = AclCreationResult(error_code=ErrorCode.security_disabled, error_message=NO_AUTHORIZER)
    return CreateAclsResponse(throttle_time=timedelta(0), results=(refused,) * len(request.creations))
