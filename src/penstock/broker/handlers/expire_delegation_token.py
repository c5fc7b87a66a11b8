"""ExpireDelegationToken (key 40), v1-2. The owner or a renewer ends a token; a negative period removes it at once.

Connections that were opened with it stay until their session ends. The node of the client refuses the request as
CreateDelegationToken.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from kio.schema.expire_delegation_token.v2.response import ExpireDelegationTokenResponse

from penstock.broker.controller.delegation_tokens import change_token
from penstock.broker.network.requests import RequestContext
from penstock.cluster.controller.decision import Decision
from penstock.cluster.controller.delegation_tokens import expire_token
from penstock.cluster.image import ClusterImage
from penstock.protocol.errors import ErrorCode


def is_local(ctx: RequestContext, request: Any) -> bool:
    return not ctx.may_ask_about_tokens


async def handle(ctx: RequestContext, request: Any) -> Any:
    def decide(image: ClusterImage, token_id: str | None) -> Decision[int]:
        return expire_token(
            image,
            token_id,
            principal=str(ctx.principal),
            period_ms=request.expiry_time_period // timedelta(milliseconds=1),
            now_ms=ctx.services.now_ms(),
        )

    return await change_token(ctx, request.hmac, decide, _response)


def _response(error: ErrorCode, expires: datetime) -> ExpireDelegationTokenResponse:
    return ExpireDelegationTokenResponse(
        error_code=error, expiry_timestamp=expires, throttle_time=timedelta(0)
    )
