"""Settings of scheduled delivery."""

from typing import Final

from penstock.broker.setting_kinds import node_setting as _node
from penstock.protocol.settings import SettingType

_MIB: Final = 1 << 20
_DAY_MS: Final = 86_400_000
_INT, _SHORT, _LONG = SettingType.INT, SettingType.SHORT, SettingType.LONG

SCHEDULE: Final = (
    _node(
        "penstock.schedule.topic.num.partitions",
        _INT,
        16,
        "Partitions of the topic that holds records until they are due.",
        1,
    ),
    _node(
        "penstock.schedule.topic.replication.factor",
        _SHORT,
        3,
        "Replicas of the topic that holds records until they are due; fewer while there are fewer brokers, and "
        "raised later.",
        1,
    ),
    _node(
        "penstock.schedule.topic.min.isr",
        _INT,
        2,
        "Replicas that must have what is held before it counts; all of them where there are fewer.",
        1,
    ),
    _node("penstock.schedule.topic.segment.bytes", _INT, 100 * _MIB, "Segment size of that topic.", 1),
    _node(
        "penstock.schedule.commit.timeout.ms",
        _INT,
        5000,
        "How long a partition's leader waits for the replicas of that topic before it asks again.",
        1,
    ),
    _node(
        "penstock.schedule.delay.max.ms",
        _LONG,
        366 * _DAY_MS,
        "How far in the future a record may be due; producers of later ones are refused.",
        0,
    ),
    _node(
        "penstock.schedule.retention.hold.max.ms",
        _LONG,
        7 * _DAY_MS,
        "How long a topic keeps segments past their retention whose held records could not be taken over yet; "
        "what goes after that is lost, and reported.",
        0,
    ),
)
