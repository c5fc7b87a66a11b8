"""Records of share groups have the bytes that the tools of Apache Kafka 4.3 read, and are read back as written."""

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.groups.modern_group import GroupEpoch, ModernGroupRecord
from penstock.groups.share.share_group_records import (
    SHARE_GROUP_CODEC,
    ShareCurrentAssignment,
    ShareGroupRecordType,
    ShareSubscription,
    StatePartitionMetadata,
)
from penstock.protocol.stored_records import UnknownVersion

TOPIC, OTHER = UUID(int=1), UUID("841a4ac1-27bd-4eb3-8e41-d4bfbc1edfa0")
TOPIC_HEX, OTHER_HEX = TOPIC.hex, OTHER.hex

#: As org.apache.kafka.tools.DumpLogSegments decodes them.
EXAMPLES = [
    (
        ModernGroupRecord(
            ShareGroupRecordType.MEMBER_METADATA, "jg", "m", ShareSubscription("r", "c", "/h", ("s", "t"))
        ),
        "000a 0002 6a67 0001 6d",
        "0000 02 72 02 63 03 2f68 03 02 73 02 74 00",
    ),
    (
        ModernGroupRecord(ShareGroupRecordType.GROUP_METADATA, "jg", "", GroupEpoch(2, -2)),
        "000b 0002 6a67",
        "0000 00000002 fffffffffffffffe 00",
    ),
    (
        ModernGroupRecord(ShareGroupRecordType.TARGET_ASSIGNMENT_METADATA, "jg", "", 2),
        "000c 0002 6a67",
        "0000 00000002 00",
    ),
    (
        ModernGroupRecord(
            ShareGroupRecordType.TARGET_ASSIGNMENT_MEMBER, "jg", "m", {TOPIC: frozenset({1, 0})}
        ),
        "000d 0002 6a67 0001 6d",
        f"0000 02 {TOPIC_HEX} 03 00000000 00000001 00 00",
    ),
    (
        ModernGroupRecord(
            ShareGroupRecordType.CURRENT_MEMBER_ASSIGNMENT,
            "jg",
            "m",
            ShareCurrentAssignment(2, 1, {TOPIC: frozenset({0})}),
        ),
        "000e 0002 6a67 0001 6d",
        f"0000 00000002 00000001 00 02 {TOPIC_HEX} 02 00000000 00 00",
    ),
    (
        ModernGroupRecord(
            ShareGroupRecordType.STATE_PARTITION_METADATA,
            "jg",
            "",
            StatePartitionMetadata(
                {TOPIC: frozenset({1})}, {TOPIC: frozenset({0})}, frozenset({OTHER}), {TOPIC: "t", OTHER: "s"}
            ),
        ),
        "000f 0002 6a67",
        f"0000 02 {TOPIC_HEX} 02 74 02 00000001 00 02 {TOPIC_HEX} 02 74 02 00000000 00 02 {OTHER_HEX} 02 73 00 00",
    ),
]


@pytest.mark.parametrize(("record", "key", "value"), EXAMPLES, ids=lambda item: getattr(item, "kind", None))
def test_records_have_the_bytes_of_kafka(record: ModernGroupRecord, key: str, value: str) -> None:
    encoded = (bytes.fromhex(key), bytes.fromhex(value))
    assert SHARE_GROUP_CODEC.encode(record) == encoded
    assert SHARE_GROUP_CODEC.decode(*encoded) == record
    gone = record._replace(value=None)
    assert SHARE_GROUP_CODEC.encode(gone) == (bytes.fromhex(key), None)
    assert SHARE_GROUP_CODEC.decode(bytes.fromhex(key), None) == gone


def test_what_is_newer_is_refused() -> None:
    with pytest.raises(UnknownVersion):
        SHARE_GROUP_CODEC.decode(bytes.fromhex("000c00026a67"), bytes.fromhex("00010000000200"))


_places = st.dictionaries(
    st.uuids(), st.frozensets(st.integers(0, 2**31 - 1), min_size=1, max_size=5), max_size=4
)


@given(_places, _places, st.frozensets(st.uuids(), max_size=3), st.text(max_size=20))
def test_places_survive_the_log(
    initializing: dict[UUID, frozenset[int]],
    initialized: dict[UUID, frozenset[int]],
    deleting: frozenset[UUID],
    name: str,
) -> None:
    names = dict.fromkeys((*initializing, *initialized, *deleting), name)
    record = ModernGroupRecord(
        ShareGroupRecordType.STATE_PARTITION_METADATA,
        "g",
        "",
        StatePartitionMetadata(initializing, initialized, deleting, names),
    )
    assert SHARE_GROUP_CODEC.decode(*SHARE_GROUP_CODEC.encode(record)) == record
