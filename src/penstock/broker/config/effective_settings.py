"""What topic settings fall back on in this node, and what they mean to a log."""

from collections.abc import Mapping
from typing import Any, Final

from penstock.broker.dynamic_settings import usable_settings
from penstock.broker.settings import Settings
from penstock.broker.settings_table import NODE_SETTINGS
from penstock.cluster.effective import ConfigSource, Effective, Layer
from penstock.cluster.image import ClusterImage
from penstock.cluster.state import ResourceType
from penstock.log.config import FlushPolicy, LogConfig

_LONG_MAX: Final = (1 << 63) - 1

_DEFAULTS: Final = Layer(
    ConfigSource.DEFAULT,
    {
        name: text
        for name, setting in NODE_SETTINGS.items()
        if (text := setting.text(setting.default)) is not None
    },
)


def node_layers(settings: Settings, image: ClusterImage) -> tuple[Layer, ...]:
    """The node's settings as text, strongest first: changed while running, given at start, built in."""
    given = {name: NODE_SETTINGS[name].text(settings.values[name]) for name in settings.origins}
    here, everywhere = (image.config(ResourceType.BROKER, name) for name in (str(settings.node_id), ""))
    return (
        Layer(ConfigSource.DYNAMIC_BROKER, usable_settings(here)),
        Layer(ConfigSource.DYNAMIC_DEFAULT_BROKER, usable_settings(everywhere)),
        Layer(ConfigSource.STATIC_BROKER, {name: text for name, text in given.items() if text is not None}),
        _DEFAULTS,
    )


def log_config(settings: Mapping[str, Effective], *, decoded_bytes_max: int) -> LogConfig:
    """`settings` is every setting of the topic, as `effective_topic_settings` gives them."""
    value: dict[str, Any] = {name: effective.value for name, effective in settings.items()}
    flush, flush_interval_ms = _flush_policy(value)
    return LogConfig(
        segment_bytes=value["segment.bytes"],
        segment_ms=value["segment.ms"],
        segment_index_bytes=value["segment.index.bytes"],
        index_interval_bytes=value["index.interval.bytes"],
        retention_ms=value["retention.ms"],
        retention_bytes=value["retention.bytes"],
        cleanup_delete="delete" in value["cleanup.policy"],
        cleanup_compact="compact" in value["cleanup.policy"],
        max_message_bytes=value["max.message.bytes"],
        min_cleanable_dirty_ratio=value["min.cleanable.dirty.ratio"],
        delete_retention_ms=value["delete.retention.ms"],
        min_compaction_lag_ms=value["min.compaction.lag.ms"],
        max_compaction_lag_ms=value["max.compaction.lag.ms"],
        file_delete_delay_ms=value["file.delete.delay.ms"],
        timestamp_type=value["message.timestamp.type"],
        timestamp_before_max_ms=value["message.timestamp.before.max.ms"],
        timestamp_after_max_ms=value["message.timestamp.after.max.ms"],
        compression_type=value["compression.type"],
        flush=flush,
        flush_interval_ms=flush_interval_ms,
        decoded_bytes_max=decoded_bytes_max,
        schedule=value["penstock.schedule.enable"],
    )


def _flush_policy(value: Mapping[str, Any]) -> tuple[FlushPolicy, int]:
    """Kafka's own flush settings can only ask for more than penstock.flush, never for less."""
    policy: FlushPolicy = value["penstock.flush"]
    interval_ms: int = value["penstock.flush.interval.ms"]
    flush_ms: int = value["flush.ms"]
    if value["flush.messages"] < _LONG_MAX or flush_ms == 0:
        # A bound in records is kept by syncing as soon as records arrive.
        return "ack", interval_ms
    if policy == "never" and flush_ms < _LONG_MAX:
        return "interval", flush_ms
    return policy, min(interval_ms, flush_ms)


def node_integer(layers: tuple[Layer, ...], name: str) -> int:
    """The value that a setting of the node has now; an operator may have changed it since the start."""
    text = next(layer.values[name] for layer in layers if name in layer.values)
    value = NODE_SETTINGS[name].parse(text)
    assert isinstance(value, int), (name, value)
    return value
