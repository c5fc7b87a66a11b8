"""The listening sockets and what all connections share: bounds, buffers, counters."""

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

from penstock.broker.apis import PRODUCE
from penstock.broker.buffers import FrameBuffers
from penstock.broker.connection import Connection
from penstock.broker.dispatch import Dispatcher
from penstock.broker.listeners import Listener
from penstock.broker.settings_table import parse_connection_overrides
from penstock.log.files import open_files_limit

if TYPE_CHECKING:
    from penstock.broker.node import Node

logger = logging.getLogger("penstock.server")

_SWEEP_SECONDS = 1.0
#: Of a turn: what a connection may still use for pipelined frames once others have used the turn up.
_LATE_SHARE = 1 / 8
_CONNECTION_LIMITS = (
    "max.connections",
    "max.connections.per.ip",
    "max.connections.per.ip.overrides",
    "max.connection.creation.rate",
)
T = TypeVar("T")


class Server:
    def __init__(self, node: Node) -> None:
        settings = node.settings
        self.node = node
        self.metrics = node.metrics
        self.frame_bytes_max = settings.integer("socket.request.max.bytes")
        self.inflight_max = settings.integer("penstock.max.inflight.requests.per.connection")
        self.buffers = FrameBuffers(settings.integer("queued.max.request.bytes"), self._memory_freed)
        self.held_bytes = 0  # replies that wait for those before them
        self.is_closing = False
        self.slow_readers: set[Connection] = set()
        self.connections: set[Connection] = set()
        self.clock = asyncio.get_running_loop().time
        self.gathers_writes = type(asyncio.get_running_loop()).__module__.startswith("uvloop")
        self.dispatch = Dispatcher(node, self).dispatch
        self._connections_max = self._connections_per_host_max = 0
        self._connections_by_host: dict[str, int] = {}
        #: Host names with limits of their own, and whether a thread looks for their addresses.
        self._limited_names: dict[str, int] = {}
        self._is_resolving = False
        #: The shortest time between two connections of clients, and when the next one is due.
        self._connection_interval = self._next_connection = 0.0
        node.dynamic.watch(_CONNECTION_LIMITS, self._limit_connections)
        self._limit_connections()
        self._idle_seconds_max = settings.integer("connections.max.idle.ms") / 1000
        self._frame_seconds_max = settings.integer("penstock.request.read.timeout.ms") / 1000
        self._unsent_bytes_max = settings.integer("penstock.max.queued.response.bytes")
        #: How long pipelined frames are handled in a turn of the loop, and a request that takes longer is expensive.
        self.turn_seconds = settings.integer("penstock.connection.turn.ms") / 1000
        self._turn_ends = 0.0
        self._is_turn_open = False
        self._queue: deque[Connection] = deque()
        self._is_turn_due = False
        #: Connections of clients, in all and from each host.
        self._clients = 0
        self._per_host: Counter[str] = Counter()
        self._waiting_for_memory: OrderedDict[Connection, None] = OrderedDict()
        self._waiting_to_grow: OrderedDict[Connection, None] = OrderedDict()
        self._servers: list[tuple[Listener, asyncio.Server]] = []
        self._progress = asyncio.Event()
        self._sweeper: asyncio.TimerHandle | None = None
        self._gathered: list[Connection] | None = None

    def _limit_connections(self) -> None:
        """For connections that come from now on; those that are open stay."""
        dynamic = self.node.dynamic
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
            # Those that came under another rate must not hold up those that come now.
            self._connection_interval, self._next_connection = interval, 0.0

    def _resolve_names(self) -> None:
        """Beside the event loop, and not waited for at the end: a name server may take minutes for each name."""
        self._is_resolving = True
        arguments = (self._limited_names, asyncio.get_running_loop())
        threading.Thread(
            target=self._resolve, args=arguments, name="penstock-host-names", daemon=True
        ).start()

    def _resolve(self, names: dict[str, int], loop: asyncio.AbstractEventLoop) -> None:
        with suppress(RuntimeError):  # the loop has ended
            for host, count in names.items():
                if names is not self._limited_names:
                    break
                loop.call_soon_threadsafe(self._resolved, names, _addresses(host), count)
            loop.call_soon_threadsafe(self._all_resolved, names)

    def _resolved(self, names: dict[str, int], addresses: set[str], count: int) -> None:
        if names is self._limited_names:
            # A limit that was given for the address itself counts before that of its name.
            self._connections_by_host = dict.fromkeys(addresses, count) | self._connections_by_host

    def _all_resolved(self, names: dict[str, int]) -> None:
        self._is_resolving = False
        if names is not self._limited_names and self._limited_names:
            self._resolve_names()

    async def bind(self, listener: Listener) -> int:
        """Returns the bound port; nobody is let in before `serve` or `serve_nodes`. Raises OSError."""
        server = await self._listen(listener, listener.port)
        ports = _ports(server)
        if len(set(ports)) > 1:
            # A name with several addresses and no port of its own: one that is free on all of them.
            server.close()
            server = await self._listen(listener, ports[0])
        self._servers.append((listener, server))
        return _ports(server)[0]

    async def _listen(self, listener: Listener, port: int) -> asyncio.Server:
        for_nodes = self._is_for_nodes(listener)
        return await asyncio.get_running_loop().create_server(
            lambda: Connection(self, listener.name, for_nodes=for_nodes),
            _hosts(listener.host),
            port,
            backlog=self.node.settings.integer("socket.listen.backlog.size"),
            reuse_address=True,
            start_serving=False,
        )

    def _is_for_nodes(self, listener: Listener) -> bool:
        return listener.name == self.node.settings.inter_broker_listener

    async def serve_nodes(self) -> None:
        """Let the other nodes in, which this one needs before it can be of use to clients.

        Clients are refused until `serve`: one that is let in and then cut off may not ask for metadata again for as
        long as it can connect (librdkafka).
        """
        await self._serve([server for listener, server in self._servers if self._is_for_nodes(listener)])

    async def serve(self) -> None:
        await self._serve([server for _, server in self._servers])

    async def _serve(self, servers: Iterable[asyncio.Server]) -> None:
        for server in servers:
            await server.start_serving()
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().call_later(_SWEEP_SECONDS, self._sweep)

    async def close(self, drain_seconds: float = 0) -> None:
        """Take no new requests, give writes under way time to be answered, and hang up."""
        self.is_closing = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        for _, server in self._servers:
            server.close()
        for connection in self.connections:
            connection.mute()
        with suppress(TimeoutError):
            async with asyncio.timeout(drain_seconds):
                await self._until(lambda: not any(c.owes(PRODUCE) for c in self.connections))
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
        """A reply has left or a connection has gone: what a stopping server waits for."""
        self._progress.set()

    # -- replies that become ready together ----------------------------------------------------------

    @property
    def is_gathering(self) -> bool:
        return self._gathered is not None

    def gathered(self, work: Callable[[], T]) -> T:
        """Work that may let many replies go: those of one connection leave in one write."""
        if self._gathered is not None:
            return work()
        gathered = self._gathered = []
        try:
            return work()
        finally:
            self._gathered = None
            for connection in gathered:
                connection.let_go()

    def gather(self, connection: Connection) -> bool:
        """Whether its replies are to be held back until `gathered` is over."""
        if self._gathered is None:
            return False
        self._gathered.append(connection)
        return True

    # -- connections ---------------------------------------------------------------------------------

    def admit(self, connection: Connection) -> None:
        self.connections.add(connection)
        if self._is_of_a_node(connection):
            if len(self.connections) - self._clients > open_files_limit() // 2:
                self._turn_away(connection, "open files")
            return
        host = connection.client_host
        if self._clients >= self._connections_max:
            self._turn_away(connection, "max.connections")
        elif self._per_host[host] >= self._connections_by_host.get(host, self._connections_per_host_max):
            self._turn_away(connection, "max.connections.per.ip")
        elif not connection.for_nodes:
            self._wait_for_turn(connection)
        self._clients += 1
        self._per_host[host] += 1

    def _is_of_a_node(self, connection: Connection) -> bool:
        """Limits are for clients: nodes that cannot reach each other could not even undo them."""
        return connection.for_nodes and len(self._servers) > 1

    def _wait_for_turn(self, connection: Connection) -> None:
        """Connections beyond max.connection.creation.rate are read from later; a second's worth may come at once."""
        now = self.clock()
        due = max(self._next_connection, now - 1.0)
        self._next_connection = due + self._connection_interval
        if due > now:
            connection.mute()
            asyncio.get_running_loop().call_later(due - now, connection.unmute)

    def _turn_away(self, connection: Connection, setting: str) -> None:
        logger.warning("connection refused", extra={"peer": connection.peer, "reason": setting})
        self.metrics.connections_refused += 1
        connection.abort()

    def forget(self, connection: Connection) -> None:
        self.connections.discard(connection)
        self.slow_readers.discard(connection)
        if not self._is_of_a_node(connection):
            host = connection.client_host
            self._clients -= 1
            self._per_host[host] -= 1
            if self._per_host[host] <= 0:
                del self._per_host[host]
        self._waiting_for_memory.pop(connection, None)
        self._waiting_to_grow.pop(connection, None)
        self.progress()

    def refuse(self, connection: Connection, reason: str) -> None:
        """A client that does not speak the protocol: said once, cut off, and nobody else notices."""
        logger.warning("bad request", extra={"peer": connection.peer, "reason": reason})
        self.metrics.malformed_frames += 1
        connection.abort()

    def refuse_node_request(self, connection: Connection, api: str) -> None:
        """Count and log a request that only nodes send, on a listener for clients; the caller answers it."""
        logger.warning(
            "request between nodes refused on a listener for clients",
            extra={"peer": connection.peer, "listener": connection.listener, "api": api},
        )
        self.metrics.count_node_request_refused(api)

    def failed(self, connection: Connection) -> None:
        logger.exception("request failed", extra={"peer": connection.peer})
        self.metrics.internal_errors += 1
        connection.abort()

    # -- turns ---------------------------------------------------------------------------------------

    def slice_ends(self) -> float:
        """Until when a connection may handle what it has pipelined, from now on: others share the loop's turn."""
        now = perf_counter()
        if not self._is_turn_open:
            self._begin_turn(now)
        return max(self._turn_ends, now + self.turn_seconds * _LATE_SHARE)

    def _begin_turn(self, now: float) -> None:
        self._is_turn_open = True
        self._turn_ends = now + self.turn_seconds
        asyncio.get_running_loop().call_soon(self._end_turn)

    def _end_turn(self) -> None:
        self._is_turn_open = False

    def queue(self, connection: Connection) -> None:
        """Its frames have to wait: one connection after the other, one slice in each turn of the loop."""
        if connection.wait_for_turn():
            self._queue.append(connection)
            self._plan_turn()

    def _plan_turn(self) -> None:
        if not self._is_turn_due:
            self._is_turn_due = True
            asyncio.get_running_loop().call_soon(self._run_queue)

    def _run_queue(self) -> None:
        self._is_turn_due = False
        queue = self._queue
        if not self._is_turn_open:
            self._begin_turn(perf_counter())
        for _ in range(len(queue)):
            queue.popleft().take_turn()
            if perf_counter() >= self._turn_ends:
                break
        if queue:
            self._plan_turn()

    # -- memory --------------------------------------------------------------------------------------

    def wait_for_memory(self, connection: Connection, *, to_grow: bool = False) -> None:
        """Read on from this connection when requests have let go of some memory; first come, first served.

        Frames that are arriving go before those that have not begun, so that memory comes free.
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
        """What fetches may still add to the replies that nobody has taken yet."""
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
        elif connection.is_owed_replies and connection.leaves_with_its_peer():
            pass  # it was not read from, so it did not hear
        elif not connection.is_open:
            if idle > self._frame_seconds_max:
                connection.abort()  # it does not take what it is still to be sent
        elif connection.is_owed_replies and not connection.is_write_paused:
            connection.last_active = now  # it is we who keep it waiting
        elif 0 < self._idle_seconds_max < idle:
            connection.close()


def _hosts(host: str) -> Any:
    """As bytes where possible: given text, the loop first loads tables of international names."""
    if not host:
        return None
    return [host.encode()] if host.isascii() else host


def _as_address(host: str) -> str | None:
    """As connections name it, or None for a host name."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return None


def _addresses(host: str) -> set[str]:
    """Of a host name. Blocks."""
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
    except (OSError, ValueError) as error:  # ValueError: no resolver could be asked for such a name
        logger.warning(
            "no address for a host in max.connections.per.ip.overrides",
            extra={"host": host, "reason": str(error)},
        )
        return set()


def _ports(server: asyncio.Server) -> list[int]:
    return [int(each.getsockname()[1]) for each in server.sockets]
