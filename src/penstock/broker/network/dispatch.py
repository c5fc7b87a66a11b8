"""From a frame to the handler that answers it: header, version, decoding, and the reply's way back."""

from __future__ import annotations

import asyncio
import inspect
import struct
from collections.abc import Awaitable, Callable, Coroutine
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

from penstock.broker.apis import (
    API_VERSIONS,
    APIS,
    FETCH,
    PRIVATE_APIS,
    PRODUCE,
    SCHEDULE,
    SHARE_ACKNOWLEDGE,
    SHARE_FETCH,
    Api,
)
from penstock.broker.connection import Connection, Reply, Slot
from penstock.broker.context import RequestContext
from penstock.broker.routes import (
    HEADER_BYTES,
    EncodedResponse,
    decode,
    encode,
    framed,
    parse_header,
    route,
    skip_header_tags,
)
from penstock.protocol.errors import ErrorCode, MalformedFrame
from penstock.protocol.share_failures import SHARE_FAILURES

if TYPE_CHECKING:
    from penstock.broker.node import Node
    from penstock.broker.server import Server

_HEADER = struct.Struct(">hhih")  # api key, version, correlation id, length of the client id
#: The first version of each hand-packed request whose header is flexible.
_HOT_FLEXIBLE_FROM = {
    PRODUCE: 9,
    FETCH: 12,
    SCHEDULE: 1,
    SHARE_FAILURES: 1,
    SHARE_FETCH: 0,
    SHARE_ACKNOWLEDGE: 0,
}
_WHILE_STARTING = {key: api for key, api in APIS.items() if api.while_starting}

#: JoinGroup, SyncGroup, and the heartbeats of consumer, share and streams groups: what they carry is kept.
_OF_MEMBERS: Final = frozenset({11, 14, 68, 76, 88})
#: Client ids that are kept decoded.
_CLIENT_IDS_MAX: Final = 1000

HotHandler = Callable[[RequestContext, Connection, memoryview, int, int], Reply | Slot]


