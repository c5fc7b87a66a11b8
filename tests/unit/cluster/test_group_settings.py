"""Settings of groups: valid values and defaults."""

from collections.abc import Mapping

import pytest

from penstock.broker.config.definitions import NODE_SETTINGS
from penstock.broker.coordinators.groups.group_config import resolve_group_config
from penstock.cluster.group_settings import (
    GROUP_BOUNDS,
    GROUP_SETTINGS,
    duration_ms,
    effective_group_values,
    validate_group_settings,
)
from penstock.cluster.topic_settings import ConfigLayer, ConfigSource
from penstock.groups.group_config import GroupConfig, OffsetReset
from penstock.protocol.errors import ApiError, ErrorCode

DEFAULTS = ConfigLayer(
    ConfigSource.DEFAULT,
    {
        name: text
        for name, setting in NODE_SETTINGS.items()
        if (text := setting.text(setting.default)) is not None
    },
)


def node(given: Mapping[str, str]) -> tuple[ConfigLayer, ...]:
    return (ConfigLayer(ConfigSource.STATIC_BROKER, given), DEFAULTS)


def refusal(overrides: Mapping[str, str], given: Mapping[str, str] | None = None) -> str:
    with pytest.raises(ApiError) as caught:
        validate_group_settings(overrides, node(given or {}))
    assert caught.value.code is ErrorCode.invalid_config
    return str(caught.value.message)


def test_every_default_is_legal_and_the_same_on_all_levels() -> None:
    for name, setting in GROUP_SETTINGS.items():
        text = setting.text(setting.default)
        assert text is not None
        assert setting.parse(text) == setting.default, name
        for synonym in setting.synonyms:
            assert NODE_SETTINGS[synonym.name].default == setting.default
    validate_group_settings({name: str(s.text(s.default)) for name, s in GROUP_SETTINGS.items()}, node({}))
    assert resolve_group_config({}, node({})) == GroupConfig()


def test_every_bound_is_a_setting_of_the_node() -> None:
    for bounds in GROUP_BOUNDS.values():
        assert {bounds.lowest or bounds.highest, bounds.highest} <= NODE_SETTINGS.keys()


@pytest.mark.parametrize(
    ("text", "milliseconds"),
    [
        ("PT1H", 3_600_000),
        ("P2DT3M", 172_980_000),
        ("PT0.5S", 500),
        ("PT1.0019S", 1_001),
        ("P1D", 86_400_000),
    ],
)
def test_durations(text: str, milliseconds: int) -> None:
    assert duration_ms(text) == milliseconds
    validate_group_settings({"share.auto.offset.reset": f"by_duration:{text}"}, node({}))
    config = resolve_group_config({"share.auto.offset.reset": f"by_duration:{text}"}, node({}))
    assert config.share_auto_offset_reset == OffsetReset("by_duration", milliseconds)


@pytest.mark.parametrize(
    "text", ["", "P", "PT", "P1", "1H", "-PT1H", "PT-1H", "P1Y", "P1DT", "PT1S ", "PT.5S"]
)
def test_what_is_no_duration_is_refused(text: str) -> None:
    assert duration_ms(text) is None
    assert "by_duration" in refusal({"share.auto.offset.reset": f"by_duration:{text}"})


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"no.such.setting": "1"}, "Unknown group config name: no.such.setting"),
        ({"share.delivery.count.limit": "many"}, "whole number"),
        ({"share.delivery.count.limit": "1"}, "group.share.min.delivery.count.limit (2)"),
        ({"share.delivery.count.limit": "11"}, "group.share.max.delivery.count.limit (10)"),
        ({"consumer.session.timeout.ms": "60001"}, "group.consumer.max.session.timeout.ms (60000)"),
        ({"share.isolation.level": "READ_COMMITTED"}, "must be one of"),
        ({"errors.deadletterqueue.topic.name": "no/name"}, "Topic name is invalid"),
        ({"errors.deadletterqueue.topic.name": "__consumer_offsets"}, "is an internal topic"),
        ({"errors.deadletterqueue.topic.name": "{topic}"}, "must not be the topic"),
        ({"penstock.share.backoff.ms": "60001"}, "must not be above"),
        ({"penstock.share.dlq.share.max": "1.5"}, "at most 1"),
        ({"penstock.share.delivery": "exactly-once"}, "must be one of"),
    ],
)
def test_refusals_say_why(overrides: Mapping[str, str], said: str) -> None:
    assert said in refusal(overrides)


def test_a_session_is_longer_than_the_time_between_heartbeats() -> None:
    wide = {"group.share.min.session.timeout.ms": "1", "group.share.max.heartbeat.interval.ms": "90000"}
    assert "must be greater than share.heartbeat.interval.ms" in refusal(
        {"share.session.timeout.ms": "6000", "share.heartbeat.interval.ms": "6000"}, wide
    )
    validate_group_settings({"share.session.timeout.ms": "6000"}, node(wide))


def test_a_group_has_its_own_value_before_the_nodes() -> None:
    layers = node({"group.share.delivery.count.limit": "7"})
    ours, theirs = (
        effective_group_values(own, layers)["share.delivery.count.limit"]
        for own in ({"share.delivery.count.limit": "3"}, {})
    )
    assert (ours.value, ours.source) == (3, ConfigSource.GROUP)
    assert [(synonym.name, synonym.text) for synonym in ours.synonyms] == [
        ("share.delivery.count.limit", "3"),
        ("group.share.delivery.count.limit", "7"),
        ("group.share.delivery.count.limit", "5"),
    ]
    assert (theirs.value, theirs.source) == (7, ConfigSource.STATIC_BROKER)


def test_what_no_node_has_a_setting_for_falls_back_on_its_default() -> None:
    name = "share.isolation.level"
    default = (name, "read_uncommitted", ConfigSource.DEFAULT)
    assert effective_group_values({}, node({}))[name].synonyms == (default,)
    ours = effective_group_values({name: "read_committed"}, node({}))[name].synonyms
    assert ours == ((name, "read_committed", ConfigSource.GROUP), default)


def test_what_was_stored_under_wider_bounds_is_brought_within_those_of_now() -> None:
    stored = {"share.record.lock.duration.ms": "1000", "share.partition.max.record.locks": "9999"}
    config = resolve_group_config(stored, node({}))
    assert config.share_record_lock_duration_ms == 15_000
    assert config.share_partition_max_record_locks == 4_000


def test_values_that_mean_something_else() -> None:
    config = resolve_group_config(
        {
            "penstock.share.backoff.ms": "250",
            "errors.deadletterqueue.topic.name": "buried-{topic}",
            "penstock.share.dlq.rate.max": "2.5",
            "penstock.share.dlq.share.max": "0.1",
            "penstock.share.delivery": "at-most-once",
            "share.isolation.level": "read_committed",
        },
        node({}),
    )
    assert config.share_backoff_jitter_ms == 250
    assert config.dead_letter_topic_of("orders") == "buried-orders"
    assert (config.dead_letter_rate_max, config.dead_letter_share_max) == (2.5, 0.1)
    assert config.is_at_most_once
    assert config.share_reads_committed
    assert (
        resolve_group_config({"errors.deadletterqueue.topic.name": ""}, node({})).dead_letter_topic_of("t")
        is None
    )
    assert GroupConfig().dead_letter_topic_of("orders") == "orders.dlq"
