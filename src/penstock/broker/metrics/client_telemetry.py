"""Client metrics (KIP-714): which metrics a client is asked for, and the pushes that it is allowed.

Pushes are checked and counted, not unpacked: a node keeps no client's metrics, so a compressed payload costs no more
than its bytes. What it remembers of clients is bounded; one that was forgotten asks for its subscription again.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, NamedTuple
from uuid import UUID, uuid4

from penstock.cluster.client_metrics import ALL_METRICS, INTERVAL_MS_DEFAULT, Subscription, subscription_of
from penstock.cluster.state import ResourceType
from penstock.protocol.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from penstock.broker.context import RequestContext
    from penstock.broker.node import Node

#: zstd, lz4, gzip, snappy; none is always understood.
ACCEPTED_COMPRESSION: Final = (4, 3, 1, 2)
_CLIENTS_MAX: Final = 16_384
#: Of a client's name that subscriptions are matched with.
_CHARS_MAX: Final = 255
#: Clients may be early by this part of the interval, because they spread their pushes at random.
_EARLY: Final = 0.5


class Asked(NamedTuple):
    """What a client is to push; no metrics: nothing, until it asks again after the interval."""

    metrics: tuple[str, ...]
    interval_ms: int
    subscription_id: int


class _Client:
    __slots__ = ("asked", "is_terminating", "pushed_ms")

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.pushed_ms: int | None = None
        self.is_terminating = False


class Telemetry:
    def __init__(self, node: Node) -> None:
        self._node = node
        self._clients: OrderedDict[UUID, _Client] = OrderedDict()
        self._read_from: object = None
        self._subscriptions: tuple[Subscription, ...] = ()
        self.payload_bytes_max = node.settings.integer("telemetry.max.bytes")
        #: Counters for metrics.
        self.pushes = self.bytes_pushed = 0

    @property
    def clients(self) -> int:
        return len(self._clients)

    @property
    def has_subscriptions(self) -> bool:
        return bool(self._current())

    def ask(self, ctx: RequestContext, instance_id: UUID | None) -> tuple[UUID, Asked]:
        """The client's id, given to it where it has none, and what it is to push."""
        instance_id = instance_id or uuid4()
        asked = self._asked_of(ctx, instance_id)
        known = self._clients.pop(instance_id, None)
        client = self._clients[instance_id] = known or _Client(asked)
        client.asked = asked
        while len(self._clients) > _CLIENTS_MAX:
            self._clients.popitem(last=False)
        return instance_id, asked

    def pushed(self, ctx: RequestContext, instance_id: UUID | None, subscription_id: int, push: Push) -> None:
        """Raises ApiError."""
        if instance_id is None:
            raise ApiError(ErrorCode.invalid_request, "a client that pushes has an instance id")
        client = self._clients.get(instance_id)
        if client is None or client.asked != self._asked_of(ctx, instance_id):
            raise ApiError(ErrorCode.unknown_subscription_id)
        if subscription_id != client.asked.subscription_id:
            raise ApiError(ErrorCode.unknown_subscription_id)
        self._refuse_early(client, push)
        if push.compression not in (0, *ACCEPTED_COMPRESSION):
            raise ApiError(ErrorCode.unsupported_compression_type)
        if push.size > self.payload_bytes_max:
            raise ApiError(ErrorCode.telemetry_too_large)
        self.pushes += 1
        self.bytes_pushed += push.size

    def _refuse_early(self, client: _Client, push: Push) -> None:
        if client.is_terminating:
            raise ApiError(ErrorCode.invalid_request, "the client has pushed for the last time")
        now_ms, before_ms = self._node.now_ms(), client.pushed_ms
        is_early = before_ms is not None and 0 <= now_ms - before_ms < client.asked.interval_ms * _EARLY
        if is_early and not push.is_last:
            raise ApiError(ErrorCode.throttling_quota_exceeded)
        client.pushed_ms, client.is_terminating = now_ms, push.is_last

    def _asked_of(self, ctx: RequestContext, instance_id: UUID) -> Asked:
        client = _described(ctx, instance_id)
        mine = [subscription for subscription in self._current() if subscription.is_for(client)]
        metrics = {name for subscription in mine for name in subscription.metrics}
        # One that is empty stands for all metrics.
        wanted = ("",) if ALL_METRICS in metrics else tuple(sorted(metrics))
        interval_ms = min((each.interval_ms for each in mine if each.metrics), default=INTERVAL_MS_DEFAULT)
        text = "\n".join((*wanted, str(interval_ms), instance_id.hex))
        return Asked(wanted, interval_ms, zlib.crc32(text.encode()) & 0x7FFFFFFF)

    def _current(self) -> tuple[Subscription, ...]:
        """Parsed when the settings have changed."""
        configs = self._node.image.configs
        if configs is not self._read_from:
            self._read_from = configs
            self._subscriptions = tuple(
                subscription_of(values)
                for resource, values in configs.items()
                if resource.type == ResourceType.CLIENT_METRICS
            )
        return self._subscriptions


class Push(NamedTuple):
    size: int
    compression: int
    is_last: bool


def _described(ctx: RequestContext, instance_id: UUID) -> dict[str, str]:
    connection = ctx.connection
    name, version = connection.software if connection is not None else ("", "")
    port = connection.peer.rpartition(":")[2] if connection is not None else ""
    return {
        "client_id": (ctx.client_id or "")[:_CHARS_MAX],
        "client_instance_id": str(instance_id),
        "client_software_name": name,
        "client_software_version": version,
        "client_source_address": ctx.client_host,
        "client_source_port": port,
    }
