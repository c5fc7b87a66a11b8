"""How requests are read, who handles them, and how replies are written: one route per API and version."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from functools import cache
from typing import Any, Final, NamedTuple

from penstock.broker.apis import API_VERSIONS, APIS
from penstock.protocol.compression import BytesLike
from penstock.protocol.errors import MalformedFrame
from penstock.protocol.produce import skip_tags

_HEADER = struct.Struct(">hhih")  # api key, version, correlation id, length of the client id
HEADER_BYTES: Final = _HEADER.size
_INT32 = struct.Struct(">i")
#: A body up to this size leaves together with its header and the replies around it.
_COPIED_BYTES_MAX: Final = 4096


class Header(NamedTuple):
    """`client_id` is as it was sent; `position` is where it ends, and the header's tags begin if it has any."""

    api_key: int
    version: int
    correlation_id: int
    client_id: bytes | None
    position: int


class Route(NamedTuple):
    """Built when it is first used."""

    is_flexible: bool
    is_relayed: bool
    decode: Callable[[memoryview, int], Any]
    encode: Callable[[io.BytesIO, Any], None]
    handle: Callable[..., Any]
    #: Of a relayed request: whether this node has to answer it itself after all.
    is_local: Callable[[Any], bool] | None = None


class EncodedResponse(NamedTuple):
    """A response that was encoded before, without its header; many requests may share it."""

    body: bytes


def parse_header(frame: memoryview) -> Header:
    """Raises MalformedFrame."""
    try:
        api_key, version, correlation_id, client_id_size = _HEADER.unpack_from(frame)
    except struct.error:
        raise MalformedFrame("request header is cut short") from None
    position = HEADER_BYTES + max(client_id_size, 0)
    if position > len(frame):
        raise MalformedFrame("client id is cut short")
    client_id = bytes(frame[HEADER_BYTES:position]) if client_id_size >= 0 else None
    return Header(api_key, version, correlation_id, client_id, position)


@cache
def route(api_key: int, version: int) -> Route:
    from penstock.protocol.schemas import request_decoder, request_is_flexible, response_encoder

    api = APIS[api_key]
    return Route(
        request_is_flexible(api_key, version),
        api.relay,
        request_decoder(api_key, version),
        response_encoder(api_key, version),
        api.handler,
        api.is_local,
    )


def decode(header: Header, frame: memoryview) -> Any:
    """The newest version's request. Raises MalformedFrame."""
    found = route(header.api_key, header.version)
    position = skip_header_tags(frame, header.position) if found.is_flexible else header.position
    return found.decode(frame, position)


def encode(api_key: int, version: int, correlation_id: int, response: Any) -> bytes:
    """The reply with its size in front."""
    out = io.BytesIO()
    out.write(_header(api_key, version, correlation_id))
    route(api_key, version).encode(out, response)
    with out.getbuffer() as view:
        _INT32.pack_into(view, 0, len(view) - 4)
    return out.getvalue()


def encode_body(api_key: int, version: int, response: Any) -> bytes:
    """The reply without size and header, for an `EncodedResponse`."""
    out = io.BytesIO()
    route(api_key, version).encode(out, response)
    return out.getvalue()


def framed(api_key: int, version: int, correlation_id: int, body: bytes) -> bytes | list[BytesLike]:
    """The reply that has this body; a large one is not copied."""
    header = bytearray(_header(api_key, version, correlation_id))
    _INT32.pack_into(header, 0, len(header) - 4 + len(body))
    return bytes(header) + body if len(body) <= _COPIED_BYTES_MAX else [bytes(header), body]


def _header(api_key: int, version: int, correlation_id: int) -> bytes:
    """With room for the size."""
    header = b"\x00\x00\x00\x00" + _INT32.pack(correlation_id)
    # Clients parse an ApiVersions reply before they know what we speak, so its header never changes.
    return header + b"\x00" if route(api_key, version).is_flexible and api_key != API_VERSIONS else header


def skip_header_tags(frame: memoryview, position: int) -> int:
    """Raises MalformedFrame."""
    try:
        return skip_tags(frame, position, len(frame))
    except IndexError:
        raise MalformedFrame("request header is cut short") from None
