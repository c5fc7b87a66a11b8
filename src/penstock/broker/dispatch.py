"""From a frame to the handler that answers it: header, version, decoding, and the reply's way back."""

from __future__ import annotations

import asyncio
import inspect
import io
import struct
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.broker.apis import API_VERSIONS, APIS, FETCH, PRODUCE, Api
from penstock.broker.connection import Connection, Reply, Slot
from penstock.broker.context import RequestContext
from penstock.protocol.errors import MalformedFrame
from penstock.protocol.produce import skip_tags

if TYPE_CHECKING:
    from penstock.broker.node import Node
    from penstock.broker.server import Server

_HEADER = struct.Struct(">hhih")  # api key, version, correlation id, length of the client id
_HEADER_BYTES = _HEADER.size
_INT32 = struct.Struct(">i")
#: The first version of each hand-packed request whose header is flexible.
_HOT_FLEXIBLE_FROM = {PRODUCE: 9, FETCH: 12}

HotHandler = Callable[[RequestContext, Connection, memoryview, int, int], Reply | Slot]


class _Route(NamedTuple):
    """How one version of one API is served; built when it is first used."""

    is_flexible: bool
    decode: Callable[[memoryview, int], Any]
    encode: Callable[[io.BytesIO, Any], None]
    handle: Callable[..., Any]


class Dispatcher:
    def __init__(self, node: Node, server: Server) -> None:
        self._node = node
        self._server = server
        self._metrics = node.metrics
        self._routes: dict[tuple[int, int], _Route] = {}
        self._hot: dict[int, HotHandler] = {}
        self._client_ids: dict[bytes, str] = {}

    def dispatch(self, connection: Connection, frame: memoryview) -> None:
        """Raises MalformedFrame for what is no request we know."""
        started = perf_counter()
        try:
            api_key, version, correlation_id, client_id_size = _HEADER.unpack_from(frame)
        except struct.error:
            raise MalformedFrame("request header is cut short") from None
        api = APIS.get(api_key)
        if api is None:
            raise MalformedFrame(f"unknown API key {api_key}")
        if not api.min_version <= version <= api.max_version:
            connection.send(self._unsupported(api, version, correlation_id))
            return
        position = _HEADER_BYTES
        client_id = None
        if client_id_size >= 0:
            position += client_id_size
            if position > len(frame):
                raise MalformedFrame("client id is cut short")
            client_id = self._client_id(bytes(frame[_HEADER_BYTES:position]))
        context = RequestContext(
            self._node, api_key, version, client_id, connection.client_host, connection.listener
        )
        faults = self._node.faults
        if faults is not None and faults(context, connection, frame, self):
            return
        self.serve(context, connection, frame, position, correlation_id, started)

    def serve(
        self,
        context: RequestContext,
        connection: Connection,
        frame: memoryview,
        position: int,
        correlation_id: int,
        started: float,
    ) -> None:
        api_key, version = context.api_key, context.version
        flexible_from = _HOT_FLEXIBLE_FROM.get(api_key)
        if flexible_from is None:
            self._serve_by_schema(context, connection, frame, position, correlation_id, started)
            return
        if version >= flexible_from:
            position = _skip_header_tags(frame, position)
        reply = self._hot_handler(api_key)(context, connection, frame, position, correlation_id)
        if isinstance(reply, Slot):
            return
        self._metrics.observe_request(api_key, perf_counter() - started)
        connection.send(reply)

    def _hot_handler(self, api_key: int) -> HotHandler:
        handler = self._hot.get(api_key)
        if handler is None:
            handler = self._hot[api_key] = APIS[api_key].handler
        return handler

    def _serve_by_schema(
        self,
        context: RequestContext,
        connection: Connection,
        frame: memoryview,
        position: int,
        correlation_id: int,
        started: float,
    ) -> None:
        route = self.route(context.api_key, context.version)
        if route.is_flexible:
            position = _skip_header_tags(frame, position)
        request = route.decode(frame, position)
        response = route.handle(context, request)
        if inspect.isawaitable(response):
            slot = connection.defer(context.api_key)
            self._node.spawn(self._answer_later(connection, slot, context, correlation_id, response))
            return
        connection.send(self.encode(context.api_key, context.version, correlation_id, response))
        self._metrics.observe_request(context.api_key, perf_counter() - started)

    async def _answer_later(
        self, connection: Connection, slot: Slot, context: RequestContext, correlation_id: int, response: Any
    ) -> None:
        try:
            answer = self.encode(context.api_key, context.version, correlation_id, await response)
        except asyncio.CancelledError:
            raise
        except Exception:
            self._server.failed(connection)
        else:
            connection.fulfil(slot, answer)

    def route(self, api_key: int, version: int) -> _Route:
        route = self._routes.get((api_key, version))
        if route is None:
            from penstock.protocol.schemas import request_decoder, request_is_flexible, response_encoder

            route = self._routes[api_key, version] = _Route(
                request_is_flexible(api_key, version),
                request_decoder(api_key, version),
                response_encoder(api_key, version),
                APIS[api_key].handler,
            )
        return route

    def encode(self, api_key: int, version: int, correlation_id: int, response: Any) -> bytes | None:
        if response is None:
            return None
        route = self.route(api_key, version)
        out = io.BytesIO()
        out.write(b"\x00\x00\x00\x00" + _INT32.pack(correlation_id))
        # Clients parse an ApiVersions reply before they know what we speak, so its header never changes.
        if route.is_flexible and api_key != API_VERSIONS:
            out.write(b"\x00")
        route.encode(out, response)
        with out.getbuffer() as view:
            _INT32.pack_into(view, 0, len(view) - 4)
        return out.getvalue()

    def _unsupported(self, api: Api, version: int, correlation_id: int) -> bytes | None:
        """As Apache Kafka: ApiVersions falls back to version 0, everything else is cut off."""
        if api.key != API_VERSIONS:
            raise MalformedFrame(f"{api.name} version {version} is not supported")
        from penstock.broker.handlers.api_versions import unsupported_version

        return self.encode(API_VERSIONS, 0, correlation_id, unsupported_version(self._node))

    def _client_id(self, raw: bytes) -> str:
        client_id = self._client_ids.get(raw)
        if client_id is None:
            try:
                client_id = raw.decode()
            except UnicodeDecodeError:
                raise MalformedFrame("client id is not UTF-8") from None
            if len(self._client_ids) < 1000:
                self._client_ids[raw] = client_id
        return client_id


def _skip_header_tags(frame: memoryview, position: int) -> int:
    try:
        return skip_tags(frame, position, len(frame))
    except IndexError:
        raise MalformedFrame("request header is cut short") from None
