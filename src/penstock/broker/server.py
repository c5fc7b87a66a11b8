"""The listening sockets and what all connections share: bounds, buffers, counters."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from penstock.broker.apis import PRODUCE
from penstock.broker.buffers import FrameBuffers
from penstock.broker.connection import Connection
from penstock.broker.dispatch import Dispatcher
from penstock.broker.listeners import Listener

if TYPE_CHECKING:
    from penstock.broker.node import Node

logger = logging.getLogger("penstock.server")

_SWEEP_SECONDS = 1.0


class Server:
    def __init__(self, node: Node) -> None:
        settings = node.settings
        self.node = node
        self.metrics = node.metrics
        self.frame_bytes_max = settings.integer("socket.request.max.bytes")
        self.inflight_max = settings.integer("penstock.max.inflight.requests.per.connection")
        self.buffers = FrameBuffers(settings.integer("queued.max.request.bytes"))
        self.is_closing = False
        self.slow_readers: set[Connection] = set()
        self.connections: set[Connection] = set()
        self.clock = asyncio.get_running_loop().time
        self.dispatch = Dispatcher(node, self).dispatch
        self._connections_max = settings.integer("max.connections")
        self._connections_per_host_max = settings.integer("max.connections.per.ip")
        self._idle_seconds_max = settings.integer("connections.max.idle.ms") / 1000
        self._frame_seconds_max = settings.integer("penstock.request.read.timeout.ms") / 1000
        self._unsent_bytes_max = settings.integer("penstock.max.queued.response.bytes")
        self._per_host: Counter[str] = Counter()
        self._waiting_for_memory: list[Connection] = []
        self._servers: list[asyncio.Server] = []
        self._progress = asyncio.Event()
        self._sweeper: asyncio.TimerHandle | None = None

    async def bind(self, listener: Listener) -> int:
        """Returns the bound port; clients are not let in before `serve`. Raises OSError."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: Connection(self, listener.name),
            listener.host or None,
            listener.port,
            backlog=self.node.settings.integer("socket.listen.backlog.size"),
            reuse_address=True,
            start_serving=False,
        )
        self._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

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
        self._memory_freed()
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
        self._waiting_for_memory.append(connection)
        asyncio.get_running_loop().call_later(0.01, self._memory_freed)

    def _memory_freed(self) -> None:
        waiting, self._waiting_for_memory = self._waiting_for_memory, []
        for connection in waiting:
            connection.unmute()

    def response_bytes_left(self) -> int:
        """What fetches may still add to the replies that slow readers have not taken."""
        if not self.slow_readers:
            return self._unsent_bytes_max
        return self._unsent_bytes_max - sum(c.unsent_bytes for c in self.slow_readers)

    def _sweep(self) -> None:
        now = self.clock()
        for connection in list(self.connections):
            idle = now - connection.last_active
            if connection.is_mid_frame and idle > self._frame_seconds_max:
                self.refuse(connection, "the rest of a request did not arrive in time")
            elif 0 < self._idle_seconds_max < idle:
                connection.close()
        self._sweeper = asyncio.get_running_loop().call_later(_SWEEP_SECONDS, self._sweep)
