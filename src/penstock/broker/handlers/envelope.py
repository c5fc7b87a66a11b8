"""Envelope (key 58), v0. Carries a client request that another node forwards; only the active controller serves it.

The response data is the committed metadata offset in eight bytes, followed by the frame of the reply, so that the
forwarding node can wait until its image shows the decision. An envelope may only contain requests that brokers
forward.
"""

from __future__ import annotations

from typing import Any

from kio.schema.envelope.v0.response import EnvelopeResponse

from penstock.broker.controller.forwarding import handle_envelope
from penstock.broker.network.requests import RequestContext
from penstock.protocol.errors import ApiError, ErrorCode, MalformedFrame


async def handle(ctx: RequestContext, request: Any) -> Any:
    if not ctx.services.metadata.is_active:
        return EnvelopeResponse(error_code=ErrorCode.not_controller)
    try:
        data = await handle_envelope(
            ctx, request.request_data, _host(request.client_host_address), request.request_principal
        )
    except MalformedFrame:
        return EnvelopeResponse(error_code=ErrorCode.invalid_request)
    except ApiError as error:
        return EnvelopeResponse(error_code=error.code)
    return EnvelopeResponse(response_data=data, error_code=ErrorCode.none)


def _host(packed: bytes) -> str:
    from ipaddress import ip_address

    try:
        return str(ip_address(packed))
    except ValueError:
        return ""
