"""DescribeDelegationToken (key 41), v1-3. Returns tokens with their HMACs, from the image of this node.

A client sees the tokens that it owns or may renew. For others it needs DESCRIBE on the token, or DESCRIBE_TOKENS on the
owner. A request without a list of owners means all owners, and one with an empty list none. As in Apache Kafka a token
is shown until the controller removes it, also when it has expired.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from kio.schema.describe_delegation_token.v3.response import (
    DescribedDelegationToken,
    DescribedDelegationTokenRenewer,
    DescribeDelegationTokenResponse,
)

from penstock.broker.controller.delegation_tokens import require_token_request, require_tokens_enabled
from penstock.broker.network.requests import RequestContext
from penstock.cluster.rare_records import DelegationTokenRecord
from penstock.protocol.acls import Operation, ResourceType
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.security.principal import Principal


def handle(ctx: RequestContext, request: Any) -> Any:
    try:
        require_token_request(ctx)
        require_tokens_enabled(ctx)
    except ApiError as error:
        return _response(error.code)
    owners = None
    if request.owners is not None:
        owners = {f"{each.principal_type}:{each.principal_name}" for each in request.owners}
    tokens = ctx.services.image.security.tokens.values()
    return _response(
        ErrorCode.none, *(_described(ctx, token) for token in tokens if _is_shown(ctx, token, owners))
    )


def _is_shown(ctx: RequestContext, token: DelegationTokenRecord, owners: set[str] | None) -> bool:
    concerned = {token.owner, *token.renewers}
    if owners is not None and owners.isdisjoint(concerned):
        return False
    return (
        str(ctx.principal) in concerned
        or ctx.may(Operation.DESCRIBE, ResourceType.DELEGATION_TOKEN, token.token_id)
        or ctx.may(Operation.DESCRIBE_TOKENS, ResourceType.USER, token.owner)
    )


def _described(ctx: RequestContext, token: DelegationTokenRecord) -> DescribedDelegationToken:
    owner, requester = Principal.parse(token.owner), Principal.parse(token.requester)
    return DescribedDelegationToken(
        principal_type=owner.type,
        principal_name=owner.name,
        token_requester_principal_type=requester.type,
        token_requester_principal_name=requester.name,
        issue_timestamp=token.issue_timestamp,
        expiry_timestamp=token.expiration_timestamp,
        max_timestamp=token.max_timestamp,
        token_id=token.token_id,
        hmac=ctx.services.token_hmacs.of(token.token_id),
        renewers=tuple(
            DescribedDelegationTokenRenewer(principal_type=each.type, principal_name=each.name)
            for each in map(Principal.parse, token.renewers)
        ),
    )


def _response(error: ErrorCode, *tokens: DescribedDelegationToken) -> DescribeDelegationTokenResponse:
    return DescribeDelegationTokenResponse(error_code=error, tokens=tokens, throttle_time=timedelta(0))
