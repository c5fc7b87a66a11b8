"""Connections that have not authenticated: their number and time are bounded, refusals are counted and logged."""

from __future__ import annotations

import logging
import ssl
from ipaddress import IPv6Address
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from penstock.broker.network.tls import PlaintextReceived

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from penstock.broker.metrics.counters import Metrics
    from penstock.broker.network.connection import Connection

logger = logging.getLogger("penstock.server")

#: One line per reason and listener in this time, which says how many it stands for.
_LOG_SECONDS: Final = 1.0
_REASONS_MAX: Final = 1000
#: Connections that are looked at to find one that can be closed.
_LOOKED_AT_MAX: Final = 20
_TOO_MANY: Final = "more than penstock.unauthenticated.connections.max"


class Refusals:
    """Counts and logs why connections were refused; an attacker must not be able to fill the disk with log lines."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._clock = clock
        #: When the last line was written, and how many refusals were not.
        self._last: dict[tuple[str, str], tuple[float, int]] = {}

    def refuse(self, connection: Connection, kind: str, reason: str) -> None:
        self._metrics.count_authentication_failure(connection.listener, kind)
        now = self._clock()
        key = (connection.listener, kind)
        written, omitted = self._last.get(key, (-_LOG_SECONDS, 0))
        if now - written < _LOG_SECONDS:
            self._last[key] = (written, omitted + 1)
            return
        assert len(self._last) < _REASONS_MAX, "kinds and listeners are few"
        self._last[key] = (now, 0)
        extra: dict[str, object] = {
            "peer": connection.peer,
            "listener": connection.listener,
            "reason": reason,
        }
        if omitted:
            extra["others_before"] = omitted
        logger.warning("connection not authenticated", extra=extra)


def handshake_failure(failure: Exception) -> tuple[str, str]:
    """Return what kind of failure it is, for metrics, and the reason in words."""
    if isinstance(failure, PlaintextReceived):
        return "plaintext", "the client does not speak TLS; it needs security.protocol=SSL or SASL_SSL"
    if isinstance(failure, ssl.SSLCertVerificationError):
        return "certificate", f"the client's certificate is refused: {failure.verify_message}"
    if isinstance(failure, ssl.SSLError):
        name = (failure.reason or str(failure)).lower().replace("_", " ")
        if "peer did not return a certificate" in name:
            return "certificate", "the client has no certificate, and ssl.client.auth=required"
        if "alert" in name:
            return "tls", f"the client ended the TLS handshake: {name}"
        return "tls", f"the TLS handshake failed: {name}"
    return "tls", "the connection was closed during the TLS handshake"


class Unauthenticated:
    """The connections of one listener that have not authenticated, at most `connections_max`.

    Above that, one is closed, so that attackers keep no client out: first those whose login has failed; then one of the
    address that holds the most places. Of an address, the connection that has been silent for longest is closed.
    """

    def __init__(self, connections_max: int, seconds_max: float, refusals: Refusals) -> None:
        self._connections_max = connections_max
        self._seconds_max = seconds_max
        self._refusals = refusals
        #: When each arrived. The oldest is first, except that those that were found waiting for this node are behind.
        self._since: dict[Connection, float] = {}
        #: The same connections by network, in the same order.
        self._by_network: dict[Hashable, dict[Connection, None]] = {}
        #: Those whose login has failed and that wait for the refusal. The first to fail is first.
        self._failed: dict[Connection, None] = {}

    def __len__(self) -> int:
        return len(self._since)

    def add(self, connection: Connection, now: float) -> None:
        self._since[connection] = now
        self._by_network.setdefault(_network(connection.client_host), {})[connection] = None
        if len(self._since) > self._connections_max and not self.close_failed(_TOO_MANY):
            self._end(self._find_superfluous(connection), "too_many", _TOO_MANY)

    def failed(self, connection: Connection) -> None:
        """The login has failed. The connection stays open until its refusal has been sent."""
        if connection in self._since:
            self._failed[connection] = None

    def discard(self, connection: Connection) -> None:
        if self._since.pop(connection, None) is None:
            return
        self._failed.pop(connection, None)
        network = _network(connection.client_host)
        of_network = self._by_network[network]
        del of_network[connection]
        if not of_network:
            del self._by_network[network]

    def close_failed(self, limit: str) -> bool:
        """Close the connection whose login failed first; return False if there is none."""
        failed = next(iter(self._failed), None)
        if failed is not None:
            self._end(failed, "too_many", f"its login has failed, and others need its place: {limit}")
        return failed is not None

    def _find_superfluous(self, newest: Connection) -> Connection:
        own = self._by_network[_network(newest.client_host)]
        largest = max(self._by_network.values(), key=len)
        if len(largest) == 1:
            return self._find_silent(self._since) or newest
        if len(largest) == len(own):
            return self._find_silent(own) or newest
        return self._find_silent(largest) or next(iter(largest))

    def _find_silent(self, connections: dict[Connection, Any]) -> Connection | None:
        """Return the one that has made this node wait for longest; those that wait for this node stay.

        In a flood of handshakes nearly all wait for this node, so only a few are looked at: None if all of these wait.
        """
        for connection in list(islice(connections, _LOOKED_AT_MAX)):
            if not connection.waits_for_node:
                return connection
            connections[connection] = connections.pop(connection)  # the next search begins behind it
        return None

    def close_late(self, now: float) -> None:
        for connection, since in list(self._since.items()):
            if now - since > self._seconds_max and not connection.waits_for_node:
                self._end(connection, "timeout", "not authenticated in penstock.authentication.timeout.ms")

    def _end(self, connection: Connection, kind: str, reason: str) -> None:
        self.discard(connection)
        self._refusals.refuse(connection, kind, reason)
        connection.abort()


def _network(host: str) -> Hashable:
    """Return what one client can choose its addresses from: an IPv4 address, or 64 bits of an IPv6 address."""
    if ":" not in host:
        return host
    try:
        address = IPv6Address(host)
    except ValueError:
        return host
    return str(address.ipv4_mapped) if address.ipv4_mapped is not None else address.packed[:8]
