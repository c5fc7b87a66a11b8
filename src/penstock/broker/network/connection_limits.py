"""How many connections clients may have open, and how many they may open per second: in total, by listener, by address.

The limits of the whole node apply only to clients: if nodes could not reach each other, the limits could not be changed
either. Those of one listener apply to everything that connects to it.
"""

from __future__ import annotations

import ipaddress
import logging
import math
import socket
import threading
from asyncio import AbstractEventLoop, get_running_loop
from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from penstock.broker.config.definitions import parse_connection_overrides
from penstock.broker.config.listener_security import OverrideKey
from penstock.log.segment_files import open_files_limit

if TYPE_CHECKING:
    from penstock.broker.config.effective_settings import DynamicSettings
    from penstock.broker.config.node_settings import NodeSettings

logger = logging.getLogger("penstock.server")

CONNECTIONS_MAX: Final = "max.connections"
_CREATION_RATE: Final = "max.connection.creation.rate"
_PER_IP: Final = "max.connections.per.ip"
_PER_IP_OVERRIDES: Final = "max.connections.per.ip.overrides"


class CreationRate:
    """Spreads connections out to so many per second. A burst of one second's worth is allowed."""

    __slots__ = ("_interval", "_next")

    def __init__(self, per_second: float) -> None:
        self._interval = 1 / per_second
        self._next = 0.0

    def due(self, now: float) -> float:
        """Count a connection; return when it may be served."""
        due = max(self._next, now - 1.0)
        self._next = due + self._interval
        return due


class ListenerLimits:
    """The limits that a listener has of its own, and its open connections."""

    __slots__ = ("connections_max", "name", "open", "rate")

    def __init__(self, settings: NodeSettings, listener: str) -> None:
        key, given = OverrideKey(listener, None, CONNECTIONS_MAX), settings.overrides
        self.name = key.name
        self.connections_max = None if key not in given else int(str(given[key]))
        rate = given.get(OverrideKey(listener, None, _CREATION_RATE))
        self.rate = None if rate is None else CreationRate(int(str(rate)))
        self.open = 0

    @property
    def is_reached(self) -> bool:
        return self.connections_max is not None and self.open >= self.connections_max


