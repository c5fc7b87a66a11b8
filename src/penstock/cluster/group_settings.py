"""The settings of a group: Kafka's names, types and defaults, Penstock's own, and the node settings behind them.

A node's bounds apply to a value when it is set. A value that was stored under wider bounds is not refused later; it is
clamped to the bounds where it is read.
"""

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from penstock.cluster.topic_names import is_internal, topic_name_error
from penstock.cluster.topic_settings import (
    NO_LAYERS,
    ConfigLayer,
    ConfigSource,
    ConfigSynonym,
    EffectiveSetting,
    effective_setting,
)
from penstock.protocol.config_def import InvalidSetting, NodeSynonym, Setting, SettingType, SettingValue
from penstock.protocol.errors import ApiError, ErrorCode

_INT, _LONG, _DOUBLE = SettingType.INT, SettingType.LONG, SettingType.DOUBLE
_STRING, _BOOLEAN = SettingType.STRING, SettingType.BOOLEAN

#: Stands for the source topic in the name of a dead-letter topic.
TOPIC_PLACEHOLDER: Final = "{topic}"
_BY_DURATION: Final = "by_duration:"
#: PnDTnHnMn.nS; single parts may be missing, but not all of them.
_ISO_DURATION = re.compile(
    r"P(?=[0-9T])(?:([0-9]{1,9})D)?(?:T(?=[0-9])(?:([0-9]{1,9})H)?(?:([0-9]{1,9})M)?(?:([0-9]{1,9})(?:\.([0-9]{1,9}))?S)?)?",
    re.IGNORECASE,
)


class NodeBounds(NamedTuple):
    """The node settings that hold the minimum and the maximum of a group's own value."""

    lowest: str | None
    highest: str


def duration_ms(text: str) -> int | None:
    """Parses an ISO-8601 duration of days and smaller units; returns None for any other text."""
    match = _ISO_DURATION.fullmatch(text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups()[:4])
    fraction_ms = int((match[5] or "0").ljust(3, "0")[:3])
    return (((days * 24 + hours) * 60 + minutes) * 60 + seconds) * 1000 + fraction_ms


def reset_duration_ms(value: str) -> int | None:
    """How far back `by_duration:...` goes; None for the other values."""
    return duration_ms(value.removeprefix(_BY_DURATION)) if value.startswith(_BY_DURATION) else None


def _offset_reset_flaw(value: SettingValue) -> str | None:
    assert isinstance(value, str)
    if value in ("earliest", "latest") or reset_duration_ms(value) is not None:
        return None
    return "must be earliest, latest or by_duration: and an ISO-8601 duration that is not negative (PnDTnHnMn.nS)"


def _dead_letter_topic_flaw(value: SettingValue) -> str | None:
    assert isinstance(value, str)
    if is_internal(value):
        return f"'{value}' is an internal topic"
    if value == TOPIC_PLACEHOLDER:
        return "must not be the topic that they are from"
    return topic_name_error(value.replace(TOPIC_PLACEHOLDER, "topic")) if value else None


GROUP_BOUNDS: Final[dict[str, NodeBounds]] = {
    "consumer.session.timeout.ms": NodeBounds(
        "group.consumer.min.session.timeout.ms", "group.consumer.max.session.timeout.ms"
    ),
    "consumer.heartbeat.interval.ms": NodeBounds(
        "group.consumer.min.heartbeat.interval.ms", "group.consumer.max.heartbeat.interval.ms"
    ),
    "consumer.assignment.interval.ms": NodeBounds(
        "group.consumer.min.assignment.interval.ms", "group.consumer.max.assignment.interval.ms"
    ),
    "streams.session.timeout.ms": NodeBounds(
        "group.streams.min.session.timeout.ms", "group.streams.max.session.timeout.ms"
    ),
    "streams.heartbeat.interval.ms": NodeBounds(
        "group.streams.min.heartbeat.interval.ms", "group.streams.max.heartbeat.interval.ms"
    ),
    "streams.assignment.interval.ms": NodeBounds(
        "group.streams.min.assignment.interval.ms", "group.streams.max.assignment.interval.ms"
    ),
    "streams.num.standby.replicas": NodeBounds(None, "group.streams.max.standby.replicas"),
    "share.session.timeout.ms": NodeBounds(
        "group.share.min.session.timeout.ms", "group.share.max.session.timeout.ms"
    ),
    "share.heartbeat.interval.ms": NodeBounds(
        "group.share.min.heartbeat.interval.ms", "group.share.max.heartbeat.interval.ms"
    ),
    "share.record.lock.duration.ms": NodeBounds(
        "group.share.min.record.lock.duration.ms", "group.share.max.record.lock.duration.ms"
    ),
    "share.delivery.count.limit": NodeBounds(
        "group.share.min.delivery.count.limit", "group.share.max.delivery.count.limit"
    ),
    "share.partition.max.record.locks": NodeBounds(
        "group.share.min.partition.max.record.locks", "group.share.max.partition.max.record.locks"
    ),
}

