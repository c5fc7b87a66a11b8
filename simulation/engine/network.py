"""A virtual TCP network between machines: latency, cuts in one or both directions, resets, and machines without power.

Data on a connection arrives complete and in order, or not at all. A cut holds data back, as TCP retransmits it once
the cut is over. A process that ends resets its connections; a machine that loses power says nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from contextvars import Context, copy_context
from typing import Any, Final, cast

from simulation.engine.loop import CURRENT, OUTSIDE, Process, VirtualLoop

Address = tuple[str, int]

_LATENCY_S: Final = (0.000_2, 0.002)
_SLOW_S: Final = (0.01, 0.06)
_SLOW_CHANCE: Final = 0.02
#: The place of the API key in a request.
_API_KEY: Final = slice(4, 6)
_LATE_S: Final = (0.05, 1.2)
#: How long after a request its connection is reset, so that its response is lost.
_HANDLED_S: Final = (0.000_1, 0.02)
#: How often TCP sends a connection request again.
_CONNECT_RETRY_S: Final = 0.2


class Network:
    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.listeners: dict[Address, Listener] = {}
        #: Pairs of hosts: what the first sends does not reach the second.
        self.cuts: set[tuple[str, str]] = set()
        self.hosts_without_power: set[str] = set()
        self.slow_chance = _SLOW_CHANCE
        self.slow_s = _SLOW_S
        self.reset_chance = 0.0
        #: The API keys of the requests that each host has sent.
        self.requests: dict[str, dict[int, None]] = {}
        #: Hosts whose requests of one API are late or lost: pairs of host and API key.
        self.troubled: set[tuple[str, int]] = set()
        self._held: list[tuple[str, str, Callable[[], None]]] = []
        self._connections: dict[Endpoint, None] = {}

    def latency(self) -> float:
        is_slow = self.loop.chance(self.slow_chance)
        return self.loop.between(*(self.slow_s if is_slow else _LATENCY_S))

    def is_cut(self, source: str, target: str) -> bool:
        if source == target:
            return False
        return (source, target) in self.cuts or target in self.hosts_without_power

    def cut(self, sources: Iterable[str], targets: Iterable[str], *, both_ways: bool = True) -> None:
        targets = tuple(targets)
        for source in sources:
            for target in targets:
                if source != target:
                    self.cuts.add((source, target))
                    if both_ways:
                        self.cuts.add((target, source))

    def heal(self) -> None:
        self.cuts.clear()
        self.deliver_held()

    def deliver_held(self) -> None:
        held, self._held = self._held, []
        for source, target, deliver in held:
            if self.is_cut(source, target):
                self._held.append((source, target, deliver))
            else:
                deliver()

    def hold(self, source: str, target: str, deliver: Callable[[], None]) -> None:
        self._held.append((source, target, deliver))

    def process_ended(self, process: Process) -> None:
        """The kernel closes the listeners of a process that ends, and resets its connections."""
        self._close_listeners(process)
        for endpoint in [each for each in self._connections if each.process is process]:
            endpoint.reset_by_kernel()

    def power_lost(self, process: Process | None, host: str) -> None:
        self.hosts_without_power.add(host)
        if process is None:
            return
        self._close_listeners(process)
        for endpoint in [each for each in self._connections if each.process is process]:
            self.forget(endpoint)

    def power_restored(self, host: str) -> None:
        self.hosts_without_power.discard(host)
        self.deliver_held()

    def reset_some(self, probability: float) -> None:
        """Reset open connections at random."""
        for endpoint in list(self._connections):
            if endpoint in self._connections and self.loop.chance(probability):
                endpoint.reset_by_kernel()
                endpoint.peer.reset_by_kernel()

    def _close_listeners(self, process: Process) -> None:
        for address in [at for at, each in self.listeners.items() if each.process is process]:
            del self.listeners[address]

    def remember(self, endpoint: Endpoint) -> None:
        self._connections[endpoint] = None

    def forget(self, endpoint: Endpoint) -> None:
        self._connections.pop(endpoint, None)

    # -- connecting ------------------------------------------------------------------------------------

    def listen(self, factory: Callable[[], asyncio.BaseProtocol], address: Address) -> Listener:
        process = CURRENT.get()
        assert process is not None, "only a process can listen"
        return Listener(self, process, factory, address)

    async def connect(
        self, factory: Callable[[], asyncio.BaseProtocol], address: Address
    ) -> tuple[Endpoint, asyncio.BaseProtocol]:
        process = CURRENT.get()
        assert process is not None, "only a process can connect"
        source, target = process.machine.host, address[0]
        await asyncio.sleep(self.latency())
        while self.is_cut(source, target) or self.is_cut(target, source):
            await asyncio.sleep(_CONNECT_RETRY_S)
        listener = self.listeners.get(address)
        if listener is None:
            await asyncio.sleep(self.latency())
            raise ConnectionRefusedError(111, "Connection refused")
        local = Endpoint(self, process, process.context.copy(), source)
        remote = Endpoint(self, listener.process, listener.context, target)
        local.peer, remote.peer = remote, local
        local.is_client = True
        self.loop.call_soon(remote.open, listener.factory, context=listener.context)
        await asyncio.sleep(self.latency())
        protocol = factory()
        local.attach(protocol)
        return local, protocol


class _Socket:
    """What code asks of a listening socket."""

    def __init__(self, address: Address) -> None:
        self._address = address

    def getsockname(self) -> Address:
        return self._address


class Listener:
    """Stands for asyncio.Server."""

    def __init__(
        self,
        network: Network,
        process: Process,
        factory: Callable[[], asyncio.BaseProtocol],
        address: Address,
    ) -> None:
        self.process = process
        self.factory = factory
        self.context = copy_context()
        self.sockets = [_Socket(address)]
        self._network = network
        self._address = address

    async def start_serving(self) -> None:
        self._network.listeners[self._address] = self

    def close(self) -> None:
        if self._network.listeners.get(self._address) is self:
            del self._network.listeners[self._address]

    async def wait_closed(self) -> None: ...


class Endpoint(asyncio.Transport):
    """One end of a connection."""

    peer: Endpoint

    def __init__(self, network: Network, process: Process, context: Context, host: str) -> None:
        super().__init__()
        self.process = process
        self._network = network
        self._loop = network.loop
        self._context = context
        self._host = host
        self._protocol: asyncio.BaseProtocol | None = None
        #: Whether it sends requests, and does not answer them.
        self.is_client = False
        self._is_closing = self._is_lost = self._is_paused = False
        self._received: deque[bytes] = deque()
        #: When the last data sent arrives at the earliest: later data must not overtake it.
        self._arrival = 0.0
        network.remember(self)

    def open(self, factory: Callable[[], asyncio.BaseProtocol]) -> None:
        self.attach(factory())

    def attach(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol
        protocol.connection_made(self)
        self._pump()

    # -- sending ---------------------------------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._is_closing:
            return
        data = bytes(data)
        if self.is_client and len(data) >= _API_KEY.stop:
            api_key = int.from_bytes(data[_API_KEY], "big")
            self._network.requests.setdefault(self._host, {})[api_key] = None
            if (self._host, api_key) in self._network.troubled:
                self._send_in_trouble(data)
                return
        self._send(self.peer.receive, data)

    def _send_in_trouble(self, data: bytes) -> None:
        """A request or its response comes late, with all that follows it, or one of them is lost."""
        loop, kind = self._loop, self._loop.draw(10)
        if kind < 3:
            self._arrival = max(self._arrival, loop.now + loop.between(*_LATE_S))
        elif kind < 6:
            self.peer._arrival = max(self.peer._arrival, loop.now + loop.between(*_LATE_S))
        if kind < 8:
            self._send(self.peer.receive, data)
        if kind >= 6:
            delay_s = self._arrival - loop.now + loop.between(*_HANDLED_S) if kind < 8 else 0.0
            loop.call_later(max(delay_s, 0.0), self._reset_both, context=OUTSIDE)

    def _reset_both(self) -> None:
        self.reset_by_kernel()
        self.peer.reset_by_kernel()

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.write(b"".join(list_of_data))

    def _send(self, call: Callable[..., None], *args: Any) -> None:
        loop, network = self._loop, self._network
        if network.reset_chance and loop.chance(network.reset_chance):
            self.reset_by_kernel()
            self.peer.reset_by_kernel()
            return

        def arrive() -> None:
            if network.is_cut(self._host, self.peer._host):
                network.hold(self._host, self.peer._host, arrive)
            elif self.peer.process.is_over and not self.peer._is_lost:
                self._send_back_reset()
            else:
                loop.call_soon(call, *args, context=self.peer._context)

        # Timers of the same moment may run in any order.
        self._arrival = max(self._arrival + 1e-9, loop.now + network.latency())
        # The network is not part of any process: what was sent arrives even if the sender ends.
        loop.call_at(self._arrival, arrive, context=OUTSIDE)

    def _send_back_reset(self) -> None:
        """The peer's machine has restarted and knows nothing of this connection."""
        if not self.process.is_over:
            self._loop.call_later(
                self._network.latency(), self._lose, ConnectionResetError(104, "reset"), context=self._context
            )

    # -- receiving -------------------------------------------------------------------------------------

    def receive(self, data: bytes) -> None:
        if not self._is_closing:
            self._received.append(data)
            self._pump()

    def _pump(self) -> None:
        while self._received and self._protocol is not None and not (self._is_paused or self._is_closing):
            data = self._received.popleft()
            if isinstance(self._protocol, asyncio.BufferedProtocol):
                self._fill(self._protocol, memoryview(data))
            else:
                cast("asyncio.Protocol", self._protocol).data_received(data)

    def _fill(self, protocol: asyncio.BufferedProtocol, data: memoryview) -> None:
        while data and not self._is_closing:
            if self._is_paused:
                self._received.appendleft(bytes(data))
                return
            buffer = cast("memoryview", protocol.get_buffer(-1))
            count = min(len(buffer), len(data))
            buffer[:count] = data[:count]
            protocol.buffer_updated(count)
            data = data[count:]

    def pause_reading(self) -> None:
        self._is_paused = True

    def resume_reading(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self._loop.call_soon(self._pump)

    def is_reading(self) -> bool:
        return not self._is_paused

    # -- closing ---------------------------------------------------------------------------------------

    def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._loop.call_soon(self._lose, None)
            self._send(self.peer.closed_by_peer)

    def closed_by_peer(self) -> None:
        self._lose(None)

    def reset_by_kernel(self) -> None:
        """Close this end, and let the other end know after a moment."""
        if self._is_lost:
            return
        if self.process.is_over:
            self._is_lost = self._is_closing = True
            self._network.forget(self)
        else:
            self._loop.call_soon(self._lose, ConnectionResetError(104, "reset"), context=self._context)
        self._send_reset()

    def _send_reset(self) -> None:
        peer, network = self.peer, self._network

        def arrive() -> None:
            if network.is_cut(self._host, peer._host):
                network.hold(self._host, peer._host, arrive)
            else:
                self._loop.call_soon(peer._lose, ConnectionResetError(104, "reset"), context=peer._context)

        self._loop.call_later(network.latency(), arrive, context=OUTSIDE)

    def _lose(self, error: Exception | None) -> None:
        if self._is_lost:
            return
        self._is_lost = self._is_closing = True
        self._received.clear()
        self._network.forget(self)
        if self._protocol is not None:
            self._protocol.connection_lost(error)

    def is_closing(self) -> bool:
        return self._is_closing

    # -- the rest of asyncio.Transport -----------------------------------------------------------------

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "peername":
            return self.peer._host, 40_000
        return (self._host, 9092) if name == "sockname" else default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0
