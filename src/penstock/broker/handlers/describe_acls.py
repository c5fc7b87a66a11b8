"""DescribeAcls (key 29), v1-3. SECURITY_DISABLED, as Apache Kafka answers without an authorizer."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from kio.schema.describe_acls.v3.response import DescribeAclsResponse

from penstock.broker.network.requests import RequestContext
from penstock.protocol.errors import ErrorCode

NO_AUTHORIZER: Final = "No Authorizer is configured on the broker"


def handle(_: RequestContext, request: Any) -> Any:
    return DescribeAclsResponse(
        throttle_time=timedelta(0),
        error_code=ErrorCode.security_disabled,
        error_message=NO_AUTHORIZER,
        resources=(),
    )