_MEMBERS = (
    Setting(
        "consumer.session.timeout.ms",
        _INT,
        45_000,
        "A consumer that sends no heartbeat for this long is removed from its group.",
        1,
        synonyms=(NodeSynonym("group.consumer.session.timeout.ms"),),
    ),
    Setting(
        "consumer.heartbeat.interval.ms",
        _INT,
        5_000,
        "The heartbeat interval of consumers.",
        1,
        synonyms=(NodeSynonym("group.consumer.heartbeat.interval.ms"),),
    ),
    Setting(
        "consumer.assignment.interval.ms",
        _INT,
        1_000,
        "How long those that join after an assignment wait for the next one, together.",
        0,
        synonyms=(NodeSynonym("group.consumer.assignment.interval.ms"),),
    ),
    Setting(
        "streams.session.timeout.ms",
        _INT,
        45_000,
        "A streams member that sends no heartbeat for this long is removed from its group.",
        1,
        synonyms=(NodeSynonym("group.streams.session.timeout.ms"),),
    ),
    Setting(
        "streams.heartbeat.interval.ms",
        _INT,
        5_000,
        "How often streams members send heartbeats.",
        1,
        synonyms=(NodeSynonym("group.streams.heartbeat.interval.ms"),),
    ),
    Setting(
        "streams.assignment.interval.ms",
        _INT,
        1_000,
        "Least time between two assignments of a streams group: members that join meanwhile are assigned together.",
        0,
        synonyms=(NodeSynonym("group.streams.assignment.interval.ms"),),
    ),
    Setting(
        "streams.initial.rebalance.delay.ms",
        _INT,
        3_000,
        "How long a new streams group waits for more members before it assigns tasks.",
        0,
        synonyms=(NodeSynonym("group.streams.initial.rebalance.delay.ms"),),
    ),
    Setting(
        "streams.num.standby.replicas",
        _INT,
        0,
        "Standby tasks for each task that has state.",
        0,
        synonyms=(NodeSynonym("group.streams.num.standby.replicas"),),
    ),
    Setting(
        "share.session.timeout.ms",
        _INT,
        45_000,
        "Silence after which a share consumer has left its group.",
        1,
        synonyms=(NodeSynonym("group.share.session.timeout.ms"),),
    ),
    Setting(
        "share.heartbeat.interval.ms",
        _INT,
        5_000,
        "The heartbeat interval of share consumers.",
        1,
        synonyms=(NodeSynonym("group.share.heartbeat.interval.ms"),),
    ),
)

_SHARING = (
    Setting(
        "share.record.lock.duration.ms",
        _INT,
        30_000,
        "How long a member holds the acquisition lock of a record.",
        1,
        synonyms=(NodeSynonym("group.share.record.lock.duration.ms"),),
    ),
    Setting(
        "share.delivery.count.limit",
        _INT,
        5,
        "Deliveries of a record after which the group gives it up.",
        1,
        synonyms=(NodeSynonym("group.share.delivery.count.limit"),),
    ),
    Setting(
        "share.partition.max.record.locks",
        _INT,
        2_000,
        "Records of one partition in delivery at a time.",
        1,
        synonyms=(NodeSynonym("group.share.partition.max.record.locks"),),
    ),
    Setting(
        "share.auto.offset.reset",
        _STRING,
        "latest",
        "Where a group that is new to a topic begins: earliest, latest, or by_duration: and how far back "
        "(by_duration:PT1H).",
        check=_offset_reset_flaw,
    ),
    Setting(
        "share.isolation.level",
        _STRING,
        "read_uncommitted",
        "Whether records of transactions are delivered only once committed.",
        choices=("read_committed", "read_uncommitted"),
    ),
    Setting("share.renew.acknowledge.enable", _BOOLEAN, True, "Whether a consumer may renew its locks."),
)

_POLICY = (
    Setting(
        "penstock.share.delivery",
        _STRING,
        "at-least-once",
        "Whether a record that was not acknowledged is delivered again. Under at-most-once each record is given "
        "out once and never again, whatever happens to the consumer that received it.",
        choices=("at-least-once", "at-most-once"),
    ),
    Setting(
        "penstock.share.acquire.mode",
        _STRING,
        "batch_optimized",
        "Whether a member that does not choose gets whole batches (batch_optimized), or never more records than it has "
        "asked for (record_limit), which costs more requests.",
        choices=("batch_optimized", "record_limit"),
    ),
    Setting(
        "penstock.share.backoff",
        _STRING,
        "none",
        "Whether a released record waits before it is delivered again: not at all, always equally long, or twice "
        "as long each time.",
        choices=("none", "fixed", "exponential"),
    ),
    Setting(
        "penstock.share.backoff.ms", _LONG, 1_000, "How long it waits, the first time if exponential.", 0
    ),
    Setting("penstock.share.backoff.max.ms", _LONG, 60_000, "How long it waits at most, before jitter.", 0),
    Setting(
        "penstock.share.backoff.jitter.ms",
        _LONG,
        -1,
        "A random time up to this is added to each wait; -1 is as much as penstock.share.backoff.ms.",
        -1,
    ),
)

