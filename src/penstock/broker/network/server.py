"""The listening sockets, and what all connections share: connection limits, time slices, receive memory, counters."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.broker.config.definitions import parse_connection_overrides
from penstock.broker.config.listeners import Listener
from penstock.broker.network.apis import PRODUCE
from penstock.broker.network.connection import Connection
from penstock.broker.network.frame_buffers import FrameBuffers
from penstock.log.segment_files import open_files_limit

if TYPE_CHECKING:
    from penstock.broker.config.effective_settings import DynamicSettings
    from penstock.broker.config.node_settings import NodeSettings
    from penstock.broker.metrics.counters import Metrics

logger = logging.getLogger("penstock.server")

_SWEEP_SECONDS = 1.0
#: The part of a time slice that a connection still gets for pipelined frames if others have used up the slice.
_LATE_SLICE_FRACTION = 1 / 8
_CONNECTION_LIMITS = (
    "max.connections",
    "max.connections.per.ip",
    "max.connections.per.ip.overrides",
    "max.connection.creation.rate",
)
T = TypeVar("T")


class Server:
    def __init__(self, settings: NodeSettings, dynamic: DynamicSettings, metrics: Metrics) -> None:
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
        self._connections_max = self._connections_per_host_max = 0
        self._connections_by_host: dict[str, int] = {}
        #: Host names with limits of their own, and whether a thread is resolving them.
        self._limited_names: dict[str, int] = {}
        self._is_resolving = False
        #: The shortest interval in seconds between two client connections, and when the next one may be served.
        self._connection_interval = self._next_connection = 0.0
        dynamic.watch(_CONNECTION_LIMITS, self._limit_connections)
        self._limit_connections()
        self._idle_seconds_max = settings.integer("connections.max.idle.ms") / 1000
        self._frame_seconds_max = settings.integer("penstock.request.read.timeout.ms") / 1000
        self._unsent_bytes_max = settings.integer("penstock.max.queued.response.bytes")
        #: How long pipelined frames are handled in one event loop iteration. A request that takes longer is expensive.
        self.time_slice_seconds = settings.integer("penstock.connection.turn.ms") / 1000
        self._iteration_deadline = 0.0
        self._is_iteration_open = False
        self._queue: deque[Connection] = deque()
        self._is_queue_scheduled = False
        #: The number of client connections, in total and by host.
        self._clients = 0
        self._per_host: Counter[str] = Counter()
        self._waiting_for_memory: OrderedDict[Connection, None] = OrderedDict()
        self._waiting_to_grow: OrderedDict[Connection, None] = OrderedDict()
        self._servers: list[tuple[Listener, asyncio.Server]] = []
        self._progress = asyncio.Event()
        self._sweeper: asyncio.TimerHandle | None = None
        self._gathered: list[Connection] | None = None

    def _limit_connections(self) -> None:
        """Apply the connection limits to new connections; open connections stay."""
        dynamic = self._dynamic
        # The other half of the descriptors is for files: connections must not keep logs from being opened.
        self._connections_max = min(dynamic.integer("max.connections"), open_files_limit() // 2)
        self._connections_per_host_max = dynamic.integer("max.connections.per.ip")
        overrides = parse_connection_overrides(str(dynamic["max.connections.per.ip.overrides"]))
        self._connections_by_host = {
            address: count for host, count in overrides.items() if (address := _as_address(host)) is not None
        }
        self._limited_names = {host: count for host, count in overrides.items() if _as_address(host) is None}
        if self._limited_names and not self._is_resolving:
            self._resolve_names()
        interval = 1 / dynamic.integer("max.connection.creation.rate")
        if interval != self._connection_interval:
            # Connections that were accepted under another rate must not delay new ones.
            self._connection_interval, self._next_connection = interval, 0.0

    def _resolve_names(self) -> None:
        """Use a daemon thread, which a stop does not wait for: a name server may take minutes for each name."""
        self._is_resolving = True
        arguments = (self._limited_names, asyncio.get_running_loop())
        threading.Thread(
            target=self._resolve, args=arguments, name="penstock-host-names", daemon=True
        ).start()

    def _resolve(self, names: dict[str, int], loop: asyncio.AbstractEventLoop) -> None:
        with suppress(RuntimeError):  # the event loop is closed
            for host, count in names.items():
                if names is not self._limited_names:
                    break
                loop.call_soon_threadsafe(self._resolved, names, _addresses(host), count)
            loop.call_soon_threadsafe(self._all_resolved, names)

    def _resolved(self, names: dict[str, int], addresses: set[str], count: int) -> None:
        if names is self._limited_names:
            # A limit for the address itself takes precedence over the limit for its name.
            self._connections_by_host = dict.fromkeys(addresses, count) | self._connections_by_host

    def _all_resolved(self, names: dict[str, int]) -> None:
        self._is_resolving = False
        if names is not self._limited_names and self._limited_names:
            self._resolve_names()

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
        is_inter_broker = self._is_inter_broker_listener(listener)
        return await asyncio.get_running_loop().create_server(
            lambda: Connection(self, listener.name, is_inter_broker=is_inter_broker),
            _hosts(listener.host),
            port,
            backlog=self._settings.integer("socket.listen.backlog.size"),
            reuse_address=True,
            start_serving=False,
        )

    def _is_inter_broker_listener(self, listener: Listener) -> bool:
        return listener.name == self._settings.inter_broker_listener

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

    def admit(self, connection: Connection) -> None:
        self.connections[connection] = None
        if self._is_from_node(connection):
            if len(self.connections) - self._clients > open_files_limit() // 2:
                self._reject_connection(connection, "open files")
            return
        host = connection.client_host
        if self._clients >= self._connections_max:
            self._reject_connection(connection, "max.connections")
        elif self._per_host[host] >= self._connections_by_host.get(host, self._connections_per_host_max):
            self._reject_connection(connection, "max.connections.per.ip")
        elif not connection.is_inter_broker:
            self._delay_connection(connection)
        self._clients += 1
        self._per_host[host] += 1

    def _is_from_node(self, connection: Connection) -> bool:
        """Limits apply only to clients: if nodes could not reach each other, the limits could not be changed either."""
        return connection.is_inter_broker and len(self._servers) > 1

    def _delay_connection(self, connection: Connection) -> None:
        """Delay reads from connections above max.connection.creation.rate; a burst of one second's worth is allowed."""
        now = self.clock()
        due = max(self._next_connection, now - 1.0)
        self._next_connection = due + self._connection_interval
        if due > now:
            connection.mute()
            asyncio.get_running_loop().call_later(due - now, connection.unmute)

    def _reject_connection(self, connection: Connection, setting: str) -> None:
        logger.warning("connection refused", extra={"peer": connection.peer, "reason": setting})
        self.metrics.connections_refused += 1
        connection.abort()

    def forget(self, connection: Connection) -> None:
        self.connections.pop(connection, None)
        self.slow_readers.discard(connection)
        if not self._is_from_node(connection):
            host = connection.client_host
            self._clients -= 1
            self._per_host[host] -= 1
            if self._per_host[host] <= 0:
                del self._per_host[host]
        self._waiting_for_memory.pop(connection, None)
        self._waiting_to_grow.pop(connection, None)
        self.progress()

    def refuse(self, connection: Connection, reason: str) -> None:
        """Log and abort a connection that violates the protocol; other connections are not affected."""
        logger.warning("bad request", extra={"peer": connection.peer, "reason": reason})
        self.metrics.malformed_frames += 1
        connection.abort()

    def reject_inter_broker_request(self, connection: Connection, api: str) -> None:
        """Count and log a request that only nodes send, on a listener for clients; the caller sends the reply."""
        logger.warning(
            "request between nodes refused on a listener for clients",
            extra={"peer": connection.peer, "listener": connection.listener, "api": api},
        )
        self.metrics.count_node_request_refused(api)

    def failed(self, connection: Connection) -> None:
        logger.exception("request failed", extra={"peer": connection.peer})
        self.metrics.internal_errors += 1
        connection.abort()

    # -- time slices ---------------------------------------------------------------------------------

    def slice_deadline(self) -> float:
        """Return until when a connection may handle pipelined frames; all share one slice per event loop iteration."""
        now = perf_counter()
        if not self._is_iteration_open:
            self._begin_iteration(now)
        return max(self._iteration_deadline, now + self.time_slice_seconds * _LATE_SLICE_FRACTION)

    def _begin_iteration(self, now: float) -> None:
        self._is_iteration_open = True
        self._iteration_deadline = now + self.time_slice_seconds
        asyncio.get_running_loop().call_soon(self._end_iteration)

    def _end_iteration(self) -> None:
        self._is_iteration_open = False

    def queue(self, connection: Connection) -> None:
        """Make the frames of a connection wait; queued connections share one slice per event loop iteration."""
        if connection.mark_queued():
            self._queue.append(connection)
            self._schedule_queue()

    def _schedule_queue(self) -> None:
        if not self._is_queue_scheduled:
            self._is_queue_scheduled = True
            asyncio.get_running_loop().call_soon(self._run_queue)

    def _run_queue(self) -> None:
        self._is_queue_scheduled = False
        queue = self._queue
        if not self._is_iteration_open:
            self._begin_iteration(perf_counter())
        for _ in range(len(queue)):
            queue.popleft().run_queued()
            if perf_counter() >= self._iteration_deadline:
                break
        if queue:
            self._schedule_queue()

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
        for connection in list(self.connections):
            self._check_idle(connection, now)

    def _check_idle(self, connection: Connection, now: float) -> None:
        idle = now - connection.last_active
        if connection.frame_seconds(now) > self._frame_seconds_max:
            self.refuse(
                connection, "the rest of a request did not arrive in penstock.request.read.timeout.ms"
            )
        elif connection.has_pending_replies and connection.abort_if_peer_closed():
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


def _as_address(host: str) -> str | None:
    """Return the IP address in the form that connections report, or None for a host name."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return None


def _addresses(host: str) -> set[str]:
    """Resolve a host name. Blocks."""
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
    except (OSError, ValueError) as error:  # ValueError: the name is not valid
        logger.warning(
            "no address for a host in max.connections.per.ip.overrides",
            extra={"host": host, "reason": str(error)},
        )
        return set()


def _ports(server: asyncio.Server) -> list[int]:
    return [int(each.getsockname()[1]) for each in server.sockets]
