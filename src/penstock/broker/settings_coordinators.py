"""Settings of the coordinators of transactions and of share state."""

from typing import Final

from penstock.broker.setting_kinds import node_setting as _node
from penstock.protocol.settings import SettingType

_MIB: Final = 1 << 20
_INT, _SHORT = SettingType.INT, SettingType.SHORT

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
)
