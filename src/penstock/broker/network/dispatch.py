"""From a frame to its handler and back: parses the header, checks the version, decodes the request, sends the reply."""

from __future__ import annotations

import asyncio
import inspect
import struct
import sys
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from datetime import timedelta
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
    ApiRoute,
    EncodedResponse,
    encode_response,
    encode_response_in_steps,
    frame_response,
    parse_request_header,
    route,
    skip_header_tags,
)
from penstock.broker.network.audit import audit_refusal
from penstock.broker.network.connection import Authentication, Connection, PendingReply, Reply
from penstock.broker.network.quotas import PERCENT
from penstock.broker.network.requests import RequestContext
from penstock.protocol.acls import CLUSTER_NAME, Operation, ResourceType
from penstock.protocol.bounds import TooManyElements
from penstock.protocol.errors import ErrorCode, MalformedFrame
from penstock.protocol.share_failures import SHARE_FAILURES
from penstock.protocol.steps import Steps
from penstock.protocol.tenant_usage import TENANT_USAGE
from penstock.protocol.topic_drops import TOPIC_DROPS
from penstock.security.quotas import REQUEST_PERCENTAGE

if TYPE_CHECKING:
    from penstock.broker.services import BrokerServices

_HEADER = struct.Struct(">hhih")  # api key, version, correlation id, length of the client id
#: The first version of each hand-packed request whose header is flexible.
_HOT_FLEXIBLE_FROM = {
    PRODUCE: 9,
    FETCH: 12,
    SCHEDULE_API: 1,
    SHARE_FAILURES: 1,
    TENANT_USAGE: 1,
    TOPIC_DROPS: 1,
    SHARE_FETCH: 0,
    SHARE_ACKNOWLEDGE: 0,
}
#: CreateTopics, DeleteTopics and CreatePartitions, which the controller throttles by controller_mutation_rate.
_MUTATIONS: Final = frozenset({19, 20, 37})
_MUTATION_REPLY_BYTES_MIN: Final = 16
_INT32 = struct.Struct(">i")
_STARTUP_APIS = {key: api for key, api in APIS.items() if api.while_starting}

