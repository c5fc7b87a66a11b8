"""The settings in effect now: given at start, overridden at run time, inherited by topics.

IncrementalAlterConfigs changes settings that are not read-only, for one broker or for all of them. The changes are
metadata, so every node finds them in its image; `DynamicSettings.watch` calls the components that must act on a
change. `node_layers` gives the defaults of topic settings, strongest first, and `log_config` turns a topic's settings
into the configuration of its logs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from penstock.broker.config.definitions import NODE_SETTINGS
from penstock.broker.config.node_settings import NodeSettings
from penstock.cluster.image import ClusterImage, ResourceType
from penstock.cluster.topic_settings import ConfigLayer, ConfigSource, EffectiveSetting
from penstock.log.config import FlushPolicy, LogConfig
from penstock.protocol.config_def import SettingValue
from penstock.security.overflow import SEGMENTS_PER_BOUND, OverflowPolicy

logger = logging.getLogger(__name__)


def accepted_settings(stored: Mapping[str, str]) -> dict[str, str]:
    """Return the stored broker settings that this version accepts.

    A newer version may have stored settings or values that this version does not know.
    """
    return {
        name: text
        for name, text in stored.items()
        if (setting := NODE_SETTINGS.get(name)) is not None and setting.accepts(text)
    }


class DynamicSettings:
    def __init__(self, settings: NodeSettings) -> None:
        self._settings = settings
        self._altered: dict[str, SettingValue] = {}
        self._ignored: set[str] = set()
        self._watchers: list[tuple[frozenset[str], Callable[[], None]]] = []

    def __repr__(self) -> str:
        return f"<DynamicSettings {self._altered}>"

    def __getitem__(self, name: str) -> SettingValue:
        return self._altered[name] if name in self._altered else self._settings[name]

    def integer(self, name: str) -> int:
        value = self[name]
        assert isinstance(value, int), (name, value)
        return value

    def boolean(self, name: str) -> bool:
        value = self[name]
        assert isinstance(value, bool), (name, value)
        return value

    def overridden(self) -> list[str]:
        """Return the settings given at start that have no effect because another value was set at run time."""
        return sorted(
            name
            for name, value in self._altered.items()
            if name in self._settings.origins and self._settings[name] != value
        )

    def watch(self, names: Iterable[str], changed: Callable[[], None]) -> None:
        """Call `changed` whenever the value of one of these settings changes."""
        watched = frozenset(names)
        assert not any(NODE_SETTINGS[name].read_only for name in watched), watched
        self._watchers.append((watched, changed))

    def image_changed(self, image: ClusterImage) -> None:
        """Apply the broker settings of an image. A setting of this broker takes precedence over one for all brokers."""
        everywhere = image.config(ResourceType.BROKER, "")
        here = image.config(ResourceType.BROKER, str(self._settings.node_id))
        for stored in (everywhere, here):
            self._warn_ignored({*stored} - {*accepted_settings(stored)})
        usable = {**accepted_settings(everywhere), **accepted_settings(here)}
        altered = {name: NODE_SETTINGS[name].parse(text) for name, text in usable.items()}
        before = {name: self[name] for name in {*altered, *self._altered}}
        self._altered = altered
        different = {name for name, value in before.items() if self[name] != value}
        for names, changed in self._watchers:
            if names & different:
                changed()

    def _warn_ignored(self, names: set[str]) -> None:
        for name in sorted(names - self._ignored):
            logger.warning(
                "ignoring a stored broker setting that this version does not accept", extra={"setting": name}
            )
        self._ignored |= names


_LONG_MAX: Final = (1 << 63) - 1
_DROPPED_FILE_DELAY_MS_MAX: Final = 1_000
#: Batches may be refused for good, or acknowledged without being stored.
_GAP_POLICIES: Final = (OverflowPolicy.REJECT, OverflowPolicy.DROP_NEWEST)

_DEFAULT_LAYER: Final = ConfigLayer(
    ConfigSource.DEFAULT,
    {
        name: text
        for name, setting in NODE_SETTINGS.items()
        if (text := setting.text(setting.default)) is not None
    },
)


def node_layers(settings: NodeSettings, image: ClusterImage) -> tuple[ConfigLayer, ...]:
    """The node's settings as text, strongest first: changed while running, given at start, built in."""
    given = {name: NODE_SETTINGS[name].text(settings.values[name]) for name in settings.origins}
    here, everywhere = (image.config(ResourceType.BROKER, name) for name in (str(settings.node_id), ""))
    return (
        ConfigLayer(ConfigSource.DYNAMIC_BROKER, accepted_settings(here)),
        ConfigLayer(ConfigSource.DYNAMIC_DEFAULT_BROKER, accepted_settings(everywhere)),
        ConfigLayer(
            ConfigSource.STATIC_BROKER, {name: text for name, text in given.items() if text is not None}
        ),
        _DEFAULT_LAYER,
    )


def log_config(settings: Mapping[str, EffectiveSetting], *, decoded_bytes_max: int) -> LogConfig:
    """Return a topic's log configuration. `settings` is all that `effective_topic_settings` returns for the topic."""
    value: dict[str, Any] = {name: effective.value for name, effective in settings.items()}
    flush, flush_interval_ms = _flush_policy(value)
    overflow, overflow_bytes = value["penstock.overflow"], value["penstock.overflow.bytes"]
    file_delete_delay_ms = value["file.delete.delay.ms"]
    if overflow == OverflowPolicy.DROP_OLDEST:
        # What was deleted to make room must not hold that room for long.
        file_delete_delay_ms = min(file_delete_delay_ms, _DROPPED_FILE_DELAY_MS_MAX)
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
        file_delete_delay_ms=file_delete_delay_ms,
        timestamp_type=value["message.timestamp.type"],
        timestamp_before_max_ms=value["message.timestamp.before.max.ms"],
        timestamp_after_max_ms=value["message.timestamp.after.max.ms"],
        compression_type=value["compression.type"],
        flush=flush,
        flush_interval_ms=flush_interval_ms,
        decoded_bytes_max=decoded_bytes_max,
        schedule=value["penstock.schedule.enable"],
        roll_bytes=overflow_bytes // SEGMENTS_PER_BOUND if overflow_bytes >= 0 else _LONG_MAX,
        accepts_gaps=overflow in _GAP_POLICIES or value["penstock.shed.priority"] >= 0,
    )


def _flush_policy(value: Mapping[str, Any]) -> tuple[FlushPolicy, int]:
    """Kafka's flush settings can only make syncs more frequent than penstock.flush, never less frequent."""
    policy: FlushPolicy = value["penstock.flush"]
    interval_ms: int = value["penstock.flush.interval.ms"]
    flush_ms: int = value["flush.ms"]
    if value["flush.messages"] < _LONG_MAX or flush_ms == 0:
        # A bound on unsynced records holds because records are synced as soon as they arrive.
        return "ack", interval_ms
    if policy == "never" and flush_ms < _LONG_MAX:
        return "interval", flush_ms
    return policy, min(interval_ms, flush_ms)


def effective_node_integer(layers: tuple[ConfigLayer, ...], name: str) -> int:
    """Return the current value of a node setting, which an operator may have changed since the start."""
    text = next(layer.values[name] for layer in layers if name in layer.values)
    value = NODE_SETTINGS[name].parse(text)
    assert isinstance(value, int), (name, value)
    return value
