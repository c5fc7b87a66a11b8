"""The context of a request, and requests that a node sends to a broker that may be itself.

A request to this node's own broker calls the handler directly: the same request and response, without the wire.
"""

from __future__ import annotations

import asyncio
import inspect
import struct
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from penstock.broker.network.apis import APIS
from penstock.broker.network.audit import audit_refusal
from penstock.broker.network.slices import UntilDone
from penstock.protocol.acls import CLUSTER_NAME, SUPPORTED_OPERATIONS, Operation, ResourceType
from penstock.protocol.errors import ApiError, ErrorCode, MalformedFrame
from penstock.protocol.steps import Steps, finish, map_in_steps
from penstock.security.authorizer import AclsNotLoaded, Authorizer, Decisions, all_operations
from penstock.security.principal import ANONYMOUS, Principal

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable

    from penstock.broker.environment import PeerCalls
    from penstock.broker.network.connection import Connection, PendingReply, Reply
    from penstock.broker.services import BrokerServices

T = TypeVar("T")
Element = TypeVar("Element")
#: The value of authorized operations that the client did not ask for.
OPERATIONS_NOT_REQUESTED: Final = -(1 << 31)
_HEAD: Final = struct.Struct(">ii")  # size, correlation id
_CORRELATION_BYTES: Final = 4
_RULES_UNKNOWN: Final = "the access rules are not known yet"


class RequestContext(NamedTuple):
    services: BrokerServices
    api_key: int
    version: int
    client_id: str | None
    client_host: str
    listener: str
    #: None if the node calls its own handler, for itself or on behalf of a client.
    connection: Connection | None = None
    #: Who sent the request. If another node forwards it, the principal that the envelope names (KIP-590).
    principal: Principal = ANONYMOUS
    #: Of a request that another node forwards: whether its client has logged in with a delegation token.
    is_forwarded_by_token: bool | None = None

    @property
    def is_by_token(self) -> bool:
        """Whether the client has logged in with a delegation token (KIP-48)."""
        if self.is_forwarded_by_token is not None:
            return self.is_forwarded_by_token
        authentication = None if self.connection is None else self.connection.authentication
        return authentication is not None and authentication.is_by_token

    @property
    def may_ask_about_tokens(self) -> bool:
        """Whether the client has proven who it is, and not by a delegation token: only then it may manage tokens.

        For a request that is forwarded, the node that the client is connected to has checked the listener.
        """
        if self.is_by_token:
            return False
        if self.is_forwarded_by_token is not None:
            return True
        protocol = self.services.settings.protocol(self.listener)
        return protocol.uses_sasl or (protocol.uses_tls and self.principal != ANONYMOUS)

    def in_slices(self, steps: Steps[T], *, until_done: bool = False) -> T | Awaitable[T]:
        """Return the result of a request of many parts, or an awaitable of it if one time slice is not enough.

        If the client goes meanwhile, the rest is not done and the awaitable is cancelled, unless `until_done`. What
        nodes ask for themselves is done at once: they ask for little, and some of it must not wait.
        """
        connection = self.connection
        if connection is None:
            return finish(steps)
        server = connection.server
        if not server.is_from_node(connection):
            requester = UntilDone(connection) if until_done else connection
            return server.slices.run(steps, requester, partial(self._spent, connection))
        if self.is_forwarded_by_token is None:
            return finish(steps)
        # The requests of many clients share the connection of the node that forwards them, so it is not held.
        return server.slices.run(steps, None)

    async def finish_in_slices(self, steps: Steps[T], *, until_done: bool = False) -> T:
        """`in_slices` for a handler that waits anyway."""
        result = self.in_slices(steps, until_done=until_done)
        return await result if inspect.isawaitable(result) else result

    @contextmanager
    def held(self) -> Iterator[None]:
        """Handle no later request of the connection meanwhile, so that its requests take effect in their order."""
        connection = self.connection
        if connection is None:
            yield
            return
        connection.hold()
        try:
            yield
        finally:
            connection.release()

    async def mapped(self, convert: Callable[[Element], T], elements: Iterable[Element]) -> tuple[T, ...]:
        """`map` in slices."""
        return await self.finish_in_slices(map_in_steps(convert, elements))

    def _spent(self, connection: Connection, seconds: float) -> None:
        if self.services.quotas.limits_requests:
            self.services.quotas.throttle_request(connection, self.client_id, seconds)

    @property
    def authorizer(self) -> Authorizer | None:
        """None if everybody may do everything; then no check is needed."""
        return self.services.authorizer

    def may(self, operation: Operation, resource_type: ResourceType, name: str = CLUSTER_NAME) -> bool:
        """Whether the client may do this. For what is hidden from it, or allowed in another way; otherwise `demand`.

        Raises MalformedFrame, which closes the connection, while this node does not know the access rules.
        """
        authorizer, connection = self.services.authorizer, self.connection
        if authorizer is None or connection is None:
            return True  # without a connection it is the node itself that asks
        decisions = connection.decisions
        if (
            decisions is None
            or (decisions.principal is not self.principal and decisions.principal != self.principal)
            or decisions.host != self.client_host
        ):
            decisions = self._decisions(authorizer, connection)
        try:
            return decisions.allows(operation, resource_type, name)
        except AclsNotLoaded:
            raise MalformedFrame(_RULES_UNKNOWN) from None

    def _decisions(self, authorizer: Authorizer, connection: Connection) -> Decisions:
        """Return the decisions for the client, which is not that of the connection if a node forwards its request."""
        decisions = authorizer.decisions(self.principal, self.client_host)
        if self.principal is connection.principal and self.client_host == connection.client_host:
            connection.decisions = decisions
            # The same object for all connections of a user, so that the next request finds them by identity.
            assert isinstance(decisions.principal, Principal)
            connection.principal = decisions.principal
        return decisions

    def demand(self, operation: Operation, resource_type: ResourceType, name: str = CLUSTER_NAME) -> bool:
        """Whether the client may do this; a refusal is written to the audit trail."""
        if self.may(operation, resource_type, name):
            return True
        audit_refusal(self, operation.name, resource_type.name, name)
        return False

    def may_write_any_topic(self) -> bool:
        """Raises MalformedFrame while this node does not know the access rules."""
        authorizer, connection = self.services.authorizer, self.connection
        if authorizer is None or connection is None:
            return True
        try:
            return self._decisions(authorizer, connection).allows_any(Operation.WRITE, ResourceType.TOPIC)
        except AclsNotLoaded:
            raise MalformedFrame(_RULES_UNKNOWN) from None

    def authorized_operations(self, resource_type: ResourceType, name: str = CLUSTER_NAME) -> int:
        """Return what the client may do with the resource, as the bits that replies carry."""
        if self.services.authorizer is None or self.connection is None:
            return all_operations(resource_type)
        return sum(
            1 << operation
            for operation in SUPPORTED_OPERATIONS[resource_type]
            if self.may(operation, resource_type, name)
        )


