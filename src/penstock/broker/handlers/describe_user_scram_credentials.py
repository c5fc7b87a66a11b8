"""DescribeUserScramCredentials (key 50), v0. Tells mechanisms and iterations of users, never salts or keys."""

from __future__ import annotations

from collections import Counter, defaultdict
from datetime import timedelta
from typing import Any

from kio.schema.describe_user_scram_credentials.v0.response import (
    CredentialInfo,
    DescribeUserScramCredentialsResponse,
    DescribeUserScramCredentialsResult,
)

from penstock.broker.network.requests import RequestContext, in_slices
from penstock.protocol.errors import ErrorCode
from penstock.protocol.steps import Steps


@in_slices
def handle(ctx: RequestContext, request: Any) -> Steps[Any]:
    """The response shows the credentials of one image."""
    found: defaultdict[str, list[CredentialInfo]] = defaultdict(list)
    for (user, mechanism), credential in sorted(ctx.services.image.security.credentials.items()):
        found[user].append(CredentialInfo(mechanism=mechanism, iterations=credential.iterations))
        yield
    # No names, whether null or empty, stand for all users.
    names = Counter(each.name for each in request.users or ()) or Counter(dict.fromkeys(found, 1))
    results = []
    for name, count in names.items():
        results.append(_result(name, count, found.get(name, [])))
        yield
    return DescribeUserScramCredentialsResponse(
        throttle_time=timedelta(0),
        error_code=ErrorCode.none,
        error_message=None,
        results=tuple(results),
    )


def _result(name: str, count: int, infos: list[CredentialInfo]) -> DescribeUserScramCredentialsResult:
    error, message = ErrorCode.none, None
    if count > 1:
        error = ErrorCode.duplicate_resource
        message = f"Cannot describe SCRAM credentials for the same user twice in a single request: {name}"
    elif not infos:
        error = ErrorCode.resource_not_found
        message = f"Attempt to describe a user credential that does not exist: {name}"
    return DescribeUserScramCredentialsResult(
        user=name,
        error_code=error,
        error_message=message,
        credential_infos=() if error is not ErrorCode.none else tuple(infos),
    )
