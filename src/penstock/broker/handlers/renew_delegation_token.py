"""RenewDelegationToken (key 39), v1-2. The owner or a renewer moves the time at which a token expires.

That time is never after the token's longest life. The node of the client refuses the request as CreateDelegationToken.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from kio.schema.renew_delegation_token.v2.response import RenewDelegationTokenResponse

from penstock.broker.controller.delegation_tokens import change_token, token_lifetimes
from penstock.broker.network.requests import RequestContext
from penstock.cluster.controller.decision import Decision
from penstock.cluster.controller.delegation_tokens import renew_token
from penstock.cluster.image import ClusterImage
from penstock.protocol.errors import ErrorCode


def is_local(ctx: RequestContext, request: Any) -> bool:
    return not ctx.may_ask_about_tokens


async def handle(ctx: RequestContext, request: Any) -> Any:
    def decide(image: ClusterImage, token_id: str | None) -> Decision[int]:
        return renew_token(
            image,
            token_id,
            principal=str(ctx.principal),
            period_ms=request.renew_period // timedelta(milliseconds=1),
            lifetimes=token_lifetimes(ctx.services.settings),
            now_ms=ctx.services.now_ms(),
        )

    return await change_token(ctx, request.hmac, decide, _response)


def _response(error: ErrorCode, expires: datetime) -> RenewDelegationTokenResponse:
    return RenewDelegationTokenResponse(
        error_code=error, expiry_timestamp=expires, throttle_time=timedelta(0)
    )