class ConnectionLimits:
    """`admit` and `forget` count every connection, also one that is refused, which closes later.

    `rate_of` returns how many connections per second a quota allows a host.
    """

    def __init__(self, settings: NodeSettings, dynamic: DynamicSettings) -> None:
        self._dynamic = dynamic
        self._listeners = {each.name: ListenerLimits(settings, each.name) for each in settings.listeners}
        self.rate_of: Callable[[str], float | None] = lambda host: None
        #: The client connections, in total and by host.
        self.clients = 0
        self._per_host: Counter[str] = Counter()
        self._nodes = 0
        self._connections_max = self._connections_per_host_max = 0
        self.by_host: dict[str, int] = {}
        #: Host names with limits of their own, and whether a thread is resolving them.
        self._limited_names: dict[str, int] = {}
        self.is_resolving = False
        self._creations_per_second = 0
        self._rate: CreationRate
        self._next_of_host: OrderedDict[str, float] = OrderedDict()
        dynamic.watch((CONNECTIONS_MAX, _PER_IP, _PER_IP_OVERRIDES, _CREATION_RATE), self._configure)
        self._configure()

    def __repr__(self) -> str:
        return f"<ConnectionLimits {self.clients} of {self._connections_max} clients>"

    def _configure(self) -> None:
        """Apply the limits to new connections; open connections stay."""
        dynamic = self._dynamic
        # The other half of the descriptors is for files: connections must not keep logs from being opened.
        self._connections_max = min(dynamic.integer(CONNECTIONS_MAX), open_files_limit() // 2)
        self._connections_per_host_max = dynamic.integer(_PER_IP)
        overrides = parse_connection_overrides(str(dynamic[_PER_IP_OVERRIDES]))
        self.by_host = {
            address: count for host, count in overrides.items() if (address := _as_address(host)) is not None
        }
        self._limited_names = {host: count for host, count in overrides.items() if _as_address(host) is None}
        if self._limited_names and not self.is_resolving:
            self._resolve_names()
        per_second = dynamic.integer(_CREATION_RATE)
        if per_second != self._creations_per_second:
            # Connections that were accepted under another rate must not delay new ones.
            self._creations_per_second, self._rate = per_second, CreationRate(per_second)

    # -- connections ---------------------------------------------------------------------------------

    def admit(self, listener: str, host: str, *, is_from_node: bool) -> str | None:
        """Count a connection; return the setting whose limit it exceeds."""
        own = self._listeners[listener]
        exceeded = own.name if own.is_reached else None
        own.open += 1
        if is_from_node:
            self._nodes += 1
            return exceeded or ("open files" if self._nodes > open_files_limit() // 2 else None)
        if exceeded is None:
            if self.clients >= self._connections_max:
                exceeded = CONNECTIONS_MAX
            elif self._per_host[host] >= self.by_host.get(host, self._connections_per_host_max):
                exceeded = _PER_IP
        self.clients += 1
        self._per_host[host] += 1
        return exceeded

    def forget(self, listener: str, host: str, *, is_from_node: bool) -> None:
        self._listeners[listener].open -= 1
        if is_from_node:
            self._nodes -= 1
            return
        self.clients -= 1
        self._per_host[host] -= 1
        if self._per_host[host] <= 0:
            del self._per_host[host]

    def delay_ms(self, listener: str, host: str, now: float, *, is_inter_broker: bool) -> int:
        """Return for how long a new connection is not read from, because of the rates and the quota of its host."""
        own = self._listeners[listener].rate
        due = now if own is None else max(own.due(now), now)
        if not is_inter_broker:
            due = max(due, self._rate.due(now))
            if (rate := self.rate_of(host)) is not None:
                due = max(due, self._due_of_host(host, now, 1 / rate))
        return math.ceil((due - now) * 1000) if due > now else 0

    def _due_of_host(self, host: str, now: float, interval: float) -> float:
        # Hosts whose burst is whole again need not be remembered; each step drops up to two of them.
        for _ in range(2):
            oldest = next(iter(self._next_of_host), None)
            if oldest is not None and self._next_of_host[oldest] <= now - 1.0:
                del self._next_of_host[oldest]
        due = max(self._next_of_host.pop(host, 0.0), now - 1.0)
        self._next_of_host[host] = due + interval
        return due

    def listener_setting(self, listener: str) -> str:
        """Return the name of the setting that limits the connections of one listener."""
        return self._listeners[listener].name

    # -- host names ----------------------------------------------------------------------------------

    def _resolve_names(self) -> None:
        """Use a daemon thread, which a stop does not wait for: a name server may take minutes for each name."""
        self.is_resolving = True
        arguments = (self._limited_names, get_running_loop())
        threading.Thread(
            target=self._resolve, args=arguments, name="penstock-host-names", daemon=True
        ).start()

    def _resolve(self, names: dict[str, int], loop: AbstractEventLoop) -> None:
        with suppress(RuntimeError):  # the event loop is closed
            for host, count in names.items():
                if names is not self._limited_names:
                    break
                loop.call_soon_threadsafe(self._resolved, names, _addresses(host), count)
            loop.call_soon_threadsafe(self._all_resolved, names)

    def _resolved(self, names: dict[str, int], addresses: set[str], count: int) -> None:
        if names is self._limited_names:
            # A limit for the address itself takes precedence over the limit for its name.
            self.by_host = dict.fromkeys(addresses, count) | self.by_host

    def _all_resolved(self, names: dict[str, int]) -> None:
        self.is_resolving = False
        if names is not self._limited_names and self._limited_names:
            self._resolve_names()


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
            f"no address for a host in {_PER_IP_OVERRIDES}",
            extra={"host": host, "reason": str(error)},
        )
        return set()
