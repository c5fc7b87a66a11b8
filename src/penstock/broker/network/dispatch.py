"""From a frame to its handler and back: parses the header, checks the version, decodes the request, sends the reply."""

from __future__ import annotations

import asyncio
import inspect
import struct
from collections.abc import Awaitable, Callable, Coroutine
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

from penstock.broker.network.apis import (
    API_VERSIONS,
    APIS,
    FETCH,
    PRIVATE_APIS,
    PRODUCE,
    REQUEST_HEADER_BYTES,
    SCHEDULE_API,
    SHARE_ACKNOWLEDGE,
    SHARE_FETCH,
    Api,
    EncodedResponse,
    decode_request,
    encode_response,
    frame_response,
    parse_request_header,
    route,
    skip_header_tags,
)
from penstock.broker.network.connection import Connection, PendingReply, Reply
from penstock.broker.network.requests import RequestContext
from penstock.protocol.errors import ErrorCode, MalformedFrame
from penstock.protocol.share_failures import SHARE_FAILURES

if TYPE_CHECKING:
    from penstock.broker.services import BrokerServices

_HEADER = struct.Struct(">hhih")  # api key, version, correlation id, length of the client id
#: The first version of each hand-packed request whose header is flexible.
_HOT_FLEXIBLE_FROM = {
    PRODUCE: 9,
    FETCH: 12,
    SCHEDULE_API: 1,
    SHARE_FAILURES: 1,
    SHARE_FETCH: 0,
    SHARE_ACKNOWLEDGE: 0,
}
_STARTUP_APIS = {key: api for key, api in APIS.items() if api.while_starting}

#: JoinGroup, SyncGroup, and the heartbeats of consumer, share and streams groups: a group keeps their content.
_GROUP_MEMBER_APIS: Final = frozenset({11, 14, 68, 76, 88})
#: Decoded client ids that are cached.
_CLIENT_IDS_MAX: Final = 1000

#: Returns True if it has dealt with the request itself; for tests.
FaultInjector = Callable[[RequestContext, Connection, memoryview, "Dispatcher"], bool]
HotHandler = Callable[[RequestContext, Connection, memoryview, int, int], Reply | PendingReply]