#: JoinGroup, SyncGroup, and the heartbeats of consumer, share and streams groups: a group keeps their content.
_GROUP_MEMBER_APIS: Final = frozenset({11, 14, 68, 76, 88})
#: What a connection may send before it has authenticated: SaslHandshake, ApiVersions and SaslAuthenticate.
_AUTHENTICATION_APIS: Final = frozenset({17, API_VERSIONS, 36})
#: Larger requests are decoded in steps.
_DECODED_AT_ONCE_BYTES: Final = 4096
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
        self._slices = services.server.slices
        self._metrics = services.metrics
        self._quotas = services.quotas
        self.faults: FaultInjector | None = None
        self._apis = _STARTUP_APIS
        self._hot: dict[int, HotHandler] = {}
        self._client_ids: dict[bytes, str] = {}
        self._client_id_bytes_max = services.settings.integer("penstock.id.max.bytes")
        self._request_bytes_max = services.settings.integer("penstock.request.max.bytes")
        self._request_elements_max = services.settings.integer("penstock.request.elements.max")
        self._group_request_bytes_max = services.settings.integer("penstock.group.request.max.bytes")

    def dispatch(self, connection: Connection, frame: memoryview) -> None:
        """Raises MalformedFrame for a request that is malformed or not supported."""
        started = perf_counter()
        try:
            api_key, version, correlation_id, client_id_size = _HEADER.unpack_from(frame)
        except struct.error:
            raise MalformedFrame("request header is cut short") from None
        authentication = connection.authentication
        if (
            authentication is not None
            and started >= connection.session_end
            and not self._is_authenticated(connection, authentication, api_key)
        ):
            return
        api = self._apis.get(api_key)
        if api is None:
            api = self._find_api(api_key)
            if api is None:
                connection.close()
                return
        if not api.min_version <= version <= api.max_version:
            connection.send(self._unsupported(connection, api, version, correlation_id))
            return
        if len(frame) > self._request_bytes_max and api_key != PRODUCE and not connection.is_node:
            raise MalformedFrame(
                f"{api.name} of {len(frame)} bytes; penstock.request.max.bytes is {self._request_bytes_max}"
            )
        if version >= api.inter_broker_from and not connection.may_send(api):
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
            connection.principal,
        )
        faults = self.faults
        if faults is not None and faults(context, connection, frame, self):
            return
        self.serve(context, connection, frame, position, correlation_id, started)

    def _is_authenticated(self, connection: Connection, authentication: Authentication, api_key: int) -> bool:
        """Whether the request is served; a connection that has not authenticated is closed if it asks for more."""
        now_ms = self._services.environment.now_ms()
        if authentication.is_complete(now_ms) or api_key in _AUTHENTICATION_APIS:
            return True
        kind, reason = "no_authentication", "a request before authentication"
        if authentication.must_reauthenticate(now_ms):
            kind, reason = (
                "session_expired",
                "a request after the session's end; the client did not re-authenticate",
            )
        self._server.refusals.refuse(connection, kind, reason)
        connection.close()
        return False

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
        if self._quotas.limits_requests and REQUEST_PERCENTAGE not in connection.turns:
            self._quotas.await_request_turn(connection, context.client_id)
        flexible_from = _HOT_FLEXIBLE_FROM.get(api_key)
        if flexible_from is None:
            self._serve_by_schema(context, connection, frame, position, correlation_id, started)
            return
        if version >= flexible_from:
            position = skip_header_tags(frame, position)
        reply = self._hot_handler(api_key)(context, connection, frame, position, correlation_id)
        elapsed = perf_counter() - started
        if self._quotas.limits_requests:
            meter = connection.meters.get(REQUEST_PERCENTAGE)
            if (
                meter is not None
                and meter.client_id == context.client_id
                and (pending := meter.pending + elapsed * PERCENT) <= meter.slack
            ):
                meter.pending = pending
            else:
                self._quotas.throttle_request(connection, context.client_id, elapsed)
        if isinstance(reply, PendingReply):
            return
        self._metrics.observe_request(api_key, elapsed)
        if elapsed > self._slices.seconds:
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
        if len(frame) <= _DECODED_AT_ONCE_BYTES:
            request = found.decode(frame, position)
        else:
            # A copy, because the buffer is used again before the last step.
            frame = memoryview(bytes(frame))
            decoding = context.in_slices(self._decoded(context, connection, found, frame, position))
            if inspect.isawaitable(decoding):
                self._serve_when_decoded(context, connection, frame, correlation_id, found, decoding)
                return
            request = decoding
        if len(frame) > self._group_request_bytes_max and context.api_key in _GROUP_MEMBER_APIS:
            connection.send(self._too_large(context, request, correlation_id))
            return
        if _is_forwarded(found, context, request):
            slot = connection.defer(context.api_key)
            relayed = _forwarded(context, connection, found, request, frame, correlation_id)
            if self._quotas.limits_requests:
                self._quotas.throttle_request(connection, context.client_id, perf_counter() - started)
            self._services.spawn(self._answer_later(connection, slot, relayed))
            return
        response = found.handle(context, request)
        throttle_ms = 0
        if self._quotas.limits_requests:
            elapsed = perf_counter() - started
            throttle_ms = self._quotas.throttle_request(connection, context.client_id, elapsed)
        if inspect.isawaitable(response):
            answer = self._encode_when_ready(context, correlation_id, response, throttle_ms)
            self._reply_later(context, connection, answer)
            return
        response = _with_throttle_time(response, throttle_ms)
        connection.send(self.encode(context.api_key, context.version, correlation_id, response))
        elapsed = perf_counter() - started
        self._metrics.observe_request(context.api_key, elapsed)
        if elapsed > self._slices.seconds:
            connection.mark_expensive()

    def _decoded(
        self,
        context: RequestContext,
        connection: Connection,
        found: ApiRoute,
        frame: memoryview,
        position: int,
    ) -> Steps[Any]:
        """Nodes may ask for more than clients: for all that they have."""
        elements_max = sys.maxsize if connection.is_node else self._request_elements_max
        try:
            return (yield from found.decode_in_steps(frame, position, elements_max))
        except TooManyElements:
            raise MalformedFrame(
                f"{APIS[context.api_key].name} with more elements in its arrays than "
                f"penstock.request.elements.max, which is {elements_max}"
            ) from None

    def _reply_later(
        self, context: RequestContext, connection: Connection, answer: Coroutine[Any, Any, Reply]
    ) -> None:
        slot = connection.defer(context.api_key)
        account = connection.account
        if account is not None and self._slices.accounts.are_several:
            answer = account.measured(answer)
        task = self._services.spawn(self._answer_later(connection, slot, answer))
        api = APIS[context.api_key]
        if api.waits_for_others or api.is_costly:
            slot.cancel_if_lost(task)
        if api.is_costly:
            connection.wait_for_reply(slot)

    def _serve_when_decoded(
        self,
        context: RequestContext,
        connection: Connection,
        frame: memoryview,
        correlation_id: int,
        found: ApiRoute,
        decoding: Awaitable[Any],
    ) -> None:
        buffers, size = self._server.buffers, len(frame)
        buffers.hold(size)
        if self._quotas.limits_requests:
            # The slices of this request are not known yet: only the request itself is counted.
            self._quotas.throttle_request(connection, context.client_id, 0.0)

        async def reply() -> Reply:
            try:
                request = await decoding
            finally:
                buffers.release(size)
            if size > self._group_request_bytes_max and context.api_key in _GROUP_MEMBER_APIS:
                return self._too_large(context, request, correlation_id)
            if _is_forwarded(found, context, request):
                return await _forwarded(context, connection, found, request, frame, correlation_id)
            response = found.handle(context, request)
            response = await response if inspect.isawaitable(response) else response
            return await self._encoded(context, correlation_id, response)

        self._reply_later(context, connection, reply())

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
        self, context: RequestContext, correlation_id: int, response: Awaitable[Any], throttle_ms: int
    ) -> Reply:
        return await self._encoded(context, correlation_id, _with_throttle_time(await response, throttle_ms))

    async def _encoded(self, context: RequestContext, correlation_id: int, response: Any) -> Reply:
        """Encode in slices: a request that took long often has a long response."""
        if response is None or type(response) is EncodedResponse:
            return self.encode(context.api_key, context.version, correlation_id, response)
        return await context.finish_in_slices(
            encode_response_in_steps(context.api_key, context.version, correlation_id, response)
        )

    async def _answer_later(
        self, connection: Connection, slot: PendingReply, answer: Coroutine[Any, Any, Reply]
    ) -> None:
        try:
            reply = await answer
        except asyncio.CancelledError:
            raise
        except MalformedFrame as error:
            self._server.refuse(connection, str(error))
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
        self._server.reject_inter_broker_request(connection, api.name)
        context = RequestContext(
            self._services,
            api.key,
            version,
            None,
            connection.client_host,
            connection.listener,
            connection,
            connection.principal,
        )
        audit_refusal(context, Operation.CLUSTER_ACTION.name, ResourceType.CLUSTER.name, CLUSTER_NAME)
        if api.key in PRIVATE_APIS:
            connection.close()
            return
        position = parse_request_header(frame).position
        # A copy, because the buffer is used again before the last step.
        frame = memoryview(bytes(frame))
        reply = context.in_slices(self._rejection(context, connection, frame, position, correlation_id))
        if inspect.isawaitable(reply):
            self._reply_later(context, connection, _awaited(reply))
        else:
            connection.send(reply)

    def _rejection(
        self,
        context: RequestContext,
        connection: Connection,
        frame: memoryview,
        position: int,
        correlation_id: int,
    ) -> Steps[Reply]:
        from penstock.broker.network.error_responses import NoErrorField, error_response_in_steps

        api_key, version, code = context.api_key, context.version, ErrorCode.cluster_authorization_failed
        where = "a controller" if APIS[api_key].is_for_controllers else "the inter-broker"
        message = f"only served to nodes, on {where} listener"
        found = route(api_key, version)
        if found.is_flexible:
            position = skip_header_tags(frame, position)
        request = yield from self._decoded(context, connection, found, frame, position)
        try:
            response = yield from error_response_in_steps(api_key, version, request, code, message)
        except NoErrorField:
            connection.close()
            return None
        return (yield from encode_response_in_steps(api_key, version, correlation_id, response))

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
            connection.principal,
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


