"""Settings of the coordinators: consumer, streams and share groups, transactions, share state and the schedule.

Names, meanings and defaults are Kafka's where Kafka has the setting. A group setting has a default, a lowest and a
highest value; `group_bounds_flaw` finds node settings that contradict each other.
"""

from collections.abc import Mapping
from typing import Final

from penstock.protocol.config_def import Setting, SettingType, SettingValue, static_setting


def _integer(name: str, default: int, doc: str, at_least: int = 1) -> Setting:
    return static_setting(name, SettingType.INT, default, doc, at_least)


def _session_settings(kind: str) -> tuple[Setting, ...]:
    session, heartbeat = f"{kind}.session.timeout.ms", f"{kind}.heartbeat.interval.ms"
    return (
        _integer(f"group.{kind}.session.timeout.ms", 45_000, f"Default of a group's {session}."),
        _integer(f"group.{kind}.min.session.timeout.ms", 45_000, f"Lowest {session} of a group."),
        _integer(f"group.{kind}.max.session.timeout.ms", 60_000, f"Highest {session} of a group."),
        _integer(f"group.{kind}.heartbeat.interval.ms", 5_000, f"Default of a group's {heartbeat}."),
        _integer(f"group.{kind}.min.heartbeat.interval.ms", 5_000, f"Lowest {heartbeat} of a group."),
        _integer(f"group.{kind}.max.heartbeat.interval.ms", 15_000, f"Highest {heartbeat} of a group."),
    )


