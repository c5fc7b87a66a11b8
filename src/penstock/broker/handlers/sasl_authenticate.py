"""SaslAuthenticate (key 36), v0-2. One step of the SASL exchange that SaslHandshake began.

A refusal is sent after `connection.failed.authentication.delay.ms`, and ends the connection. Steps that take
milliseconds run in a thread, one at a time: unauthenticated clients must not occupy the threads that read from disk.
A token with an unknown key waits until the keys are read again, where that may help.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any, Final

from kio.schema.sasl_authenticate.v2.response import SaslAuthenticateResponse

from penstock.broker.network.authentications import note_refusal
from penstock.broker.network.connection import Connection
from penstock.broker.network.requests import RequestContext
from penstock.protocol.errors import ErrorCode
from penstock.security.authentication import Authentication, Step

_FAILURE_DELAY: Final = "connection.failed.authentication.delay.ms"


def handle(ctx: RequestContext, request: Any) -> Any:
    connection = ctx.connection
    authentication = None if connection is None else connection.authentication
    if connection is None or not isinstance(authentication, Authentication):
        message = "SaslAuthenticate request received on a listener without SASL"
        return _response(Step(error=ErrorCode.illegal_sasl_state, message=message))
    if authentication.takes_long(request.auth_bytes):
        return _authenticate_in_thread(ctx, connection, authentication, request.auth_bytes)
    if authentication.lacks_key(request.auth_bytes):
        return _authenticate_with_newer_keys(ctx, connection, authentication, request.auth_bytes)
    step = authentication.authenticate(request.auth_bytes, ctx.services.now_ms())
    if authentication.is_failed:
        return _refuse(ctx, connection, authentication, step)
    return _accept(ctx, connection, authentication, step)


async def _authenticate_with_newer_keys(
    ctx: RequestContext, connection: Connection, authentication: Authentication, message: bytes
) -> SaslAuthenticateResponse:
    wait_for_newer_keys = ctx.services.server.wait_for_newer_keys
    assert wait_for_newer_keys is not None
    await wait_for_newer_keys(connection.listener)
    step = authentication.authenticate(message, ctx.services.now_ms())
    if authentication.is_failed:
        return await _refuse(ctx, connection, authentication, step)
    return _accept(ctx, connection, authentication, step)


async def _authenticate_in_thread(
    ctx: RequestContext, connection: Connection, authentication: Authentication, message: bytes
) -> SaslAuthenticateResponse:
    services = ctx.services
    async with services.server.long_logins:
        step = await services.in_thread(authentication.authenticate, message, services.now_ms())
    if authentication.is_failed:
        return await _refuse(ctx, connection, authentication, step)
    return _accept(ctx, connection, authentication, step)


def _accept(
    ctx: RequestContext, connection: Connection, authentication: Authentication, step: Step
) -> SaslAuthenticateResponse:
    if step.reason is not None:  # a token that is refused once the client has acknowledged it
        note_refusal(ctx, authentication, step.reason)
    if step.principal is not None:
        connection.authenticated(step.principal, authentication.session_left_ms(ctx.services.now_ms()))
    return _response(step)


async def _refuse(
    ctx: RequestContext, connection: Connection, authentication: Authentication, step: Step
) -> SaslAuthenticateResponse:
    if step.reason is not None:
        note_refusal(ctx, authentication, step.reason)
    services = ctx.services
    services.server.authentication_failed(connection)
    delay_ms = services.settings.listener_value(connection.listener, _FAILURE_DELAY)
    assert isinstance(delay_ms, int)
    await asyncio.sleep(delay_ms / 1000)
    connection.close_after_replies()
    return _response(step)


def _response(step: Step) -> SaslAuthenticateResponse:
    return SaslAuthenticateResponse(
        error_code=step.error,
        error_message=step.message,
        auth_bytes=step.reply,
        session_lifetime=timedelta(milliseconds=step.session_lifetime_ms),
    )
