"""The listening sockets and what all connections share: bounds, buffers, counters."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.broker.apis import PRODUCE
from penstock.broker.buffers import FrameBuffers
from penstock.broker.connection import Connection
from penstock.broker.dispatch import Dispatcher
from penstock.broker.listeners import Listener

if TYPE_CHECKING:
    from penstock.broker.node import Node

logger = logging.getLogger("penstock.server")

_SWEEP_SECONDS = 1.0
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
        self._connections_max = settings.integer("max.connections")
        self._connections_per_host_max = settings.integer("max.connections.per.ip")
        self._idle_seconds_max = settings.integer("connections.max.idle.ms") / 1000
        self._frame_seconds_max = settings.integer("penstock.request.read.timeout.ms") / 1000
        self._unsent_bytes_max = settings.integer("penstock.max.queued.response.bytes")
        self._per_host: Counter[str] = Counter()
        self._waiting_for_memory: OrderedDict[Connection, None] = OrderedDict()
        self._servers: list[asyncio.Server] = []
        self._progress = asyncio.Event()
        self._sweeper: asyncio.TimerHandle | None = None
        self._gathered: list[Connection] | None = None

    async def bind(self, listener: Listener) -> int:
        """Returns the bound port; clients are not let in before `serve`. Raises OSError."""
        server = await self._listen(listener, listener.port)
        ports = _ports(server)
        if len(set(ports)) > 1:
            # A name with several addresses and no port of its own: one that is free on all of them.
            server.close()
            server = await self._listen(listener, ports[0])
        self._servers.append(server)
        return _ports(server)[0]

    async def _listen(self, listener: Listener, port: int) -> asyncio.Server:
        return await asyncio.get_running_loop().create_server(
            lambda: Connection(self, listener.name),
            _hosts(listener.host),
            port,
            backlog=self.node.settings.integer("socket.listen.backlog.size"),
            reuse_address=True,
            start_serving=False,
        )

    async def serve(self) -> None:
        for server in self._servers:
            await server.start_serving()
        self._sweeper = asyncio.get_running_loop().call_later(_SWEEP_SECONDS, self._sweep)

    async def close(self, drain_seconds: float = 0) -> None:
        """Take no new requests, give writes under way time to be answered, and hang up."""
        self.is_closing = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        for server in self._servers:
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
        host = connection.client_host
        if len(self.connections) >= self._connections_max:
            self._turn_away(connection, "max.connections")
        elif self._per_host[host] >= self._connections_per_host_max:
            self._turn_away(connection, "max.connections.per.ip")
        self.connections.add(connection)
        self._per_host[host] += 1

    def _turn_away(self, connection: Connection, setting: str) -> None:
        logger.warning("connection refused", extra={"peer": connection.peer, "reason": setting})
        self.metrics.connections_refused += 1
        connection.abort()

    def forget(self, connection: Connection) -> None:
        self.connections.discard(connection)
        self.slow_readers.discard(connection)
        host = connection.client_host
        self._per_host[host] -= 1
        if self._per_host[host] <= 0:
            del self._per_host[host]
        self._waiting_for_memory.pop(connection, None)
        self.progress()

    def refuse(self, connection: Connection, reason: str) -> None:
        """A client that does not speak the protocol: said once, cut off, and nobody else notices."""
        logger.warning("bad request", extra={"peer": connection.peer, "reason": reason})
        self.metrics.malformed_frames += 1
        connection.abort()

    def failed(self, connection: Connection) -> None:
        logger.exception("request failed", extra={"peer": connection.peer})
        self.metrics.internal_errors += 1
        connection.abort()

    # -- memory --------------------------------------------------------------------------------------

    def wait_for_memory(self, connection: Connection) -> None:
        """Read on from this connection when requests have let go of some memory; first come, first served."""
        connection.mute()
        self._waiting_for_memory[connection] = None

    def _memory_freed(self) -> None:
        if self._waiting_for_memory:
            asyncio.get_running_loop().call_soon(self._wake_waiting)

    def _wake_waiting(self) -> None:
        waiting = self._waiting_for_memory
        while waiting and not self.buffers.is_full:
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
        if connection.is_mid_frame and idle > self._frame_seconds_max:
            self.refuse(connection, "the rest of a request did not arrive in time")
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


def _ports(server: asyncio.Server) -> list[int]:
    return [int(socket.getsockname()[1]) for socket in server.sockets]
