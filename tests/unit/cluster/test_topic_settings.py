"""Topic settings: validation, effective values and their sources."""

import pytest

from penstock.cluster.topic_settings import (
    TOPIC_SETTINGS,
    ConfigLayer,
    ConfigSource,
    ConfigSynonym,
    effective_topic_setting,
    effective_topic_settings,
    validate_topic_settings,
)
from penstock.protocol.errors import ApiError, ErrorCode

DEFAULTS = ConfigLayer(
    ConfigSource.DEFAULT,
    {"log.retention.hours": "168", "log.segment.bytes": "1073741824", "log.cleanup.policy": "delete"},
)


def test_a_topic_has_kafkas_defaults() -> None:
    values = {name: effective.text for name, effective in effective_topic_settings({}).items()}
    assert values["retention.ms"] == "604800000"
    assert values["cleanup.policy"] == "delete"
    assert values["max.message.bytes"] == "1048588"
    assert values["message.timestamp.type"] == "CreateTime"
    assert values["min.cleanable.dirty.ratio"] == "0.5"
    assert values["unclean.leader.election.enable"] == "false"
    assert values["leader.replication.throttled.replicas"] == ""
    assert values["max.compaction.lag.ms"] == "9223372036854775807"
    assert values["penstock.flush"] == "ack"


def test_every_default_is_a_value_that_could_be_set() -> None:
    for setting in TOPIC_SETTINGS.values():
        text = setting.text(setting.default)
        assert text is not None
        assert setting.parse(text) == setting.default, setting.name


def test_the_synonyms_of_a_setting_come_in_kafkas_order() -> None:
    names = [(synonym.name, synonym.factor) for synonym in TOPIC_SETTINGS["retention.ms"].synonyms]
    assert names == [
        ("log.retention.ms", 1),
        ("log.retention.minutes", 60_000),
        ("log.retention.hours", 3_600_000),
    ]


def test_the_topics_own_value_counts_first() -> None:
    found = effective_topic_setting("segment.bytes", {"segment.bytes": "1000"}, [DEFAULTS])
    assert (found.value, found.source) == (1000, ConfigSource.TOPIC)
    assert found.synonyms == (
        ConfigSynonym("segment.bytes", "1000", ConfigSource.TOPIC),
        ConfigSynonym("log.segment.bytes", "1073741824", ConfigSource.DEFAULT),
    )


def test_the_nodes_value_counts_next_and_a_running_change_beats_the_start() -> None:
    static = ConfigLayer(ConfigSource.STATIC_BROKER, {"log.segment.bytes": "2000"})
    dynamic = ConfigLayer(ConfigSource.DYNAMIC_BROKER, {"log.segment.bytes": "3000"})
    found = effective_topic_setting("segment.bytes", {}, [static, DEFAULTS])
    assert (found.value, found.source) == (2000, ConfigSource.STATIC_BROKER)
    found = effective_topic_setting("segment.bytes", {}, [dynamic, static, DEFAULTS])
    assert (found.value, found.source) == (3000, ConfigSource.DYNAMIC_BROKER)
    assert [synonym.text for synonym in found.synonyms] == ["3000", "2000", "1073741824"]


@pytest.mark.parametrize(
    ("given", "retention_ms"),
    [
        ({"log.retention.hours": "1"}, 3_600_000),
        ({"log.retention.hours": "1", "log.retention.minutes": "3"}, 180_000),
        ({"log.retention.hours": "1", "log.retention.minutes": "3", "log.retention.ms": "7"}, 7),
        ({"log.retention.hours": "-1"}, -1),
        ({"log.retention.ms": "-1", "log.retention.hours": "1"}, -1),
    ],
)
def test_retention_comes_in_three_units(given: dict[str, str], retention_ms: int) -> None:
    static = ConfigLayer(ConfigSource.STATIC_BROKER, given)
    found = effective_topic_setting("retention.ms", {}, [static, DEFAULTS])
    assert (found.value, found.source) == (retention_ms, ConfigSource.STATIC_BROKER)