def is_node_by_rule(services: BrokerServices, connection: Connection) -> bool:
    """Whether access rules let the client of an inter-broker listener send requests between nodes.

    False while this node has not loaded the rules.
    """
    own = (connection.client_host, connection.listener, connection, connection.principal)
    try:
        return RequestContext(services, -1, 0, None, *own).may(Operation.CLUSTER_ACTION, ResourceType.CLUSTER)
    except MalformedFrame:
        return False


def in_slices(
    steps: Callable[[RequestContext, Any], Steps[Any]],
) -> Callable[[RequestContext, Any], Any]:
    """For a handler that yields after each part of its request: it returns the response, or an awaitable of it.

    Between two parts anything may change. A handler reads the image again after each `yield`, or says why one image
    will do.
    """

    @wraps(steps)
    def handle(ctx: RequestContext, request: Any) -> Any:
        return ctx.in_slices(steps(ctx, request))

    return handle


def cluster_operations(ctx: RequestContext, request: Any) -> int:
    """Return what the client may do with the cluster, as bits, if the request asks and the client may know it."""
    if not request.include_cluster_authorized_operations:
        return OPERATIONS_NOT_REQUESTED
    if not ctx.may(Operation.DESCRIBE, ResourceType.CLUSTER):
        return 0
    return ctx.authorized_operations(ResourceType.CLUSTER)


def own_api_reply(correlation_id: int, encoded: bytes) -> bytes:
    """Frame the encoded response of one of our own APIs."""
    return _HEAD.pack(len(encoded) + _CORRELATION_BYTES, correlation_id) + encoded


def send_later(
    ctx: RequestContext,
    connection: Connection,
    reply: Coroutine[Any, Any, Reply],
    *,
    until_done: bool = False,
) -> PendingReply:
    """For requests that are unpacked by hand: send the reply once it is there.

    If the connection ends first, what makes the reply is cancelled unless `until_done`.
    """
    slot = connection.defer(ctx.api_key)

    async def send() -> None:
        try:
            connection.fulfil(slot, await reply)
        except MalformedFrame as error:
            ctx.services.server.refuse(connection, str(error))
        except Exception:
            ctx.services.server.failed(connection)

    task = ctx.services.spawn(send())
    if not until_done:
        slot.cancel_if_lost(task)
    return slot


def reply_later(
    ctx: RequestContext, connection: Connection, correlation_id: int, response: Coroutine[Any, Any, bytes]
) -> PendingReply:
    """For our own APIs: frame the encoded response once it is there. Close the connection if there is none."""
    slot = connection.defer(ctx.api_key)

    async def reply() -> None:
        try:
            encoded = await response
        except Exception:
            ctx.services.server.failed(connection)
        else:
            connection.fulfil(slot, own_api_reply(correlation_id, encoded))

    ctx.services.spawn(reply())
    return slot


class BrokerCalls:
    """Sends requests to brokers, one of which may be this node."""

    def __init__(self, services: Callable[[], BrokerServices], peers: Callable[[], PeerCalls]) -> None:
        self._services = services
        self._peers = peers

    async def call_local(self, api_key: int, request: Any) -> Any:
        """Call this node's own handler with a request of the newest version; return its response."""
        api, services = APIS[api_key], self._services()
        context = RequestContext(
            services,
            api_key,
            api.max_version,
            f"penstock-{services.node_id}",
            "",
            services.settings.inter_broker_listener or services.settings.listeners[0].name,
        )
        response = api.handler(context, request)
        return await response if inspect.isawaitable(response) else response

    async def call(
        self, broker_id: int, api_key: int, request: Any, *, timeout_s: float, purpose: str
    ) -> Any:
        """Send a request to a broker, which may be this node; return the response.

        Raises ApiError: NETWORK_EXCEPTION if no response came. The broker may or may not have carried out the request.
        """
        if broker_id == self._services().node_id:
            try:
                async with asyncio.timeout(timeout_s):
                    return await self.call_local(api_key, request)
            except TimeoutError:
                raise ApiError(ErrorCode.network_exception, f"no answer in {timeout_s:g} s") from None
        # Imported here, because a standalone node never needs it.
        from penstock.broker.network.peers import PeerUnreachable

        try:
            return await self._peers().call(broker_id, api_key, request, timeout_s=timeout_s, purpose=purpose)
        except (PeerUnreachable, TimeoutError) as error:
            raise ApiError(ErrorCode.network_exception, str(error)) from None
