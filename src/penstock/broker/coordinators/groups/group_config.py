"""The effective configuration of a group on this broker: the group's own settings, the broker's defaults and the
broker's bounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from penstock.broker.config.effective_settings import node_layers
from penstock.cluster.group_settings import clamp_to_bounds, effective_group_values, reset_duration_ms
from penstock.cluster.image import ResourceType
from penstock.cluster.topic_settings import ConfigLayer
from penstock.groups.group_config import GroupConfig, OffsetReset

if TYPE_CHECKING:
    from penstock.broker.config.node_settings import NodeSettings
    from penstock.broker.environment import ImageView

#: Groups whose configuration is cached. The cache is cleared when it is full.
_CACHED_GROUPS_MAX: Final = 10_000


class GroupConfigManager:
    """Caches the configuration of each group until the cluster image changes, since a new image may change it."""

    __slots__ = ("_configs", "_image", "_layers", "_metadata", "_settings")

    def __init__(self, settings: NodeSettings, metadata: ImageView) -> None:
        self._settings = settings
        self._metadata = metadata
        self._image: object = None
        self._layers: tuple[ConfigLayer, ...] = ()
        self._configs: dict[str, GroupConfig] = {}

    def of(self, group_id: str) -> GroupConfig:
        image = self._metadata.image
        if image is not self._image:
            self._image, self._configs = image, {}
            self._layers = node_layers(self._settings, image)
        config = self._configs.get(group_id)
        if config is None:
            if len(self._configs) >= _CACHED_GROUPS_MAX:
                self._configs.clear()
            own = image.config(ResourceType.GROUP, group_id)
            config = self._configs[group_id] = resolve_group_config(own, self._layers)
        return config


def resolve_group_config(own: Mapping[str, str], layers: tuple[ConfigLayer, ...]) -> GroupConfig:
    value: dict[str, Any] = {
        name: clamp_to_bounds(name, effective.value, layers)
        for name, effective in effective_group_values(own, layers).items()
    }
    backoff_ms, jitter_ms = value["penstock.share.backoff.ms"], value["penstock.share.backoff.jitter.ms"]
    rate_max, share_max = value["penstock.share.dlq.rate.max"], value["penstock.share.dlq.share.max"]
    return GroupConfig(
        consumer_session_timeout_ms=value["consumer.session.timeout.ms"],
        consumer_heartbeat_interval_ms=value["consumer.heartbeat.interval.ms"],
        consumer_assignment_interval_ms=value["consumer.assignment.interval.ms"],
        streams_session_timeout_ms=value["streams.session.timeout.ms"],
        streams_heartbeat_interval_ms=value["streams.heartbeat.interval.ms"],
        streams_assignment_interval_ms=value["streams.assignment.interval.ms"],
        streams_initial_rebalance_delay_ms=value["streams.initial.rebalance.delay.ms"],
        streams_num_standby_replicas=value["streams.num.standby.replicas"],
        share_session_timeout_ms=value["share.session.timeout.ms"],
        share_heartbeat_interval_ms=value["share.heartbeat.interval.ms"],
        share_record_lock_duration_ms=value["share.record.lock.duration.ms"],
        share_delivery_count_limit=value["share.delivery.count.limit"],
        share_partition_max_record_locks=value["share.partition.max.record.locks"],
        share_auto_offset_reset=_offset_reset(value["share.auto.offset.reset"]),
        share_isolation_level=value["share.isolation.level"],
        share_renew_acknowledge_enable=value["share.renew.acknowledge.enable"],
        share_delivery=value["penstock.share.delivery"],
        share_acquire_mode=value["penstock.share.acquire.mode"],
        share_backoff=value["penstock.share.backoff"],
        share_backoff_ms=backoff_ms,
        share_backoff_max_ms=value["penstock.share.backoff.max.ms"],
        share_backoff_jitter_ms=backoff_ms if jitter_ms < 0 else jitter_ms,
        dead_letter_topic=value["errors.deadletterqueue.topic.name"],
        dead_letter_copies_record=value["errors.deadletterqueue.copy.record.enable"],
        dead_letter_rate_max=None if rate_max < 0 else rate_max,
        dead_letter_share_max=None if share_max >= 1 else share_max,
    )


def _offset_reset(value: str) -> OffsetReset:
    back_ms = reset_duration_ms(value)
    if back_ms is not None:
        return OffsetReset("by_duration", back_ms)
    return OffsetReset("earliest" if value == "earliest" else "latest")
