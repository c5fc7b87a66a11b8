"""CreateDelegationToken (key 38), v1-3. The active controller stores the token, whose HMAC is the password.

The node of the client refuses the request over PLAINTEXT, from anonymous clients, and from clients that have logged in
with a token. Who asks for another owner's token (v3) needs CREATE_TOKENS on that user.
"""

from __future__ import annotations

import secrets
from base64 import urlsafe_b64encode
from datetime import timedelta
from typing import Any, Final

from kio.schema.create_delegation_token.v3.response import CreateDelegationTokenResponse

from penstock.broker.controller.delegation_tokens import (
    require_token_request,
    require_tokens_enabled,
    timestamp,
    token_lifetimes,
    token_limits,
)
from penstock.broker.network.audit import audit_change
from penstock.broker.network.requests import RequestContext
from penstock.cluster.controller.decision import Decision
from penstock.cluster.controller.delegation_tokens import create_token
from penstock.cluster.image import ClusterImage
from penstock.cluster.rare_records import DelegationTokenRecord
from penstock.protocol.acls import Operation, ResourceType
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.security.principal import USER, Principal

#: As many random bits as Kafka's ids have.
_ID_BYTES: Final = 16


def is_local(ctx: RequestContext, request: Any) -> bool:
    return not ctx.may_ask_about_tokens


async def handle(ctx: RequestContext, request: Any) -> Any:
    owner = ctx.principal
    if request.owner_principal_name:
        owner = Principal(request.owner_principal_type or USER, request.owner_principal_name)
    try:
        response = await _create(ctx, request, owner)
    except ApiError as error:
        if error.code is ErrorCode.not_controller:
            raise
        response = _response(ctx, owner, error_code=error.code)
    if ctx.authorizer is not None:
        token = f"token {response.token_id}" if response.token_id else "token"
        audit_change(ctx, (f"{token} of {owner}",), response)
    return response


async def _create(ctx: RequestContext, request: Any, owner: Principal) -> CreateDelegationTokenResponse:
    """Raises ApiError."""
    require_token_request(ctx)
    if owner != ctx.principal and not ctx.demand(Operation.CREATE_TOKENS, ResourceType.USER, str(owner)):
        raise ApiError(ErrorCode.delegation_token_authorization_failed)
    services = ctx.services
    token_id = urlsafe_b64encode(secrets.token_bytes(_ID_BYTES)).decode().rstrip("=")

    def decide(image: ClusterImage) -> Decision[DelegationTokenRecord]:
        decision = create_token(
            image,
            token_id,
            owner=str(owner),
            requester=str(ctx.principal),
            renewers=[f"{each.principal_type}:{each.principal_name}" for each in request.renewers],
            max_lifetime_ms=request.max_lifetime // timedelta(milliseconds=1),
            lifetimes=token_lifetimes(services.settings),
            limits=token_limits(services.settings),
            now_ms=services.now_ms(),
        )
        require_tokens_enabled(ctx)  # as in Apache Kafka, after the types of the renewers
        return decision

    token = await services.metadata.propose(decide)
    return _response(
        ctx,
        owner,
        issue_timestamp=timestamp(token.issue_timestamp),
        expiry_timestamp=timestamp(token.expiration_timestamp),
        max_timestamp=timestamp(token.max_timestamp),
        token_id=token_id,
        hmac=services.token_hmacs.of(token_id),
    )


def _response(ctx: RequestContext, owner: Principal, **values: Any) -> CreateDelegationTokenResponse:
    given: dict[str, Any] = {
        "error_code": ErrorCode.none,
        "issue_timestamp": timestamp(0),
        "expiry_timestamp": timestamp(0),
        "max_timestamp": timestamp(0),
        "token_id": "",
        "hmac": b"",
        **values,
    }
    return CreateDelegationTokenResponse(
        principal_type=owner.type,
        principal_name=owner.name,
        token_requester_principal_type=ctx.principal.type,
        token_requester_principal_name=ctx.principal.name,
        throttle_time=timedelta(0),
        **given,
    )
