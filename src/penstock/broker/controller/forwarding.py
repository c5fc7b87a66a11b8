"""Forwards client requests that only the active controller can handle, from any node that receives them.

The node puts the client's frame into an Envelope. The controller returns the committed metadata offset, in eight bytes,
and the frame of the reply. The client gets the reply once the node that it is connected to has applied that offset.
"""

from __future__ import annotations

import inspect
import struct
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from penstock.broker.controller.channel import CALL_TIMEOUT_S, ENVELOPE_OFFSET, RemoteCall
from penstock.broker.network.apis import (
    APIS,
    RequestHeader,
    decode_request,
    encode_response_in_steps,
    parse_request_header,
    route,
)
from penstock.broker.network.connection import CLOSE_CONNECTION
from penstock.broker.network.requests import RequestContext
from penstock.protocol.errors import ApiError, ErrorCode, MalformedFrame
from penstock.protocol.wire import WireCursor, encode_compact_string
from penstock.security.principal import Principal

if TYPE_CHECKING:
    from penstock.broker.controller.channel import ControllerChannel
    from penstock.protocol.steps import Steps

_SIZE_BYTES: Final = 4
_INT32 = struct.Struct(">i")
_VERSION = struct.Struct(">h")
#: Bounds of a client's timeout: a decision takes a moment, and no request may wait forever.
_TIMEOUT_S_MIN: Final = 1.0
_TIMEOUT_S_MAX: Final = 60.0


async def forward_to_controller(
    context: RequestContext, request: Any, frame: bytes, correlation_id: int
) -> bytes | bytearray:
    """Return the reply to a client, including its size field."""

    async def here() -> bytes | bytearray:
        response = await _handle(context, request)
        return await context.finish_in_slices(
            encode_response_in_steps(context.api_key, context.version, correlation_id, response)
        )

    async def there(leader_id: int, timeout_s: float) -> bytes | bytearray:
        client_host = _packed_host(context.client_host)
        principal = encode_principal(context.principal, is_by_token=context.is_by_token)
        reply = await context.services.channel.send_envelope(
            leader_id, frame, client_host, principal, timeout_s
        )
        return _INT32.pack(len(reply)) + reply if reply else CLOSE_CONNECTION

    try:
        reply = await _handle_if_active(context, here)
        if reply is None:
            reply = await context.services.channel.ask(here, there, _request_timeout_s(request))
        return reply
    except ApiError as error:
        return await context.finish_in_slices(_error_reply(context, request, correlation_id, error))


async def handle_envelope(
    context: RequestContext, frame: bytes, client_host: str, principal: bytes | None
) -> bytes:
    """Handle a forwarded request on the active controller; return the offset and the reply's frame.

    `principal` is who sent the request; None: the node that forwards it. Raises ApiError, MalformedFrame.
    """
    header = parse_request_header(memoryview(frame))
    request = _decode_forwarded(header, frame)
    sender, is_by_token = decode_principal(principal) if principal else (context.principal, False)
    inner = context._replace(
        api_key=header.api_key,
        version=header.version,
        client_id=None if header.client_id is None else header.client_id.decode(errors="replace"),
        client_host=client_host,
        principal=sender,
        is_forwarded_by_token=is_by_token,
    )
    try:
        response = await _handle(inner, request)
        reply = await inner.finish_in_slices(
            encode_response_in_steps(header.api_key, header.version, header.correlation_id, response)
        )
    except ApiError as error:
        if error.code is ErrorCode.not_controller:
            raise
        reply = bytes(
            await inner.finish_in_slices(_error_reply(inner, request, header.correlation_id, error))
        )
    return ENVELOPE_OFFSET.pack(context.services.metadata.applied_offset) + reply[_SIZE_BYTES:]