CONSUMER_GROUP_SETTINGS: Final = (
    *_session_settings("consumer"),
    Setting(
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
    static_setting(
        "group.consumer.assignors",
        SettingType.LIST,
        ("uniform", "range"),
        "Server-side assignors that members may ask for; the first is used where none asks.",
        choices=("uniform", "range"),
    ),
    static_setting(
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

STREAMS_GROUP_SETTINGS: Final = (
    *_session_settings("streams"),
    Setting(
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

SHARE_GROUP_SETTINGS: Final = (
    *_session_settings("share"),
    _integer("group.share.max.size", 200, "Members of one share group."),
    static_setting(
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

#: Settings with a default, a lowest and a highest value: the kind of group and the rest of the setting's name.
_BOUNDED_SETTINGS: Final = (
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


def group_bounds_flaw(values: Mapping[str, SettingValue]) -> str | None:
    """Return a message about the first settings that contradict each other, or None."""
    for kind, rest in _BOUNDED_SETTINGS:
        name, lowest, highest = f"group.{kind}.{rest}", f"group.{kind}.min.{rest}", f"group.{kind}.max.{rest}"
        if not _integer_of(values, lowest) <= _integer_of(values, name) <= _integer_of(values, highest):
            return f"{name} must be from {lowest} to {highest}"
    for kind in ("consumer", "streams", "share"):
        session, heartbeat = f"group.{kind}.session.timeout.ms", f"group.{kind}.heartbeat.interval.ms"
        if _integer_of(values, session) <= _integer_of(values, heartbeat):
            return f"{session} must be above {heartbeat}"
    return None


def _integer_of(values: Mapping[str, SettingValue], name: str) -> int:
    value = values[name]
    assert isinstance(value, int), (name, value)
    return value


_MIB: Final = 1 << 20
_INT, _SHORT, _BOOLEAN = SettingType.INT, SettingType.SHORT, SettingType.BOOLEAN

TRANSACTION_SETTINGS: Final = (
    static_setting(
        "transaction.state.log.num.partitions",
        _INT,
        50,
        "Partitions of the topic that holds transactions.",
        1,
    ),
    static_setting(
        "transaction.state.log.replication.factor",
        _SHORT,
        3,
        "Replicas of the topic that holds transactions; fewer while there are fewer brokers, and raised later.",
        1,
    ),
    static_setting(
        "transaction.state.log.min.isr",
        _INT,
        2,
        "Replicas that must hold a transaction's state before it counts; all of them where there are fewer.",
        1,
    ),
    static_setting("transaction.state.log.segment.bytes", _INT, 100 * _MIB, "Segment size of that topic.", 1),
    static_setting(
        "penstock.transaction.commit.timeout.ms",
        _INT,
        5000,
        "How long transactional requests wait for the replicas of that topic before they are told to try again.",
        1,
    ),
    static_setting(
        "transaction.max.timeout.ms",
        _INT,
        900_000,
        "Longest time that a producer may ask for before its open transaction is aborted.",
        1,
    ),
    static_setting(
        "transaction.abort.timed.out.transaction.cleanup.interval.ms",
        _INT,
        10_000,
        "How often transactions are looked for that are open for too long.",
        1,
    ),
    static_setting(
        "transactional.id.expiration.ms",
        _INT,
        604_800_000,
        "How long a transactional id is remembered after its last transaction.",
        1,
    ),
    static_setting(
        "transaction.remove.expired.transaction.cleanup.interval.ms",
        _INT,
        3_600_000,
        "How often transactional ids are looked for that have not been used for that long.",
        1,
    ),
    Setting(
        "transaction.partition.verification.enable",
        _BOOLEAN,
        True,
        "Ask the coordinator whether a partition is in a transaction before its first batch is appended, so that "
        "a late one does not begin a transaction that never ends.",
    ),
    static_setting(
        "transaction.two.phase.commit.enable",
        _BOOLEAN,
        True,
        "Let producers have transactions that only they end, because a system outside takes part in them, such as the "
        "checkpoint of a Spark query. Apache Kafka's default is false.",
    ),
    static_setting(
        "add.partitions.to.txn.retry.backoff.max.ms",
        _INT,
        100,
        "How long a coordinator waits for the end of a producer's last transaction before it has the producer ask "
        "again for the next one.",
        0,
    ),
)

SHARE_STATE_SETTINGS: Final = (
    static_setting(
        "share.coordinator.state.topic.num.partitions",
        _INT,
        50,
        "Partitions of the topic that holds the state of share groups.",
        1,
    ),
    static_setting(
        "share.coordinator.state.topic.replication.factor",
        _SHORT,
        3,
        "Replicas of the topic that holds the state of share groups; fewer while there are fewer brokers, and "
        "raised later.",
        1,
    ),
    static_setting(
        "share.coordinator.state.topic.min.isr",
        _SHORT,
        2,
        "Replicas that must hold that state before it counts; all of them where there are fewer.",
        1,
    ),
    static_setting(
        "share.coordinator.state.topic.segment.bytes", _INT, 100 * _MIB, "Segment size of that topic.", 1
    ),
    static_setting(
        "share.coordinator.write.timeout.ms",
        _INT,
        5000,
        "How long requests wait for the replicas of that topic before they are told to try again.",
        1,
    ),
    static_setting(
        "share.coordinator.snapshot.update.records.per.snapshot",
        _INT,
        500,
        "Changes of a share partition's state that are stored before all of its state is stored again.",
        0,
    ),
    static_setting(
        "share.coordinator.state.topic.prune.interval.ms",
        _INT,
        300_000,
        "How often there is a look at whether that topic has grown enough to be cut back to what is needed of it.",
        1,
    ),
)


_MEBIBYTE: Final = 1 << 20
_DAY_MS: Final = 86_400_000
_INT32, _INT16, _INT64 = SettingType.INT, SettingType.SHORT, SettingType.LONG

SCHEDULE_SETTINGS: Final = (
    static_setting(
        "penstock.schedule.topic.num.partitions",
        _INT32,
        16,
        "Partitions of the topic that holds records until they are due.",
        1,
    ),
    static_setting(
        "penstock.schedule.topic.replication.factor",
        _INT16,
        3,
        "Replicas of the topic that holds records until they are due; fewer while there are fewer brokers, and "
        "raised later.",
        1,
    ),
    static_setting(
        "penstock.schedule.topic.min.isr",
        _INT32,
        2,
        "Replicas that must have what is held before it counts; all of them where there are fewer.",
        1,
    ),
    static_setting(
        "penstock.schedule.topic.segment.bytes", _INT32, 100 * _MEBIBYTE, "Segment size of that topic.", 1
    ),
    static_setting(
        "penstock.schedule.commit.timeout.ms",
        _INT32,
        5000,
        "How long a partition's leader waits for the replicas of that topic before it asks again.",
        1,
    ),
    static_setting(
        "penstock.schedule.delay.max.ms",
        _INT64,
        366 * _DAY_MS,
        "How far in the future a record may be due; producers of later ones are refused.",
        0,
    ),
    static_setting(
        "penstock.schedule.retention.hold.max.ms",
        _INT64,
        7 * _DAY_MS,
        "How long a topic keeps segments past their retention whose held records could not be taken over yet; "
        "what goes after that is lost, and reported.",
        0,
    ),
)