class Dispatcher:
    def __init__(self, node: Node, server: Server) -> None:
        self._node = node
        self._server = server
        self._metrics = node.metrics
        self._apis = _WHILE_STARTING
        self._hot: dict[int, HotHandler] = {}
        self._client_ids: dict[bytes, str] = {}
        self._client_id_bytes_max = node.settings.integer("penstock.id.max.bytes")
        self._request_bytes_max = node.settings.integer("penstock.request.max.bytes")
        self._group_request_bytes_max = node.settings.integer("penstock.group.request.max.bytes")

    def dispatch(self, connection: Connection, frame: memoryview) -> None:
        """Raises MalformedFrame for what is no request we know."""
        started = perf_counter()
        try:
            api_key, version, correlation_id, client_id_size = _HEADER.unpack_from(frame)
        except struct.error:
            raise MalformedFrame("request header is cut short") from None
        api = self._apis.get(api_key)
        if api is None:
            api = self._api_once_started(api_key)
            if api is None:
                connection.close()
                return
        if not api.min_version <= version <= api.max_version:
            connection.send(self._unsupported(connection, api, version, correlation_id))
            return
        if len(frame) > self._request_bytes_max and api_key != PRODUCE and not connection.for_nodes:
            raise MalformedFrame(
                f"{api.name} of {len(frame)} bytes; penstock.request.max.bytes is {self._request_bytes_max}"
            )
        if version >= api.node_only_from and not connection.for_nodes:
            self._refuse_node_request(connection, frame, api, version, correlation_id)
            return
        position = HEADER_BYTES
        client_id = None
        if client_id_size >= 0:
            position += client_id_size
            if position > len(frame):
                raise MalformedFrame("client id is cut short")
            client_id = self._client_id(bytes(frame[HEADER_BYTES:position]))
        context = RequestContext(
            self._node, api_key, version, client_id, connection.client_host, connection.listener, connection
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
            position = skip_header_tags(frame, position)
        reply = self._hot_handler(api_key)(context, connection, frame, position, correlation_id)
        if isinstance(reply, Slot):
            return
        elapsed = perf_counter() - started
        self._metrics.observe_request(api_key, elapsed)
        if elapsed > self._server.turn_seconds:
            connection.mark_expensive()
        connection.send(reply)

    def _hot_handler(self, api_key: int) -> HotHandler:
        handler = self._hot.get(api_key)
        if handler is None:
            handler = self._hot[api_key] = (APIS.get(api_key) or PRIVATE_APIS[api_key]).handler
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
        found = route(context.api_key, context.version)
        if found.is_flexible:
            position = skip_header_tags(frame, position)
        request = found.decode(frame, position)
        if len(frame) > self._group_request_bytes_max and context.api_key in _OF_MEMBERS:
            connection.send(self._too_large(context, request, correlation_id))
            return
        if found.is_relayed and not (found.is_local is not None and found.is_local(request)):
            from penstock.broker.relay import answer_of_controller

            slot = connection.defer(context.api_key)
            relayed = answer_of_controller(context, request, bytes(frame), correlation_id)
            self._node.spawn(self._answer_later(connection, slot, relayed))
            return
        response = found.handle(context, request)
        if inspect.isawaitable(response):
            slot = connection.defer(context.api_key)
            answer = self._encoded_later(context, correlation_id, response)
            task = self._node.spawn(self._answer_later(connection, slot, answer))
            api = APIS[context.api_key]
            if api.waits_for_others or api.is_costly:
                slot.on_lost = task.cancel
            if api.is_costly:
                connection.wait_for_reply(slot)
            return
        connection.send(self.encode(context.api_key, context.version, correlation_id, response))
        elapsed = perf_counter() - started
        self._metrics.observe_request(context.api_key, elapsed)
        if elapsed > self._server.turn_seconds:
            connection.mark_expensive()

    def _too_large(self, context: RequestContext, request: Any, correlation_id: int) -> Reply:
        """What a member sends is kept by its group for as long as it stays."""
        from penstock.broker.refusals import refusal

        self._metrics.count_error(APIS[context.api_key].name, ErrorCode.invalid_request.name)
        message = (
            f"The request is larger than penstock.group.request.max.bytes ({self._group_request_bytes_max})."
        )
        response = refusal(context.api_key, context.version, request, ErrorCode.invalid_request, message)
        return self.encode(context.api_key, context.version, correlation_id, response)

    async def _encoded_later(
        self, context: RequestContext, correlation_id: int, response: Awaitable[Any]
    ) -> Reply:
        return self.encode(context.api_key, context.version, correlation_id, await response)

    async def _answer_later(
        self, connection: Connection, slot: Slot, answer: Coroutine[Any, Any, Reply]
    ) -> None:
        try:
            reply = await answer
        except asyncio.CancelledError:
            raise
        except Exception:
            self._server.failed(connection)
        else:
            connection.fulfil(slot, reply)

    def encode(self, api_key: int, version: int, correlation_id: int, response: Any) -> Reply:
        if type(response) is EncodedResponse:
            return framed(api_key, version, correlation_id, response.body)
        return None if response is None else encode(api_key, version, correlation_id, response)

    def _refuse_node_request(
        self, connection: Connection, frame: memoryview, api: Api, version: int, correlation_id: int
    ) -> None:
        """Answer CLUSTER_AUTHORIZATION_FAILED, or close where the response has no place for an error."""
        from penstock.broker.refusals import NoPlaceForError, refusal

        self._server.refuse_node_request(connection, api.name)
        if api.key in PRIVATE_APIS:
            connection.close()
            return
        request = decode(parse_header(frame), frame)
        code = ErrorCode.cluster_authorization_failed
        try:
            response = refusal(api.key, version, request, code, "only served on the listener for nodes")
        except NoPlaceForError:
            connection.close()
            return
        connection.send(self.encode(api.key, version, correlation_id, response))

    def _unsupported(self, connection: Connection, api: Api, version: int, correlation_id: int) -> Reply:
        """As Apache Kafka: ApiVersions falls back to version 0, everything else is cut off."""
        if api.key != API_VERSIONS:
            raise MalformedFrame(f"{api.name} version {version} is not supported")
        from penstock.broker.handlers.api_versions import unsupported_version

        response = unsupported_version(self._node, for_nodes=connection.for_nodes)
        return self.encode(API_VERSIONS, 0, correlation_id, response)

    def _api_once_started(self, api_key: int) -> Api | None:
        """None while a node that still looks for its place talks to other nodes only; clients try elsewhere."""
        if self._node.state != "starting":
            self._apis = APIS
        if api_key in PRIVATE_APIS:
            return PRIVATE_APIS[api_key]
        if api_key not in APIS:
            raise MalformedFrame(f"unknown API key {api_key}")
        return self._apis.get(api_key)

    def _client_id(self, raw: bytes) -> str:
        """A long one is cut: it is kept with members, sessions and logs, and no answer could refuse it."""
        if len(raw) > self._client_id_bytes_max:
            raw = raw[: self._client_id_bytes_max].decode(errors="ignore").encode()
        client_id = self._client_ids.get(raw)
        if client_id is None:
            try:
                client_id = raw.decode()
            except UnicodeDecodeError:
                raise MalformedFrame("client id is not UTF-8") from None
            if len(self._client_ids) < _CLIENT_IDS_MAX:
                self._client_ids[raw] = client_id
        return client_id