def forwarded_call(channel: ControllerChannel, node_id: int, api_key: int, request: Any) -> RemoteCall[Any]:
    """Return a call that sends a request of the node itself in an envelope, without a client."""
    from penstock.protocol.schemas import request_encoder, response_reader

    version = APIS[api_key].max_version
    frame = _encode_request(node_id, api_key, version, request, request_encoder(api_key, version))
    is_flexible = route(api_key, version).is_flexible

    async def there(leader_id: int, timeout_s: float) -> Any:
        reply = await channel.send_envelope(leader_id, frame, b"", None, timeout_s)
        position = _INT32.size + is_flexible
        return response_reader(api_key, version)(memoryview(reply), position)

    return there


def encode_principal(principal: Principal, *, is_by_token: bool) -> bytes:
    """Return the principal as in Apache Kafka's envelopes (KIP-590): a version, and DefaultPrincipalData."""
    texts = encode_compact_string(principal.type) + encode_compact_string(principal.name)
    return _VERSION.pack(0) + texts + bytes([is_by_token, 0])


def decode_principal(data: bytes) -> tuple[Principal, bool]:
    """Return the principal, and whether it has logged in with a delegation token. Raises MalformedFrame."""
    cursor = WireCursor(memoryview(data))
    try:
        if cursor.unpack(_VERSION) != (0,):
            raise MalformedFrame("a principal of an unknown version")
        principal = Principal(cursor.string().decode(), cursor.string().decode())
        (is_by_token,) = cursor.take(1)
        cursor.skip_tags()
    except (IndexError, struct.error, UnicodeDecodeError):
        raise MalformedFrame("the principal is damaged") from None
    return principal, bool(is_by_token)


async def _handle_if_active(
    context: RequestContext, here: Callable[[], Awaitable[bytes | bytearray]]
) -> bytes | bytearray | None:
    # A node that has not joined a cluster has no controller to forward to, and some requests are about just that.
    if not context.services.metadata.is_active and context.services.quorum.has_cluster:
        return None
    try:
        return await here()
    except ApiError as error:
        if error.code is not ErrorCode.not_controller:
            raise
        return None


async def _handle(context: RequestContext, request: Any) -> Any:
    """Raises ApiError if the request as a whole is refused: NOT_CONTROLLER if another node is the active controller."""
    response = route(context.api_key, context.version).handle(context, request)
    return await response if inspect.isawaitable(response) else response


def _decode_forwarded(header: RequestHeader, frame: bytes) -> Any:
    api = APIS.get(header.api_key)
    if api is None or not api.relay or not api.min_version <= header.version <= api.max_version:
        raise MalformedFrame(f"API {header.api_key} v{header.version} is not forwarded to controllers")
    return decode_request(header, memoryview(frame))


def _encode_request(node_id: int, api_key: int, version: int, request: Any, write: Any) -> bytes:
    import io

    client_id = f"penstock-{node_id}".encode()
    out = io.BytesIO()
    out.write(struct.pack(">hhih", api_key, version, 0, len(client_id)) + client_id)
    if route(api_key, version).is_flexible:
        out.write(b"\x00")
    write(out, request)
    return out.getvalue()


def _request_timeout_s(request: Any) -> float:
    asked = getattr(request, "timeout", None)
    if not isinstance(asked, timedelta):
        return CALL_TIMEOUT_S
    return min(max(asked.total_seconds(), _TIMEOUT_S_MIN), _TIMEOUT_S_MAX)


def _error_reply(
    context: RequestContext, request: Any, correlation_id: int, error: ApiError
) -> Steps[bytes | bytearray]:
    from penstock.broker.network.error_responses import NoErrorField, error_response_in_steps

    api_key, version = context.api_key, context.version
    try:
        response = yield from error_response_in_steps(api_key, version, request, error.code, error.message)
    except NoErrorField:
        return CLOSE_CONNECTION
    return (yield from encode_response_in_steps(api_key, version, correlation_id, response))


def _packed_host(host: str) -> bytes:
    from ipaddress import ip_address

    try:
        return ip_address(host).packed
    except ValueError:
        return b""
