"""The settings of a topic's log: which source wins for each of them."""

import pytest

from penstock.broker.config.definitions import NODE_SETTINGS
from penstock.broker.config.effective_settings import effective_node_integer, log_config, node_layers
from penstock.broker.config.node_settings import load_settings
from penstock.cluster.image import ClusterImage, ResourceType
from penstock.cluster.metadata_records import ConfigRecord
from penstock.cluster.topic_settings import TOPIC_SETTINGS, effective_topic_settings
from penstock.log.config import LogConfig


def config(overrides: dict[str, str] | None = None, node: dict[str, str] | None = None) -> LogConfig:
    settings = load_settings(node or {}, {})
    return log_config(
        effective_topic_settings(overrides or {}, node_layers(settings, ClusterImage())),
        decoded_bytes_max=settings.integer("penstock.decompress.max.bytes"),
    )


def test_a_topic_that_sets_nothing_has_the_logs_own_defaults() -> None:
    assert config() == LogConfig()


def test_every_setting_reaches_the_log() -> None:
    found = config(
        {
            "segment.bytes": "1000",
            "segment.ms": "2",
            "segment.index.bytes": "80",
            "index.interval.bytes": "4",
            "retention.ms": "5",
            "retention.bytes": "6",
            "cleanup.policy": "compact",
            "max.message.bytes": "7",
            "min.cleanable.dirty.ratio": "0.1",
            "delete.retention.ms": "8",
            "min.compaction.lag.ms": "9",
            "max.compaction.lag.ms": "10",
            "file.delete.delay.ms": "11",
            "message.timestamp.type": "LogAppendTime",
            "message.timestamp.before.max.ms": "12",
            "message.timestamp.after.max.ms": "13",
            "compression.type": "zstd",
            "penstock.flush": "interval",
            "penstock.flush.interval.ms": "14",
        }
    )
    assert found == LogConfig(
        segment_bytes=1000,
        segment_ms=2,
        segment_index_bytes=80,
        index_interval_bytes=4,
        retention_ms=5,
        retention_bytes=6,
        cleanup_delete=False,
        cleanup_compact=True,
        max_message_bytes=7,
        min_cleanable_dirty_ratio=0.1,
        delete_retention_ms=8,
        min_compaction_lag_ms=9,
        max_compaction_lag_ms=10,
        file_delete_delay_ms=11,
        timestamp_type="LogAppendTime",
        timestamp_before_max_ms=12,
        timestamp_after_max_ms=13,
        compression_type="zstd",
        flush="interval",
        flush_interval_ms=14,
    )


@pytest.mark.parametrize(
    ("overrides", "flush", "interval_ms"),
    [
        ({}, "ack", 1000),
        ({"penstock.flush": "never"}, "never", 1000),
        ({"penstock.flush": "never", "flush.ms": "50"}, "interval", 50),
        ({"penstock.flush": "interval", "flush.ms": "50"}, "interval", 50),
        ({"penstock.flush": "interval", "flush.ms": "5000"}, "interval", 1000),
        ({"penstock.flush": "never", "flush.messages": "1"}, "ack", 1000),
        ({"penstock.flush": "never", "flush.ms": "0"}, "ack", 1000),
        ({"penstock.flush": "ack", "flush.ms": "50"}, "ack", 50),
    ],
)
def test_kafkas_flush_settings_only_ask_for_more(
    overrides: dict[str, str], flush: str, interval_ms: int
) -> None:
    found = config(overrides)
    assert (found.flush, found.flush_interval_ms) == (flush, interval_ms)


def test_a_topics_default_and_its_nodes_default_are_the_same() -> None:
    for name, setting in TOPIC_SETTINGS.items():
        node = next(
            (NODE_SETTINGS[s.name] for s in setting.synonyms if s.name in NODE_SETTINGS and s.factor == 1),
            None,
        )
        if node is not None and node.default is not None:
            assert node.default == setting.default, name
            assert (node.type, node.choices) == (setting.type, setting.choices), name


def test_the_nodes_settings_are_the_topics_defaults() -> None:
    assert config(node={"log.retention.minutes": "2"}).retention_ms == 120_000
    assert config({"retention.ms": "3"}, {"log.retention.minutes": "2"}).retention_ms == 3


def test_a_running_change_beats_what_was_given_at_start() -> None:
    image, settings = ClusterImage(), load_settings({"num.partitions": "2"}, {})
    assert effective_node_integer(node_layers(settings, image), "num.partitions") == 2
    for name, value in (("", "3"), ("1", "4")):
        image.replay(
            ConfigRecord(
                resource_type=ResourceType.BROKER, resource_name=name, name="num.partitions", value=value
            )
        )
        assert effective_node_integer(node_layers(settings, image), "num.partitions") == int(value)
