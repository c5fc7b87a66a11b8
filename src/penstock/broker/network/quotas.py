"""Client quotas of this broker: what clients have used lately, and how long they are throttled for it.

The broker answers a client first and then does not read from its connection for the throttle time, which the response
names (KIP-219). Nodes are never throttled.

A connection pays for what it has used by waiting. One that has used nothing yet, while others that share its quota owe
something, waits for its first turn; otherwise a client would get around its quota by connecting again for each request.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

from penstock.broker.network.connection import Postponed
from penstock.protocol.steps import Steps
from penstock.security.quotas import (
    CONSUMER_BYTE_RATE,
    CONTROLLER_MUTATION_RATE,
    PRODUCER_BYTE_RATE,
    REQUEST_PERCENTAGE,
    ClientQuotas,
    Entity,
    Meter,
    QuotaUsage,
    Reservation,
    TokenBucket,
)
from penstock.security.tenant_limits import REQUEST_RATE

if TYPE_CHECKING:
    from penstock.broker.config.node_settings import NodeSettings
    from penstock.broker.network.connection import Connection
    from penstock.broker.network.requests import RequestContext

#: Clients that are remembered. Beyond it, those that have been idle are forgotten, then all.
_CLIENTS_MAX: Final = 20_000
#: For the time that one request has used, a client waits no longer than one window, as in Apache Kafka.
_REQUEST_WAIT_MS_MAX: Final = {REQUEST_PERCENTAGE: 1000}
PERCENT: Final = 100
_INT_MAX: Final = 2**31 - 1

#: The error message of an item that controller_mutation_rate refuses, the same as in Apache Kafka.
QUOTA_EXCEEDED: Final = "The throttling quota has been exceeded."

T = TypeVar("T")
_Sharers = tuple[str | None, str | None]


class Admitted(NamedTuple, Generic[T]):
    items: list[T]
    refused: list[T]
    throttle_time: timedelta


class ClientQuotaManager:
    """Handlers ask `limits_produce` and its like first, so that a cluster without quotas pays nothing for them."""

    def __init__(self, settings: NodeSettings, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms
        self._windows = settings.integer("quota.window.num")
        self._window_ms = 1000 * settings.integer("quota.window.size.seconds")
        self._mutation_windows = settings.integer("controller.quota.window.num")
        self._mutation_window_ms = 1000 * settings.integer("controller.quota.window.size.seconds")
        self._source: Mapping[Entity, Mapping[str, float]] | None = None
        self._quotas = ClientQuotas({})
        self.limits_produce = self.limits_fetch = self.limits_requests = False
        self._has_tenants = False
        #: By kind, user and client id. Connections keep them too, so what is dropped is retired.
        self._meters: dict[tuple[str, str, str | None], Meter] = {}
        self._usages: dict[tuple[str, _Sharers], QuotaUsage] = {}
        self._unlimited = QuotaUsage(self._windows, self._window_ms)  # of clients without a limit
        self._buckets: dict[_Sharers, TokenBucket] = {}
        #: Milliseconds that clients were told to wait, by kind of quota.
        self.throttled_ms: dict[str, int] = {}

    def configure(self, quotas: Mapping[Entity, Mapping[str, float]]) -> None:
        """Apply the quotas of a new image. What clients have used so far stays known."""
        if quotas == self._source:
            return
        self._source = {entity: dict(limits) for entity, limits in quotas.items()}
        self._quotas = ClientQuotas(self._source)
        self._drop_meters()
        self._update_kinds()

    def measure_tenants(self, has_tenants: bool) -> None:
        """Whether there are tenants: what their connections use is recorded even where it is not limited."""
        self._has_tenants = has_tenants
        self._update_kinds()

    def _update_kinds(self) -> None:
        kinds = self._quotas.kinds
        self.limits_produce = self._has_tenants or PRODUCER_BYTE_RATE in kinds
        self.limits_fetch = self._has_tenants or CONSUMER_BYTE_RATE in kinds
        self.limits_requests = self._has_tenants or REQUEST_PERCENTAGE in kinds

    def fetch_bytes_max(self, connection: Connection, client_id: str | None) -> int:
        """Return how many bytes one response may have: what is left of the burst, but at least what one turn has."""
        meter = self._meter(CONSUMER_BYTE_RATE, connection, client_id)
        left = math.inf
        if meter is not None and meter.limit is not None:
            left = meter.usage.left(meter.limit.per_second)
        if connection.tenant is not None:
            left = min(left, connection.tenant.rates.left(CONSUMER_BYTE_RATE))
        return _INT_MAX if left >= _INT_MAX else max(int(left), 1)

    def await_request_turn(self, connection: Connection, client_id: str | None) -> None:
        """For the first request of a connection. Raises Postponed if it has to wait, see `await_turn`."""
        if self._turn_ms(REQUEST_PERCENTAGE, connection, client_id, 0, self._now_ms()):
            raise Postponed

    def await_turn(
        self, kind: str, connection: Connection, client_id: str | None, amount: float, now_ms: int
    ) -> None:
        """For a request that uses the amount. Raises Postponed if it is the connection's first one and has to wait."""
        if kind not in connection.turns and self._turn_ms(kind, connection, client_id, amount, now_ms):
            raise Postponed

    def fetch_turn_ms(self, connection: Connection, client_id: str | None) -> int:
        """Return for how long a connection waits before its first fetch; 0 if it need not."""
        if CONSUMER_BYTE_RATE in connection.turns:
            return 0
        amount = self.fetch_bytes_max(connection, client_id)
        return self._turn_ms(CONSUMER_BYTE_RATE, connection, client_id, amount, self._now_ms())

    def _turn_ms(
        self, kind: str, connection: Connection, client_id: str | None, amount: float, now_ms: int
    ) -> int:
        """If something is owed, reserve the amount, so that connections that come later wait for it too."""
        shares = self._shares(kind, connection, client_id, amount)
        wait_ms = max((usage.owed_ms(limit, now_ms) for usage, limit, _ in shares), default=0)
        if not wait_ms:
            connection.turns[kind] = ()
            return 0
        for usage, limit, used in shares:
            usage.reserve(used, limit, now_ms)
        connection.turns[kind] = [Reservation(usage, used) for usage, _, used in shares]
        self._count(kind, wait_ms)
        connection.throttle(wait_ms)
        return wait_ms

    def _shares(
        self, kind: str, connection: Connection, client_id: str | None, amount: float
    ) -> list[tuple[QuotaUsage, float, float]]:
        """Return what the amount counts towards, with the limit of each: of the client, and of its tenant."""
        if connection.is_node:
            return []
        shares = []
        meter = self._meter(kind, connection, client_id)
        if meter is not None and meter.limit is not None:
            shares.append((meter.usage, meter.limit.per_second, amount))
        if connection.tenant is not None:
            if kind == REQUEST_PERCENTAGE:
                kind, amount = REQUEST_RATE, 1
            rates = connection.tenant.rates
            if (grant := rates.grant(kind)) is not None:
                shares.append((rates.usages[kind], grant, amount))
        return shares

    @staticmethod
    def _take_turn(kind: str, connection: Connection) -> None:
        """What was reserved for the turn is recorded now."""
        reserved = connection.turns.get(kind)
        if reserved != ():
            for each in reserved or ():
                each.end()
            connection.turns[kind] = ()

    def throttle(
        self,
        kind: str,
        connection: Connection,
        client_id: str | None,
        amount: float,
        now_ms: int | None = None,
    ) -> int:
        """Record what a client has used; return for how long its connection is not read: 0 within its quota.

        Of the wait for the client's own quota and that for the limit of its tenant, the longer one counts.
        For most requests it need not be called: if the amount may be pending in a meter of the connection.
        """
        if now_ms is None:
            now_ms = self._now_ms()
        self._take_turn(kind, connection)
        wait_ms = self._client_wait_ms(kind, connection, client_id, amount, now_ms)
        if connection.tenant is not None:
            wait_ms = max(wait_ms, connection.tenant.rates.record(kind, amount, now_ms))
        if wait_ms:
            connection.throttle(wait_ms)
        return wait_ms

    def _client_wait_ms(
        self,
        kind: str,
        connection: Connection,
        client_id: str | None,
        amount: float,
        now_ms: int,
    ) -> int:
        meter = self._meter(kind, connection, client_id)
        if meter is None:
            return 0
        # A tenant has rates too, and a rule may make the client of a listener for nodes one of them at any time.
        if connection.tenant is None and (connection.nodes is None or not connection.nodes.follows_rules):
            connection.meters[kind] = meter
        wait_ms = meter.record(amount, now_ms)
        if wait_ms:
            self._count(kind, wait_ms)
        return wait_ms

    def throttle_request(self, connection: Connection, client_id: str | None, seconds: float) -> int:
        """Record a request, and the time of the event loop that it took.

        On a listener that clients share with nodes, the time would throttle nodes too, so it is not limited there.
        For most requests it need not be called: if the time, in percent, may be pending in a meter of the connection.
        """
        wait_ms, now_ms = 0, self._now_ms()
        self._take_turn(REQUEST_PERCENTAGE, connection)
        if not connection.is_node:
            percent = seconds * PERCENT
            wait_ms = self._client_wait_ms(REQUEST_PERCENTAGE, connection, client_id, percent, now_ms)
        if connection.tenant is not None:
            wait_ms = max(wait_ms, connection.tenant.rates.record(REQUEST_RATE, 1, now_ms))
        if wait_ms:
            connection.throttle(wait_ms)
        return wait_ms

    def admit(
        self, ctx: RequestContext, items: Sequence[T], mutations: Callable[[T], int], *, strict_from: int
    ) -> Steps[Admitted[T]]:
        """Split what a client creates or deletes by controller_mutation_rate; `mutations` counts an item's partitions.

        From version `strict_from` on, items are refused while the client owes mutations. Older clients do not know
        that error, and are served and throttled.
        """
        limit = self._quotas.limit(CONTROLLER_MUTATION_RATE, ctx.principal.name, ctx.client_id or "")
        if limit is None:
            return Admitted(list(items), [], timedelta(0))
        now_ms, rate = self._now_ms(), limit.per_second
        bucket = self._buckets.get(limit.sharers)
        if bucket is None:
            self._make_room(now_ms)
            bucket = TokenBucket(self._mutation_windows, self._mutation_window_ms)
            self._buckets[limit.sharers] = bucket
        is_strict = ctx.version >= strict_from
        admitted, refused = [], []
        for item in items:
            if is_strict and bucket.throttle_ms(rate, now_ms):
                refused.append(item)
            else:
                bucket.record(mutations(item), rate, now_ms)
                admitted.append(item)
            yield
        # A strict client that was served is not throttled: its next request is refused if it comes too early.
        wait_ms = 0 if is_strict and not refused else bucket.throttle_ms(rate, now_ms)
        if wait_ms:
            self._count(CONTROLLER_MUTATION_RATE, wait_ms)
        return Admitted(admitted, refused, timedelta(milliseconds=wait_ms))

    def connection_rate(self, host: str) -> float | None:
        return self._quotas.connection_rate(host)

    def _meter(self, kind: str, connection: Connection, client_id: str | None) -> Meter | None:
        """Return None for a node, and before the login: all clients would share what the login needs."""
        if connection.nodes is not None and connection.server.is_from_node(connection):
            return None
        if connection.authentication is not None and not connection.session_end:
            return None
        key = (kind, connection.principal.name, client_id)
        try:
            return self._meters[key]
        except KeyError:
            return self._new_meter(key)

    def _new_meter(self, key: tuple[str, str, str | None]) -> Meter:
        kind, user, client_id = key
        limit = self._quotas.limit(kind, user, client_id or "")
        usage = self._unlimited
        if limit is not None:
            shared = (kind, limit.sharers)
            found = self._usages.get(shared)
            if found is None:
                self._make_room(self._now_ms())
                found = self._usages[shared] = QuotaUsage(
                    self._windows, self._window_ms, request_wait_ms_max=_REQUEST_WAIT_MS_MAX.get(kind)
                )
            usage = found
        if len(self._meters) >= _CLIENTS_MAX:
            self._drop_meters()
        meter = self._meters[key] = Meter(client_id, limit, usage)
        return meter

    def _drop_meters(self) -> None:
        for meter in self._meters.values():
            meter.retire()
        self._meters.clear()

    def _count(self, kind: str, wait_ms: int) -> None:
        self.throttled_ms[kind] = self.throttled_ms.get(kind, 0) + wait_ms

    def _make_room(self, now_ms: int) -> None:
        """Clients choose their ids, so what is remembered of them is bounded."""
        if len(self._usages) + len(self._buckets) < _CLIENTS_MAX:
            return
        self._drop_meters()
        self._usages = {key: each for key, each in self._usages.items() if not each.is_idle(now_ms)}
        self._buckets = {key: each for key, each in self._buckets.items() if not each.is_idle(now_ms)}
        if len(self._usages) + len(self._buckets) >= _CLIENTS_MAX:
            self._usages.clear()
            self._buckets.clear()
