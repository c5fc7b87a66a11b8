"""Client metrics (KIP-714): which metrics a client must push, and which pushes the node accepts.

The node checks and counts pushes but does not decode them, and it stores no client metrics: a compressed payload
costs no more than its bytes. The number of remembered clients is bounded; a client that was evicted requests its
subscription again.
"""

from __future__ import annotations

import logging
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, NamedTuple
from uuid import UUID, uuid4

from penstock.cluster.client_metrics import (
    ALL_METRICS,
    INTERVAL_MS_DEFAULT,
    ClientMetricsSubscription,
    client_metrics_subscription,
)
from penstock.cluster.image import ResourceType
from penstock.protocol.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from penstock.broker.config.node_settings import NodeSettings
    from penstock.broker.environment import Clock, ImageView
    from penstock.broker.network.requests import RequestContext

logger = logging.getLogger("penstock.telemetry")

#: zstd, lz4, gzip, snappy. Uncompressed pushes are always accepted.
ACCEPTED_COMPRESSION: Final = (4, 3, 1, 2)
_CLIENTS_MAX: Final = 16_384
#: Subscriptions are matched with this many characters of a client id.
_CLIENT_ID_CHARS_MAX: Final = 255
#: Clients may push early by this fraction of the interval, because they spread their pushes at random.
_EARLY_FRACTION: Final = 0.5


class ClientSubscription(NamedTuple):
    """The metrics that a client must push.

    If there are none, the client pushes nothing and requests its subscription again after the interval.
    """

    metrics: tuple[str, ...]
    interval_ms: int
    subscription_id: int


class _ClientInstance:
    __slots__ = ("asked", "is_terminating", "pushed_ms")

    def __init__(self, asked: ClientSubscription) -> None:
        self.asked = asked
        self.pushed_ms: int | None = None
        self.is_terminating = False


class ClientTelemetry:
    def __init__(self, settings: NodeSettings, metadata: ImageView, clock: Clock) -> None:
        self._metadata = metadata
        self._clock = clock
        self._clients: OrderedDict[UUID, _ClientInstance] = OrderedDict()
        self._parsed_configs: object = None
        self._subscriptions: tuple[ClientMetricsSubscription, ...] = ()
        self.payload_bytes_max = settings.integer("telemetry.max.bytes")
        #: Counters for metrics.
        self.pushes = self.bytes_pushed = 0

    @property
    def clients(self) -> int:
        return len(self._clients)

    @property
    def has_subscriptions(self) -> bool:
        return bool(self._current())

    def ask(self, ctx: RequestContext, instance_id: UUID | None) -> tuple[UUID, ClientSubscription]:
        """Return the client's instance id, generated if it has none, and its subscription."""
        instance_id = instance_id or uuid4()
        asked = self._subscription_for(ctx, instance_id)
        known = self._clients.pop(instance_id, None)
        client = self._clients[instance_id] = known or _ClientInstance(asked)
        client.asked = asked
        while len(self._clients) > _CLIENTS_MAX:
            self._clients.popitem(last=False)
        return instance_id, asked

    def record_push(
        self, ctx: RequestContext, instance_id: UUID | None, subscription_id: int, push: MetricsPush
    ) -> None:
        """Check and count a push. Raises ApiError."""
        if instance_id is None:
            raise ApiError(ErrorCode.invalid_request, "a client that pushes has an instance id")
        client = self._clients.get(instance_id)
        if client is None or client.asked != self._subscription_for(ctx, instance_id):
            raise ApiError(ErrorCode.unknown_subscription_id)
        if subscription_id != client.asked.subscription_id:
            raise ApiError(ErrorCode.unknown_subscription_id)
        self._check_push_interval(client, push)
        if push.compression not in (0, *ACCEPTED_COMPRESSION):
            raise ApiError(ErrorCode.unsupported_compression_type)
        if push.size > self.payload_bytes_max:
            raise ApiError(ErrorCode.telemetry_too_large)
        self.pushes += 1
        self.bytes_pushed += push.size

    def _check_push_interval(self, client: _ClientInstance, push: MetricsPush) -> None:
        if client.is_terminating:
            raise ApiError(ErrorCode.invalid_request, "the client has pushed for the last time")
        now_ms, before_ms = self._clock.now_ms(), client.pushed_ms
        is_early = (
            before_ms is not None and 0 <= now_ms - before_ms < client.asked.interval_ms * _EARLY_FRACTION
        )
        if is_early and not push.is_last:
            raise ApiError(ErrorCode.throttling_quota_exceeded)
        client.pushed_ms, client.is_terminating = now_ms, push.is_last

    def _subscription_for(self, ctx: RequestContext, instance_id: UUID) -> ClientSubscription:
        client = _client_attributes(ctx, instance_id)
        mine = [subscription for subscription in self._current() if subscription.is_for(client)]
        metrics = {name for subscription in mine for name in subscription.metrics}
        # An empty metric name stands for all metrics.
        wanted = ("",) if ALL_METRICS in metrics else tuple(sorted(metrics))
        interval_ms = min((each.interval_ms for each in mine if each.metrics), default=INTERVAL_MS_DEFAULT)
        text = "\n".join((*wanted, str(interval_ms), instance_id.hex))
        return ClientSubscription(wanted, interval_ms, zlib.crc32(text.encode()) & 0x7FFFFFFF)

    def _current(self) -> tuple[ClientMetricsSubscription, ...]:
        """Return the subscriptions, parsed again only if the settings have changed."""
        configs = self._metadata.image.configs
        if configs is not self._parsed_configs:
            self._parsed_configs = configs
            stored = {
                resource.name: values
                for resource, values in configs.items()
                if resource.type == ResourceType.CLIENT_METRICS
            }
            read = (self._read(name, values) for name, values in stored.items())
            self._subscriptions = tuple(subscription for subscription in read if subscription is not None)
        return self._subscriptions

    def _read(self, name: str, values: Mapping[str, str]) -> ClientMetricsSubscription | None:
        """None for a subscription that this version cannot parse: ApiVersions must not fail because of it."""
        try:
            return client_metrics_subscription(values)
        except ApiError as error:
            logger.warning("client metrics subscription %s is ignored: %s", name, error)
            return None


class MetricsPush(NamedTuple):
    size: int
    compression: int
    is_last: bool


def _client_attributes(ctx: RequestContext, instance_id: UUID) -> dict[str, str]:
    connection = ctx.connection
    name, version = connection.software if connection is not None else ("", "")
    port = connection.peer.rpartition(":")[2] if connection is not None else ""
    return {
        "client_id": (ctx.client_id or "")[:_CLIENT_ID_CHARS_MAX],
        "client_instance_id": str(instance_id),
        "client_software_name": name,
        "client_software_version": version,
        "client_source_address": ctx.client_host,
        "client_source_port": port,
    }
