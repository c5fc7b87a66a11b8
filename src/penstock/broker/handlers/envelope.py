"""Envelope (key 58), v0. A client's request that another node passes on; only the active controller opens it.

The answer's data is the committed metadata offset in eight bytes and the frame of the reply, so that the other node
can wait until it shows what was decided. Only requests that are relayed at all may be in an envelope.
"""

from __future__ import annotations

from typing import Any

from kio.schema.envelope.v0.response import EnvelopeResponse

from penstock.broker.context import RequestContext
from penstock.broker.relay import answer_enveloped
from penstock.protocol.errors import ApiError, ErrorCode, MalformedFrame


async def handle(ctx: RequestContext, request: Any) -> Any:
    if not ctx.node.metadata.is_active:
        return EnvelopeResponse(error_code=ErrorCode.not_controller)
    try:
        data = await answer_enveloped(ctx, request.request_data, _host(request.client_host_address))
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