class Dispatcher:
    def __init__(self, services: BrokerServices, is_starting: Callable[[], bool]) -> None:
        self._services = services
        self._is_starting = is_starting
        self._server = services.server
        self._metrics = services.metrics
        self.faults: FaultInjector | None = None
        self._apis = _STARTUP_APIS
        self._hot: dict[int, HotHandler] = {}
        self._client_ids: dict[bytes, str] = {}
        self._client_id_bytes_max = services.settings.integer("penstock.id.max.bytes")
        self._request_bytes_max = services.settings.integer("penstock.request.max.bytes")
        self._group_request_bytes_max = services.settings.integer("penstock.group.request.max.bytes")

    def dispatch(self, connection: Connection, frame: memoryview) -> None:
        """Raises MalformedFrame for a request that is malformed or not supported."""
        started = perf_counter()
        try:
            api_key, version, correlation_id, client_id_size = _HEADER.unpack_from(frame)
        except struct.error:
            raise MalformedFrame("request header is cut short") from None
        api = self._apis.get(api_key)
        if api is None:
            api = self._find_api(api_key)
            if api is None:
                connection.close()
                return
        if not api.min_version <= version <= api.max_version:
            connection.send(self._unsupported(connection, api, version, correlation_id))
            return
        if len(frame) > self._request_bytes_max and api_key != PRODUCE and not connection.is_inter_broker:
            raise MalformedFrame(
                f"{api.name} of {len(frame)} bytes; penstock.request.max.bytes is {self._request_bytes_max}"
            )
        if version >= api.inter_broker_from and not connection.is_inter_broker:
            self._reject_inter_broker_request(connection, frame, api, version, correlation_id)
            return
        position = REQUEST_HEADER_BYTES
        client_id = None
        if client_id_size >= 0:
            position += client_id_size
            if position > len(frame):
                raise MalformedFrame("client id is cut short")
            client_id = self._client_id(bytes(frame[REQUEST_HEADER_BYTES:position]))
        context = RequestContext(
            self._services,
            api_key,
            version,
            client_id,
            connection.client_host,
            connection.listener,
            connection,
        )
        faults = self.faults
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
        if isinstance(reply, PendingReply):
            return
        elapsed = perf_counter() - started
        self._metrics.observe_request(api_key, elapsed)
        if elapsed > self._server.time_slice_seconds:
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
        if len(frame) > self._group_request_bytes_max and context.api_key in _GROUP_MEMBER_APIS:
            connection.send(self._too_large(context, request, correlation_id))
            return
        if found.is_forwarded and not (found.is_local is not None and found.is_local(request)):
            from penstock.broker.controller.forwarding import forward_to_controller

            slot = connection.defer(context.api_key)
            relayed = forward_to_controller(context, request, bytes(frame), correlation_id)
            self._services.spawn(self._answer_later(connection, slot, relayed))
            return
        response = found.handle(context, request)
        if inspect.isawaitable(response):
            slot = connection.defer(context.api_key)
            answer = self._encode_when_ready(context, correlation_id, response)
            task = self._services.spawn(self._answer_later(connection, slot, answer))
            api = APIS[context.api_key]
            if api.waits_for_others or api.is_costly:
                slot.on_lost = task.cancel
            if api.is_costly:
                connection.wait_for_reply(slot)
            return
        connection.send(self.encode(context.api_key, context.version, correlation_id, response))
        elapsed = perf_counter() - started
        self._metrics.observe_request(context.api_key, elapsed)
        if elapsed > self._server.time_slice_seconds:
            connection.mark_expensive()

    def _too_large(self, context: RequestContext, request: Any, correlation_id: int) -> Reply:
        """Refuse a request, because a group keeps what a member sends for as long as the member stays."""
        from penstock.broker.network.error_responses import error_response

        self._metrics.count_error(APIS[context.api_key].name, ErrorCode.invalid_request.name)
        message = (
            f"The request is larger than penstock.group.request.max.bytes ({self._group_request_bytes_max})."
        )
        response = error_response(
            context.api_key, context.version, request, ErrorCode.invalid_request, message
        )
        return self.encode(context.api_key, context.version, correlation_id, response)

    async def _encode_when_ready(
        self, context: RequestContext, correlation_id: int, response: Awaitable[Any]
    ) -> Reply:
        return self.encode(context.api_key, context.version, correlation_id, await response)

    async def _answer_later(
        self, connection: Connection, slot: PendingReply, answer: Coroutine[Any, Any, Reply]
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
            return frame_response(api_key, version, correlation_id, response.body)
        return None if response is None else encode_response(api_key, version, correlation_id, response)

    def _reject_inter_broker_request(
        self, connection: Connection, frame: memoryview, api: Api, version: int, correlation_id: int
    ) -> None:
        """Reply with CLUSTER_AUTHORIZATION_FAILED, or close if the response has no field for the error."""
        from penstock.broker.network.error_responses import NoErrorField, error_response

        self._server.reject_inter_broker_request(connection, api.name)
        if api.key in PRIVATE_APIS:
            connection.close()
            return
        request = decode_request(parse_request_header(frame), frame)
        code = ErrorCode.cluster_authorization_failed
        try:
            response = error_response(
                api.key, version, request, code, "only served on the inter-broker listener"
            )
        except NoErrorField:
            connection.close()
            return
        connection.send(self.encode(api.key, version, correlation_id, response))

    def _unsupported(self, connection: Connection, api: Api, version: int, correlation_id: int) -> Reply:
        """As in Apache Kafka, ApiVersions falls back to version 0; any other API closes the connection."""
        if api.key != API_VERSIONS:
            raise MalformedFrame(f"{api.name} version {version} is not supported")
        context = RequestContext(
            self._services,
            API_VERSIONS,
            version,
            None,
            connection.client_host,
            connection.listener,
            connection,
        )
        return self.encode(API_VERSIONS, 0, correlation_id, api.handler(context, None))

    def _find_api(self, api_key: int) -> Api | None:
        """Return None if the API is not served because the node is still joining the cluster.

        The connection is then closed, and the client tries another node. Raises MalformedFrame for an unknown API.
        """
        if not self._is_starting():
            self._apis = APIS
        if api_key in PRIVATE_APIS:
            return PRIVATE_APIS[api_key]
        if api_key not in APIS:
            raise MalformedFrame(f"unknown API key {api_key}")
        return self._apis.get(api_key)

    def _client_id(self, raw: bytes) -> str:
        """Decode a client id, truncated if it is too long: members, sessions and logs keep it.

        It is not refused, because responses have no error code for that. Raises MalformedFrame.
        """
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
