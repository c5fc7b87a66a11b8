"""The listening sockets, and what all connections share: connection limits, time slices, receive memory, counters."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.broker.config.listeners import Listener
from penstock.broker.network.apis import PRODUCE
from penstock.broker.network.connection import Authentication, Connection
from penstock.broker.network.connection_limits import CONNECTIONS_MAX, ConnectionLimits
from penstock.broker.network.frame_buffers import FrameBuffers
from penstock.broker.network.node_principals import NodePrincipals
from penstock.broker.network.tls import Handshakes, TlsContexts, TlsLayer, TlsUnusable
from penstock.broker.network.unauthenticated import Refusals, Unauthenticated, handshake_failure
from penstock.security.principal import (
    ANONYMOUS,
    RESERVED_NAMES,
    USER,
    DistinguishedNameRules,
    Principal,
    certificate_subject,
)

if TYPE_CHECKING:
    from penstock.broker.config.effective_settings import DynamicSettings
    from penstock.broker.config.node_settings import NodeSettings
    from penstock.broker.metrics.counters import Metrics
    from penstock.broker.network.slices import TimeSlices
    from penstock.broker.network.tenants import TenantManager

logger = logging.getLogger("penstock.server")

_SWEEP_SECONDS = 1.0
_SASL_BYTES_MAX = "sasl.server.max.receive.size"
T = TypeVar("T")


class Server:
    def __init__(
        self, settings: NodeSettings, dynamic: DynamicSettings, metrics: Metrics, slices: TimeSlices
    ) -> None:
        self._settings = settings
        self._dynamic = dynamic
        self.metrics = metrics
        #: Handles a frame. The node sets it before the server accepts connections, because handlers use the server.
        self.dispatch: Callable[[Connection, memoryview], None]
        self.frame_bytes_max = settings.integer("socket.request.max.bytes")
        self.inflight_max = settings.integer("penstock.max.inflight.requests.per.connection")
        self.buffers = FrameBuffers(settings.integer("queued.max.request.bytes"), self._memory_freed)
        self.held_bytes = 0  # of replies that are ready but wait for earlier replies
        self.is_closing = False
        self.slow_readers: set[Connection] = set()
        self.connections: dict[Connection, None] = {}
        self.clock = asyncio.get_running_loop().time
        self.gathers_writes = type(asyncio.get_running_loop()).__module__.startswith("uvloop")
        self.limits = ConnectionLimits(settings, dynamic)
        self._idle_seconds_max = settings.integer("connections.max.idle.ms") / 1000
        self._frame_seconds_max = settings.integer("penstock.request.read.timeout.ms") / 1000
        self._unsent_bytes_max = settings.integer("penstock.max.queued.response.bytes")
        #: A request that takes longer than a slice is expensive.
        self.slices = slices
        #: Counts the connections of tenants. The node sets it.
        self.tenants: TenantManager | None = None
        self._waiting_for_memory: OrderedDict[Connection, None] = OrderedDict()
        self._waiting_to_grow: OrderedDict[Connection, None] = OrderedDict()
        self._servers: list[tuple[Listener, asyncio.Server]] = []
        self._progress = asyncio.Event()
        self._sweeper: asyncio.TimerHandle | None = None
        self.refusals = Refusals(metrics, self.clock)
        self._unauthenticated: dict[str, Unauthenticated] = {}  # by the name of the listener
        self._handshakes: Handshakes | None = None
        #: Who is a node, by the name of the inter-broker listener.
        self._nodes: dict[str, NodePrincipals] = {}
        #: Keys and certificates by the name of the listener, and the task that looks for changes.
        self._tls: dict[str, TlsContexts] = {}
        self._reloading: asyncio.Task[None] | None = None
        #: Held by the login that computes in a thread.
        self.long_logins = asyncio.Semaphore(1)
        #: Begins the SASL exchange of a connection to a listener with SASL. The node sets it.
        self.new_authentication: Callable[[str], Authentication] | None = None
        #: Called for a login on a listener whose token has an unknown key. The node sets it.
        self.wait_for_newer_keys: Callable[[str], Awaitable[None]] | None = None
        #: Called with the reason if a client is refused for its certificate. The node sets it.
        self.certificate_refused: Callable[[Connection, str], None] = lambda connection, reason: None
        #: Whether access rules make the client of an inter-broker listener a node. The node sets it.
        self.is_node_by_rule: Callable[[Connection], bool] = lambda connection: False
        self._gathered: list[Connection] | None = None

    async def bind(self, listener: Listener) -> int:
        """Return the bound port; no connection is accepted before `serve` or `serve_inter_broker`. Raises OSError."""
        server = await self._listen(listener, listener.port)
        ports = _ports(server)
        if len(set(ports)) > 1:
            # With port 0, each address of a host name got another port: use one port for all of them.
            server.close()
            server = await self._listen(listener, ports[0])
        self._servers.append((listener, server))
        return _ports(server)[0]

    async def _listen(self, listener: Listener, port: int) -> asyncio.Server:
        return await asyncio.get_running_loop().create_server(
            self._protocol_factory(listener),
            _hosts(listener.host),
            port,
            backlog=self._settings.integer("socket.listen.backlog.size"),
            reuse_address=True,
            start_serving=False,
        )

    def _protocol_factory(self, listener: Listener) -> Callable[[], asyncio.BufferedProtocol]:
        name, nodes = listener.name, None
        if self._is_inter_broker_listener(listener):
            nodes = self._nodes[name] = NodePrincipals(self._settings, name)

        def new_connection() -> Connection:
            return Connection(self, name, nodes=nodes)

        protocol = self._settings.protocol(name)
        if not protocol:
            return new_connection
        if name not in self._unauthenticated:
            self._unauthenticated[name] = Unauthenticated(
                self._integer(name, "penstock.unauthenticated.connections.max"),
                self._integer(name, "penstock.authentication.timeout.ms") / 1000,
                self.refusals,
            )
        if protocol.uses_sasl:
            assert self.new_authentication is not None, "a listener with SASL needs it"
            begin, bytes_max = self.new_authentication, self._integer(name, _SASL_BYTES_MAX)

            def new_sasl_connection() -> Connection:
                connection = new_connection()
                connection.authentication = begin(name)
                connection.frame_bytes_max = bytes_max
                return connection

            if not protocol.uses_tls:
                return new_sasl_connection
            return self._tls_factory(name, new_sasl_connection, None)
        rules = DistinguishedNameRules(
            str(self._settings.listener_value(name, "ssl.principal.mapping.rules"))
        )
        return self._tls_factory(name, new_connection, rules)

    def _integer(self, listener: str, setting: str) -> int:
        value = self._settings.listener_value(listener, setting)
        assert isinstance(value, int), (setting, value)
        return value

    def _tls_factory(
        self, listener: str, new_connection: Callable[[], Connection], rules: DistinguishedNameRules | None
    ) -> Callable[[], asyncio.BufferedProtocol]:
        """Without `rules`, the certificate does not say who the client is, because SASL does."""
        contexts, handshakes = self._tls[listener], self._handshakes
        assert handshakes is not None

        def new_layer() -> TlsLayer:
            connection = new_connection()

            def finished(layer: TlsLayer, failure: Exception | None) -> None:
                self._handshake_finished(connection, layer, failure, rules)

            return TlsLayer(connection, handshakes, lambda: contexts.server, finished)

        return new_layer

    def _handshake_finished(
        self,
        connection: Connection,
        layer: TlsLayer,
        failure: Exception | None,
        rules: DistinguishedNameRules | None,
    ) -> None:
        if failure is not None:
            if connection.is_open and not self.is_closing:
                kind, reason = handshake_failure(failure)
                self._refuse_handshake(connection, kind, reason)
            return
        self.metrics.count_tls_handshake(connection.listener)
        if rules is None:
            return
        certificate = layer.peer_certificate()
        if certificate is None:
            connection.authenticated(ANONYMOUS)
            return
        try:
            subject = certificate_subject(certificate)
        except ValueError as error:
            self._refuse_handshake(connection, "certificate", str(error))
            connection.abort()
            return
        name = rules.name(subject)
        if name is None or name in RESERVED_NAMES:
            reason = (
                f"no ssl.principal.mapping.rules fits {subject!r}"
                if name is None
                else f"no user can be named {name}, as ssl.principal.mapping.rules names {subject!r}"
            )
            self._refuse_handshake(connection, "certificate", reason)
            connection.abort()
            return
        connection.authenticated(Principal(USER, name))

    def _refuse_handshake(self, connection: Connection, kind: str, reason: str) -> None:
        self.refusals.refuse(connection, kind, reason)
        if kind == "certificate":
            self.certificate_refused(connection, reason)

    def authenticated(self, connection: Connection) -> None:
        if (unauthenticated := self._unauthenticated.get(connection.listener)) is not None:
            unauthenticated.discard(connection)
        if self.tenants is not None:
            self.tenants.admit(connection)
        self.assign_account(connection)

    def authentication_failed(self, connection: Connection) -> None:
        """The login has failed; the refusal is sent later."""
        if (unauthenticated := self._unauthenticated.get(connection.listener)) is not None:
            unauthenticated.failed(connection)

    def unauthenticated_counts(self) -> dict[str, int]:
        return {listener: len(each) for listener, each in self._unauthenticated.items()}

    def use_tls(self, handshakes: Handshakes, contexts: dict[str, TlsContexts]) -> None:
        """Must be called before `bind`."""
        self._handshakes, self._tls = handshakes, contexts

    async def reload_certificates(self) -> None:
        """Read keys and certificates that have changed; new connections use them."""
        assert self._handshakes is not None
        for listener, contexts in self._tls.items():
            try:
                if await self._handshakes.in_thread(contexts.reload_changed):
                    logger.info("certificates were read again", extra={"listener": listener})
                    if listener in self._nodes:
                        self._nodes[listener].refresh()
            except TlsUnusable as error:
                logger.error(
                    "changed certificates cannot be used; new connections still get the old ones",
                    extra={"listener": listener, "reason": str(error)},
                )

    def _is_inter_broker_listener(self, listener: Listener) -> bool:
        return listener.name in self._settings.node_listeners

    async def serve_inter_broker(self) -> None:
        """Accept connections of other nodes, which this node needs before it can serve clients.

        Clients are refused until `serve`: librdkafka may not request metadata again from a node that accepts its
        connections, even if the node closes them at once.
        """
        await self._serve(
            [server for listener, server in self._servers if self._is_inter_broker_listener(listener)]
        )

    async def serve(self) -> None:
        await self._serve([server for _, server in self._servers])

    async def _serve(self, servers: Iterable[asyncio.Server]) -> None:
        for server in servers:
            await server.start_serving()
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().call_later(_SWEEP_SECONDS, self._sweep)

    async def close(self, drain_seconds: float = 0) -> None:
        """Accept no new requests, wait up to `drain_seconds` for replies to pending writes, and close connections."""
        self.is_closing = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        if self._reloading is not None:
            self._reloading.cancel()
        for _, server in self._servers:
            server.close()
        for connection in self.connections:
            connection.mute()
        with suppress(TimeoutError):
            async with asyncio.timeout(drain_seconds):
                await self._until(lambda: not any(c.has_pending_reply(PRODUCE) for c in self.connections))
                for connection in list(self.connections):
                    connection.close()
                await self._until(lambda: not self.connections)
        for connection in list(self.connections):
            connection.abort()
        await asyncio.sleep(0)

    async def _until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            self._progress.clear()
            await self._progress.wait()

    def progress(self) -> None:
        """Wake a stopping server, because a reply was sent or a connection has ended."""
        self._progress.set()

    # -- replies that become ready together ----------------------------------------------------------

    @property
    def is_gathering(self) -> bool:
        return self._gathered is not None

    def gathered(self, work: Callable[[], T]) -> T:
        """Run `work`, which may complete many replies; the replies of one connection are sent in one write."""
        if self._gathered is not None:
            return work()
        gathered = self._gathered = []
        try:
            return work()
        finally:
            self._gathered = None
            for connection in gathered:
                connection.stop_corking()

    def gather(self, connection: Connection) -> bool:
        """Return whether the connection must hold back its replies until `gathered` ends."""
        if self._gathered is None:
            return False
        self._gathered.append(connection)
        return True

    # -- connections ---------------------------------------------------------------------------------

    def assign_account(self, connection: Connection) -> None:
        """Whose time this connection uses: its tenant's, its user's, or before the login its host's."""
        accounts, before = self.slices.accounts, connection.account
        if connection.is_inter_broker:
            connection.account = None
        elif connection.tenant is not None:
            connection.account = accounts.join(connection.tenant.tenant.name)
        elif connection.principal is not ANONYMOUS:
            connection.account = accounts.join(connection.principal)
        else:
            is_login = connection.authentication is not None
            key = (connection.client_host, is_login)
            connection.account = accounts.join(key, is_login=is_login)
        if before is not None:
            accounts.leave(before)

    def admit(self, connection: Connection) -> None:
        self.connections[connection] = None
        self.assign_account(connection)
        if (unauthenticated := self._unauthenticated.get(connection.listener)) is not None:
            unauthenticated.add(connection, self.clock())
        listener, host = connection.listener, connection.client_host
        exceeded = self.limits.admit(listener, host, is_from_node=self._is_on_node_listener(connection))
        if exceeded is not None and not self._make_room(listener, exceeded):
            self._reject_connection(connection, exceeded)
            return
        delay_ms = self.limits.delay_ms(
            listener, host, self.clock(), is_inter_broker=connection.nodes is not None
        )
        if delay_ms:
            connection.throttle(delay_ms)

    def _make_room(self, listener: str, limit: str) -> bool:
        """Close a connection whose login has failed, so that such connections keep no other client out."""
        if limit == CONNECTIONS_MAX:
            return any(each.close_failed(limit) for each in self._unauthenticated.values())
        own = self._unauthenticated.get(listener)
        return limit == self.limits.listener_setting(listener) and own is not None and own.close_failed(limit)

    def is_from_node(self, connection: Connection) -> bool:
        """Limits apply only to clients: if nodes could not reach each other, the limits could not be changed either."""
        return connection.is_node and len(self._servers) > 1

    def is_principal_of_node(self, principal: Principal) -> bool:
        """Whether nodes log in as this principal, as far as this node can tell."""
        return any(nodes.authenticates and nodes.names(principal) for nodes in self._nodes.values())

    def _is_on_node_listener(self, connection: Connection) -> bool:
        """Like `is_from_node`, for a connection whose client has not authenticated yet."""
        return connection.nodes is not None and len(self._servers) > 1

    def _reject_connection(self, connection: Connection, setting: str) -> None:
        logger.warning("connection refused", extra={"peer": connection.peer, "reason": setting})
        self.metrics.connections_refused += 1
        connection.abort()

    def forget(self, connection: Connection) -> None:
        self.connections.pop(connection, None)
        if (unauthenticated := self._unauthenticated.get(connection.listener)) is not None:
            unauthenticated.discard(connection)
        self.slow_readers.discard(connection)
        if connection.account is not None:
            self.slices.accounts.leave(connection.account)
            connection.account = None
        if self.tenants is not None:
            self.tenants.forget(connection)
        self.limits.forget(
            connection.listener, connection.client_host, is_from_node=self._is_on_node_listener(connection)
        )
        self._waiting_for_memory.pop(connection, None)
        self._waiting_to_grow.pop(connection, None)
        self.progress()

    def refuse(self, connection: Connection, reason: str) -> None:
        """Log and abort a connection that violates the protocol; other connections are not affected."""
        logger.warning("bad request", extra={"peer": connection.peer, "reason": reason})
        self.metrics.malformed_frames += 1
        connection.abort()

    def reject_inter_broker_request(self, connection: Connection, api: str) -> None:
        """Count and log a request that only nodes send; the caller sends the reply."""
        message = "request between nodes refused on a listener for clients"
        if connection.nodes is not None:
            message = "request between nodes refused: penstock.node.principals does not have its principal"
        logger.warning(
            message,
            extra={
                "peer": connection.peer,
                "listener": connection.listener,
                "principal": str(connection.principal),
                "api": api,
            },
        )
        self.metrics.count_node_request_refused(api)

    def failed(self, connection: Connection) -> None:
        logger.exception("request failed", extra={"peer": connection.peer})
        self.metrics.internal_errors += 1
        connection.abort()

    # -- memory --------------------------------------------------------------------------------------

    def wait_for_memory(self, connection: Connection, *, to_grow: bool = False) -> None:
        """Pause reading from this connection until requests have freed memory; first come, first served.

        Frames that have partly arrived go before frames that have not begun, because completing them frees memory.
        """
        connection.mute()
        (self._waiting_to_grow if to_grow else self._waiting_for_memory)[connection] = None

    def _memory_freed(self) -> None:
        if self._waiting_for_memory or self._waiting_to_grow:
            asyncio.get_running_loop().call_soon(self._wake_waiting)

    def _wake_waiting(self) -> None:
        buffers = self.buffers
        while waiting := self._waiting_to_grow or self._waiting_for_memory:
            if buffers.is_full and not (waiting is self._waiting_to_grow and buffers.may_overdraw):
                return
            connection, _ = waiting.popitem(last=False)
            connection.unmute()
            if connection in waiting:
                waiting.move_to_end(connection, last=False)
                return

    def response_bytes_left(self) -> int:
        """Return how many bytes fetches may still add to the replies that clients have not read yet."""
        left = self._unsent_bytes_max - self.held_bytes
        if self.slow_readers:
            left -= sum(connection.unsent_bytes for connection in self.slow_readers)
        return left

    def _sweep(self) -> None:
        self._sweeper = asyncio.get_running_loop().call_later(_SWEEP_SECONDS, self._sweep)
        now = self.clock()
        for unauthenticated in self._unauthenticated.values():
            unauthenticated.close_late(now)
        for connection in list(self.connections):
            self._check_idle(connection, now)
        if self._tls and (self._reloading is None or self._reloading.done()):
            self._reloading = asyncio.get_running_loop().create_task(self.reload_certificates())

    def _check_idle(self, connection: Connection, now: float) -> None:
        idle = now - connection.last_active
        if connection.frame_seconds(now) > self._frame_seconds_max:
            self.refuse(
                connection, "the rest of a request did not arrive in penstock.request.read.timeout.ms"
            )
        elif (connection.has_pending_replies or connection.throttle_ms) and connection.abort_if_peer_closed():
            pass  # reading was paused, so the close went unnoticed
        elif not connection.is_open:
            if idle > self._frame_seconds_max:
                connection.abort()  # the client does not read its last replies
        elif connection.has_pending_replies and not connection.is_write_paused:
            connection.last_active = now  # the client waits for this node
        elif 0 < self._idle_seconds_max < idle:
            connection.close()


def _hosts(host: str) -> Any:
    """Return the host as bytes if possible: for text, the event loop first loads tables of international names."""
    if not host:
        return None
    return [host.encode()] if host.isascii() else host


def _ports(server: asyncio.Server) -> list[int]:
    return [int(each.getsockname()[1]) for each in server.sockets]