_DEAD_LETTERS = (
    Setting(
        "errors.deadletterqueue.topic.name",
        _STRING,
        f"{TOPIC_PLACEHOLDER}.dlq",
        f"Where records go that the group gives up or rejects; {TOPIC_PLACEHOLDER} stands for the topic they are from. "
        "Empty keeps none, which is Apache Kafka's default.",
        check=_dead_letter_topic_flaw,
    ),
    Setting(
        "errors.deadletterqueue.copy.record.enable",
        _BOOLEAN,
        True,
        "Whether a dead letter has the record's key, value and headers, or only tells which record it was. "
        "Apache Kafka's default is false.",
    ),
    Setting(
        "penstock.share.dlq.rate.max",
        _DOUBLE,
        -1.0,
        "Dead letters per second above which the rest wait; -1 has no bound.",
        -1,
    ),
    Setting(
        "penstock.share.dlq.share.max",
        _DOUBLE,
        1.0,
        "The largest share of the finished records that may become dead letters before the rest wait; 1 has no bound.",
        0,
        1,
    ),
)

GROUP_SETTINGS: Final[dict[str, Setting]] = {
    setting.name: setting for section in (_MEMBERS, _SHARING, _POLICY, _DEAD_LETTERS) for setting in section
}


def effective_group_values(
    overrides: Mapping[str, str], node: tuple[ConfigLayer, ...] = NO_LAYERS
) -> dict[str, EffectiveSetting]:
    """Every setting of a group. `node` is the node's layers, strongest first."""
    return {
        name: _effective_group_setting(setting, overrides, node) for name, setting in GROUP_SETTINGS.items()
    }


def _effective_group_setting(
    setting: Setting, overrides: Mapping[str, str], node: tuple[ConfigLayer, ...]
) -> EffectiveSetting:
    effective = effective_setting(setting, overrides, node, own=ConfigSource.GROUP)
    if setting.synonyms:
        return effective
    default = ConfigSynonym(setting.name, setting.text(setting.default), ConfigSource.DEFAULT)
    return effective._replace(synonyms=(*effective.synonyms, default))


def validate_group_settings(overrides: Mapping[str, str], node: tuple[ConfigLayer, ...] = NO_LAYERS) -> None:
    """Checks all of a group's own settings together. Raises INVALID_CONFIG."""
    for name, text in overrides.items():
        setting = GROUP_SETTINGS.get(name)
        if setting is None:
            raise ApiError(ErrorCode.invalid_config, f"Unknown group config name: {name}")
        try:
            value = setting.parse(text)
        except InvalidSetting as error:
            raise ApiError(ErrorCode.invalid_config, str(error)) from None
        _refuse_beyond_bounds(name, value, node)
    _refuse_contradictions(effective_group_values(overrides, node))


def clamp_to_bounds(name: str, value: SettingValue, node: tuple[ConfigLayer, ...]) -> SettingValue:
    bounds = GROUP_BOUNDS.get(name)
    if bounds is None:
        return value
    assert isinstance(value, int), (name, value)
    lowest, highest = _bound(bounds.lowest, node), _bound(bounds.highest, node)
    value = value if lowest is None else max(value, lowest)
    return value if highest is None else min(value, highest)


def _refuse_beyond_bounds(name: str, value: SettingValue, node: tuple[ConfigLayer, ...]) -> None:
    held = clamp_to_bounds(name, value, node)
    if held != value:
        assert isinstance(value, int)
        assert isinstance(held, int)
        bounds = GROUP_BOUNDS[name]
        how = (
            f"greater than or equal to {bounds.lowest}"
            if held > value
            else f"less than or equal to {bounds.highest}"
        )
        raise ApiError(ErrorCode.invalid_config, f"{name} must be {how} ({held})")


def _bound(name: str | None, node: tuple[ConfigLayer, ...]) -> int | None:
    """Returns None if there is no bound."""
    if name is None:
        return None
    text = next((layer.values[name] for layer in node if name in layer.values), None)
    return None if text is None else int(text)


def _refuse_contradictions(values: Mapping[str, EffectiveSetting]) -> None:
    for protocol in ("consumer", "streams", "share"):
        session, heartbeat = f"{protocol}.session.timeout.ms", f"{protocol}.heartbeat.interval.ms"
        session_ms, heartbeat_ms = values[session].value, values[heartbeat].value
        assert isinstance(session_ms, int)
        assert isinstance(heartbeat_ms, int)
        if session_ms <= heartbeat_ms:
            raise ApiError(ErrorCode.invalid_config, f"{session} must be greater than {heartbeat}")
    wait_ms, longest_ms = (
        values[name].value for name in ("penstock.share.backoff.ms", "penstock.share.backoff.max.ms")
    )
    assert isinstance(wait_ms, int)
    assert isinstance(longest_ms, int)
    if wait_ms > longest_ms:
        raise ApiError(
            ErrorCode.invalid_config,
            "penstock.share.backoff.ms must not be above penstock.share.backoff.max.ms",
        )