async def _awaited(reply: Awaitable[Reply]) -> Reply:
    return await reply


def _is_forwarded(found: ApiRoute, context: RequestContext, request: Any) -> bool:
    return found.is_forwarded and not (found.is_local is not None and found.is_local(context, request))


def _forwarded(
    context: RequestContext,
    connection: Connection,
    found: ApiRoute,
    request: Any,
    frame: memoryview,
    correlation_id: int,
) -> Coroutine[Any, Any, Reply]:
    """The reply of the active controller, which may be this node."""
    from penstock.broker.controller.forwarding import forward_to_controller

    relayed: Coroutine[Any, Any, Reply] = forward_to_controller(
        context, request, bytes(frame), correlation_id
    )
    if context.api_key in _MUTATIONS:
        return _throttled_by_controller(connection, relayed, found)
    return relayed


async def _throttled_by_controller(
    connection: Connection, relayed: Awaitable[Reply], found: ApiRoute
) -> Reply:
    """Throttle a client for as long as the controller's reply names; the reply begins with the throttle time."""
    reply = await relayed
    if isinstance(reply, (bytes, bytearray)) and len(reply) >= _MUTATION_REPLY_BYTES_MIN:
        throttle_ms = _INT32.unpack_from(reply, 8 + found.is_flexible)[0]
        if throttle_ms > 0 and not connection.server.is_from_node(connection):
            connection.throttle(throttle_ms)
    return reply


def _with_throttle_time(response: Any, throttle_ms: int) -> Any:
    """Name the throttle time in a response that has a field for it."""
    if not throttle_ms or not hasattr(response, "throttle_time"):
        return response
    return replace(response, throttle_time=max(response.throttle_time, timedelta(milliseconds=throttle_ms)))
