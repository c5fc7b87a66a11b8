"""SaslHandshake (key 17), v0-1. Agrees on a SASL mechanism; begins a re-authentication on a connection that has one.

After v0, clients would send tokens without request headers. That is not supported, so v0 is refused; it is advertised
because librdkafka uses SASL only if it is.
"""

from __future__ import annotations

from typing import Any, Final

from kio.schema.sasl_handshake.v1.response import SaslHandshakeResponse

from penstock.broker.network.authentications import note_refusal
from penstock.broker.network.requests import RequestContext
from penstock.protocol.errors import ErrorCode
from penstock.security.authentication import Authentication

_WITH_HEADERS_FROM: Final = 1


def handle(ctx: RequestContext, request: Any) -> Any:
    connection = ctx.connection
    authentication = None if connection is None else connection.authentication
    if connection is None or not isinstance(authentication, Authentication):
        return SaslHandshakeResponse(error_code=ErrorCode.illegal_sasl_state, mechanisms=())
    if ctx.version < _WITH_HEADERS_FROM:
        reason = "SaslHandshake v0, after which the client would send tokens without request headers"
        note_refusal(ctx, authentication, reason)
        connection.close_after_replies()
        return SaslHandshakeResponse(
            error_code=ErrorCode.unsupported_version, mechanisms=authentication.mechanisms
        )
    now_ms = ctx.services.now_ms()
    result = authentication.handshake(request.mechanism, now_ms)
    if not authentication.is_complete(now_ms):
        connection.authenticates_again()
    if authentication.is_failed:
        note_refusal(ctx, authentication, f"SaslHandshake: {result.error.name}")
        connection.close_after_replies()
    return SaslHandshakeResponse(error_code=result.error, mechanisms=result.mechanisms)
