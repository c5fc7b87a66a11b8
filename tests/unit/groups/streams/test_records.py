"""Records of streams groups are those that Apache Kafka 4.3 writes, byte for byte, and are read back as written."""

import pytest

from penstock.groups.modern_group import MemberState, ModernGroupRecord
from penstock.groups.streams.streams_group_records import STREAMS_GROUP_CODEC, StreamsGroupRecordType
from penstock.groups.streams.topology import (
    CopartitionGroup,
    Endpoint,
    InternalTopic,
    StreamsCurrentAssignment,
    StreamsGroupEpoch,
    StreamsMemberMetadata,
    StreamsTargetEpoch,
    Subtopology,
    TaskSets,
    Topology,
)

MEMBER = StreamsMemberMetadata(
    rack_id="r",
    client_id="c",
    client_host="h",
    rebalance_timeout_ms=5,
    topology_epoch=1,
    process_id="p",
    endpoint=Endpoint("x", 65_000),
    tags=(("zone", "a"),),
)
TASKS = TaskSets(active={"0": frozenset({0, 2})}, standby={"1": frozenset({1})})
REVOKING = StreamsCurrentAssignment(
    4,
    3,
    MemberState.UNREVOKED,
    assigned=TaskSets(active={"0": frozenset({0})}, standby={"1": frozenset({3})}),
    revoking=TaskSets(active={"0": frozenset({1})}),
    since={"0": {0: 2, 1: 3}},
)
TOPOLOGY = Topology(
    1,
    (
        Subtopology(
            "0",
            source_topics=("a", "b"),
            changelog_topics=(
                InternalTopic("g-changelog", replication_factor=3, configs=(("cleanup.policy", "compact"),)),
            ),
            repartition_sink_topics=("g-rep",),
            repartition_source_topics=(InternalTopic("g-rep", partitions=4),),
            copartition_groups=(CopartitionGroup(source_topics=(0, 1), repartition_source_topics=(0,)),),
        ),
    ),
)


@pytest.mark.parametrize(
    ("kind", "name", "stored", "key", "value"),
    [
        (
            StreamsGroupRecordType.GROUP_METADATA,
            "",
            StreamsGroupEpoch(3, -5),
            "0011000167",
            "000000000003fffffffffffffffb00",
        ),
        (
            StreamsGroupRecordType.GROUP_METADATA,
            "",
            StreamsGroupEpoch(3, 7, 2, (("num.standby.replicas", "1"),)),
            "0011000167",
            "000000000003000000000000000702000400000002011902156e756d2e7374616e6462792e7265706c69636173023100",
        ),
        (
            StreamsGroupRecordType.GROUP_METADATA,
            "",
            StreamsGroupEpoch(3, 7, 0),
            "0011000167",
            "000000000003000000000000000701000400000000",
        ),
        (
            StreamsGroupRecordType.MEMBER_METADATA,
            "m",
            MEMBER,
            "001300016700016d",
            "00000002720263026800000005000000010270010278fde80002057a6f6e6502610000",
        ),
        (
            StreamsGroupRecordType.MEMBER_METADATA,
            "m",
            MEMBER._replace(rack_id=None, endpoint=None, tags=()),
            "001300016700016d",
            "000000000263026800000005000000010270ff0100",
        ),
        (
            StreamsGroupRecordType.TARGET_ASSIGNMENT_METADATA,
            "",
            StreamsTargetEpoch(7),
            "0014000167",
            "00000000000700",
        ),
        (
            StreamsGroupRecordType.TARGET_ASSIGNMENT_METADATA,
            "",
            StreamsTargetEpoch(7, 258),
            "0014000167",
            "0000000000070100080000000000000102",
        ),
        (
            StreamsGroupRecordType.TARGET_ASSIGNMENT_MEMBER,
            "m",
            TASKS,
            "001500016700016d",
            "0000020230030000000000000002000202310200000001000100",
        ),
        (
            StreamsGroupRecordType.CURRENT_MEMBER_ASSIGNMENT,
            "m",
            REVOKING,
            "001600016700016d",
            "00000000000400000003010202300200000000010005020000000202023102000000030001020230020000000101000502"
            "00000003010100",
        ),
        (
            StreamsGroupRecordType.TOPOLOGY,
            "",
            TOPOLOGY,
            "0017000167",
            "000000000001020230030261026201020c672d6368616e67656c6f67000000000003020f636c65616e75702e706f6c6963"
            "7908636f6d7061637400000206672d7265700206672d726570000000040000010002030000000101020000000000",
        ),
        (StreamsGroupRecordType.TARGET_ASSIGNMENT_MEMBER, "m", None, "001500016700016d", None),
    ],
)
def test_bytes_are_those_that_kafka_writes(
    kind: StreamsGroupRecordType, name: str, stored: object, key: str, value: str | None
) -> None:
    record = ModernGroupRecord(kind, "g", name, stored)
    expected = bytes.fromhex(key), None if value is None else bytes.fromhex(value)
    assert STREAMS_GROUP_CODEC.encode(record) == expected
    assert STREAMS_GROUP_CODEC.decode(*expected) == record
