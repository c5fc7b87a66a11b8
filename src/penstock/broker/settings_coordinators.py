"""Settings of the coordinators of transactions and of share state."""

from typing import Final

from penstock.broker.setting_kinds import dynamic_setting as _dynamic
from penstock.broker.setting_kinds import node_setting as _node
from penstock.protocol.settings import SettingType

_MIB: Final = 1 << 20
_INT, _SHORT, _BOOLEAN = SettingType.INT, SettingType.SHORT, SettingType.BOOLEAN

TRANSACTIONS: Final = (
    _node(
        "transaction.state.log.num.partitions",
        _INT,
        50,
        "Partitions of the topic that holds transactions.",
        1,
    ),
    _node(
        "transaction.state.log.replication.factor",
        _SHORT,
        3,
        "Replicas of the topic that holds transactions; fewer while there are fewer brokers, and raised later.",
        1,
    ),
    _node(
        "transaction.state.log.min.isr",
        _INT,
        2,
        "Replicas that must hold a transaction's state before it counts; all of them where there are fewer.",
        1,
    ),
    _node("transaction.state.log.segment.bytes", _INT, 100 * _MIB, "Segment size of that topic.", 1),
    _node(
        "penstock.transaction.commit.timeout.ms",
        _INT,
        5000,
        "How long transactional requests wait for the replicas of that topic before they are told to try again.",
        1,
    ),
    _node(
        "transaction.max.timeout.ms",
        _INT,
        900_000,
        "Longest time that a producer may ask for before its open transaction is aborted.",
        1,
    ),
    _node(
        "transaction.abort.timed.out.transaction.cleanup.interval.ms",
        _INT,
        10_000,
        "How often transactions are looked for that are open for too long.",
        1,
    ),
    _node(
        "transactional.id.expiration.ms",
        _INT,
        604_800_000,
        "How long a transactional id is remembered after its last transaction.",
        1,
    ),
    _node(
        "transaction.remove.expired.transaction.cleanup.interval.ms",
        _INT,
        3_600_000,
        "How often transactional ids are looked for that have not been used for that long.",
        1,
    ),
    _dynamic(
        "transaction.partition.verification.enable",
        _BOOLEAN,
        True,
        "Ask the coordinator whether a partition is in a transaction before its first batch is appended, so that "
        "a late one does not begin a transaction that nobody ends.",
    ),
    _node(
        "transaction.two.phase.commit.enable",
        _BOOLEAN,
        True,
        "Let producers have transactions that only they end, because a system outside takes part in them, such as the "
        "checkpoint of a Spark query. Apache Kafka's default is false.",
    ),
    _node(
        "add.partitions.to.txn.retry.backoff.max.ms",
        _INT,
        100,
        "How long a coordinator waits for the end of a producer's last transaction before it has the producer ask "
        "again for the next one.",
        0,
    ),
)

SHARE_STATE: Final = (
    _node(
        "share.coordinator.state.topic.num.partitions",
        _INT,
        50,
        "Partitions of the topic that holds the state of share groups.",
        1,
    ),
    _node(
        "share.coordinator.state.topic.replication.factor",
        _SHORT,
        3,
        "Replicas of the topic that holds the state of share groups; fewer while there are fewer brokers, and "
        "raised later.",
        1,
    ),
    _node(
        "share.coordinator.state.topic.min.isr",
        _SHORT,
        2,
        "Replicas that must hold that state before it counts; all of them where there are fewer.",
        1,
    ),
    _node("share.coordinator.state.topic.segment.bytes", _INT, 100 * _MIB, "Segment size of that topic.", 1),
    _node(
        "share.coordinator.write.timeout.ms",
        _INT,
        5000,
        "How long requests wait for the replicas of that topic before they are told to try again.",
        1,
    ),
    _node(
        "share.coordinator.snapshot.update.records.per.snapshot",
        _INT,
        500,
        "Changes of a share partition's state that are stored before all of its state is stored again.",
        0,
    ),
    _node(
        "share.coordinator.state.topic.prune.interval.ms",
        _INT,
        300_000,
        "How often there is a look at whether that topic has grown enough to be cut back to what is needed of it.",
        1,
    ),
)