@pytest.mark.parametrize(
    "overrides",
    [
        {"cleanup.policy": "compact,delete", "retention.ms": "-1"},
        {"cleanup.policy": "compact"},
        {"compression.type": "zstd", "compression.zstd.level": "-131072"},
        {"compression.gzip.level": "-1"},
        {"leader.replication.throttled.replicas": "*"},
        {"leader.replication.throttled.replicas": "0:1,1:2"},
        {"min.cleanable.dirty.ratio": "1.0"},
        {"unclean.leader.election.enable": "TRUE"},
        {"retention.ms": " 5 "},
        {"penstock.flush": "never"},
    ],
)
def test_a_good_value_is_taken(overrides: dict[str, str]) -> None:
    validate_topic_settings(overrides)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"retention": "1"}, "Unknown topic config name: retention"),
        (
            {"retention.ms": "soon"},
            "Invalid value soon for configuration retention.ms: must be a whole number",
        ),
        ({"retention.ms": "1_000"}, "must be a whole number"),
        ({"retention.ms": "\u0661"}, "must be a whole number"),
        ({"retention.ms": "9" * 5000}, "must be a whole number"),
        ({"retention.ms": "-2"}, "must be at least -1"),
        ({"min.cleanable.dirty.ratio": "0_0"}, "must be a number"),
        ({"segment.bytes": "13"}, "must be at least 14"),
        ({"segment.bytes": "2147483648"}, "must fit in 32 bits"),
        ({"cleanup.policy": "compact,purge"}, "must be one of compact, delete"),
        ({"compression.type": "brotli"}, "must be one of uncompressed"),
        ({"compression.gzip.level": "0"}, "must be -1 or from 1 to 9"),
        ({"compression.lz4.level": "18"}, "must be at most 17"),
        ({"message.timestamp.type": "createtime"}, "must be one of CreateTime"),
        ({"min.insync.replicas": "0"}, "must be at least 1"),
        ({"min.cleanable.dirty.ratio": "1.5"}, "must be at most 1"),
        ({"min.cleanable.dirty.ratio": "nan"}, "must be at least 0"),
        ({"preallocate": "yes"}, "must be true or false"),
        ({"follower.replication.throttled.replicas": "1-2"}, "must be '\\*', 'none' or a list"),
        ({"penstock.flush": "often"}, "must be one of ack, interval, never"),
        ({"remote.storage.enable": "true"}, "Tiered Storage functionality is disabled"),
        (
            {"min.compaction.lag.ms": "10", "max.compaction.lag.ms": "9"},
            "min.compaction.lag.ms \\(10\\) > max.compaction.lag.ms \\(9\\)",
        ),
    ],
)
def test_a_wrong_value_is_refused_with_the_reason(overrides: dict[str, str], reason: str) -> None:
    with pytest.raises(ApiError, match=reason) as refused:
        validate_topic_settings(overrides)
    assert refused.value.code is ErrorCode.invalid_config


def test_contradictions_are_found_against_the_node_too() -> None:
    node = ConfigLayer(ConfigSource.STATIC_BROKER, {"log.cleaner.max.compaction.lag.ms": "5"})
    with pytest.raises(ApiError, match="conflict"):
        validate_topic_settings({"min.compaction.lag.ms": "6"}, [node])


def test_defaults_of_brokers_that_contradict_each_other_keep_no_topic_from_being_created() -> None:
    lags = {"log.cleaner.min.compaction.lag.ms": "10", "log.cleaner.max.compaction.lag.ms": "9"}
    validate_topic_settings({"retention.ms": "1"}, [ConfigLayer(ConfigSource.DYNAMIC_DEFAULT_BROKER, lags)])


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"penstock.overflow": "drop"}, "must be one of block, reject, drop-oldest, drop-newest"),
        ({"penstock.overflow.bytes": "0"}, "must be -1 or at least 65536"),
        ({"penstock.overflow.records": "0"}, "must be -1 or at least 1"),
        ({"penstock.shed.priority": "10"}, "must be at most 9"),
        ({"penstock.shed.sample": "1.5"}, "must be at most 1"),
        (
            {"penstock.overflow": "drop-oldest", "cleanup.policy": "compact,delete"},
            "needs cleanup.policy=delete, and the topic has cleanup.policy=compact,delete",
        ),
        (
            {"penstock.overflow": "drop-oldest", "penstock.schedule.enable": "true"},
            "penstock.schedule.enable must be false",
        ),
        ({"penstock.overflow.records": "5", "cleanup.policy": "compact"}, "counts offsets"),
    ],
)
def test_overflow_settings_that_cannot_work_are_refused(settings: dict[str, str], complaint: str) -> None:
    with pytest.raises(ApiError, match=complaint) as refused:
        validate_topic_settings(settings)
    assert refused.value.code is ErrorCode.invalid_config
