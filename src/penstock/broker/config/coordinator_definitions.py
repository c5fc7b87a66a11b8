"""The node settings behind groups that are coordinated by the broker: defaults and bounds, by Kafka's names."""

from collections.abc import Mapping
from typing import Final

from penstock.broker.setting_kinds import dynamic_setting, node_setting
from penstock.protocol.settings import Setting, SettingType, Value


def _integer(name: str, default: int, doc: str, at_least: int = 1) -> Setting:
    return node_setting(name, SettingType.INT, default, doc, at_least)


def _presence(kind: str) -> tuple[Setting, ...]:
    session, heartbeat = f"{kind}.session.timeout.ms", f"{kind}.heartbeat.interval.ms"
    return (
        _integer(f"group.{kind}.session.timeout.ms", 45_000, f"Default of a group's {session}."),
        _integer(f"group.{kind}.min.session.timeout.ms", 45_000, f"Lowest {session} of a group."),
        _integer(f"group.{kind}.max.session.timeout.ms", 60_000, f"Highest {session} of a group."),
        _integer(f"group.{kind}.heartbeat.interval.ms", 5_000, f"Default of a group's {heartbeat}."),
        _integer(f"group.{kind}.min.heartbeat.interval.ms", 5_000, f"Lowest {heartbeat} of a group."),
        _integer(f"group.{kind}.max.heartbeat.interval.ms", 15_000, f"Highest {heartbeat} of a group."),
    )


CONSUMER_GROUPS: Final = (
    *_presence("consumer"),
    dynamic_setting(
        "group.consumer.assignment.interval.ms",
        SettingType.INT,
        1_000,
        "Default of a group's consumer.assignment.interval.ms.",
        0,
    ),
    _integer(
        "group.consumer.min.assignment.interval.ms",
        0,
        "Lowest consumer.assignment.interval.ms of a group.",
        0,
    ),
    _integer(
        "group.consumer.max.assignment.interval.ms",
        15_000,
        "Highest consumer.assignment.interval.ms of a group.",
    ),
    _integer(
        "group.consumer.max.size",
        10_000,
        "Members of one group under the consumer protocol. Apache Kafka's default is no bound.",
    ),
    node_setting(
        "group.consumer.assignors",
        SettingType.LIST,
        ("uniform", "range"),
        "Server-side assignors that members may ask for; the first is used where none asks.",
        choices=("uniform", "range"),
    ),
    node_setting(
        "group.consumer.migration.policy",
        SettingType.STRING,
        "bidirectional",
        "Whether a group in use may move between the classic and the consumer protocol: to the consumer "
        "protocol (upgrade), back (downgrade), both ways, or not (disabled).",
        choices=("bidirectional", "upgrade", "downgrade", "disabled"),
    ),
    _integer(
        "group.consumer.regex.refresh.interval.ms",
        600_000,
        "Taken as in Kafka; topics that match regular expressions are looked for whenever topics change.",
        10_000,
    ),
)

STREAMS_GROUPS: Final = (
    *_presence("streams"),
    dynamic_setting(
        "group.streams.assignment.interval.ms",
        SettingType.INT,
        1_000,
        "Default of a group's streams.assignment.interval.ms.",
        0,
    ),
    _integer(
        "group.streams.min.assignment.interval.ms", 0, "Lowest streams.assignment.interval.ms of a group.", 0
    ),
    _integer(
        "group.streams.max.assignment.interval.ms",
        15_000,
        "Highest streams.assignment.interval.ms of a group.",
    ),
    _integer(
        "group.streams.max.size",
        10_000,
        "Members of one streams group. Apache Kafka's default is no bound.",
    ),
    _integer(
        "group.streams.initial.rebalance.delay.ms",
        3_000,
        "Default of a group's streams.initial.rebalance.delay.ms.",
        0,
    ),
    _integer(
        "group.streams.num.standby.replicas", 0, "Default of a group's streams.num.standby.replicas.", 0
    ),
    _integer("group.streams.max.standby.replicas", 2, "Highest streams.num.standby.replicas of a group.", 0),
)

SHARE_GROUPS: Final = (
    *_presence("share"),
    _integer("group.share.max.size", 200, "Members of one share group."),
    node_setting(
        "group.share.assignors",
        SettingType.LIST,
        ("simple",),
        "Server-side assignors of share groups.",
        choices=("simple",),
    ),
    _integer(
        "group.share.initialize.retry.interval.ms",
        30_000,
        "Wait before the state of a share partition is initialised again where that failed.",
    ),
    _integer(
        "group.share.record.lock.duration.ms", 30_000, "Default of a group's share.record.lock.duration.ms."
    ),
    _integer(
        "group.share.min.record.lock.duration.ms", 15_000, "Lowest share.record.lock.duration.ms of a group."
    ),
    _integer(
        "group.share.max.record.lock.duration.ms", 60_000, "Highest share.record.lock.duration.ms of a group."
    ),
    _integer("group.share.delivery.count.limit", 5, "Default of a group's share.delivery.count.limit."),
    _integer("group.share.min.delivery.count.limit", 2, "Lowest share.delivery.count.limit of a group."),
    _integer("group.share.max.delivery.count.limit", 10, "Highest share.delivery.count.limit of a group."),
    _integer(
        "group.share.partition.max.record.locks",
        2_000,
        "Default of a group's share.partition.max.record.locks.",
    ),
    _integer(
        "group.share.min.partition.max.record.locks",
        100,
        "Lowest share.partition.max.record.locks of a group.",
    ),
    _integer(
        "group.share.max.partition.max.record.locks",
        4_000,
        "Highest share.partition.max.record.locks of a group.",
    ),
    _integer("group.share.max.share.sessions", 2_000, "Share sessions that one node keeps."),
)

#: What has a default, a lowest and a highest value: the kind of group, and the rest of the name.
_BOUNDED: Final = (
    ("consumer", "session.timeout.ms"),
    ("consumer", "assignment.interval.ms"),
    ("consumer", "heartbeat.interval.ms"),
    ("streams", "session.timeout.ms"),
    ("streams", "assignment.interval.ms"),
    ("streams", "heartbeat.interval.ms"),
    ("share", "session.timeout.ms"),
    ("share", "heartbeat.interval.ms"),
    ("share", "record.lock.duration.ms"),
    ("share", "delivery.count.limit"),
    ("share", "partition.max.record.locks"),
)


def group_bounds_flaw(values: Mapping[str, Value]) -> str | None:
    """Which of a node's settings contradict each other, if any."""
    for kind, rest in _BOUNDED:
        name, lowest, highest = f"group.{kind}.{rest}", f"group.{kind}.min.{rest}", f"group.{kind}.max.{rest}"
        if not _integer_of(values, lowest) <= _integer_of(values, name) <= _integer_of(values, highest):
            return f"{name} must be from {lowest} to {highest}"
    for kind in ("consumer", "streams", "share"):
        session, heartbeat = f"group.{kind}.session.timeout.ms", f"group.{kind}.heartbeat.interval.ms"
        if _integer_of(values, session) <= _integer_of(values, heartbeat):
            return f"{session} must be above {heartbeat}"
    return None


def _integer_of(values: Mapping[str, Value], name: str) -> int:
    value = values[name]
    assert isinstance(value, int), (name, value)
    return value
