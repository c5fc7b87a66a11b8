"""Records of consumer groups have Kafka's bytes, and are read back as written."""

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.groups.consumer.consumer_group_records import (
    CONSUMER_GROUP_CODEC,
    ClassicMemberMetadata,
    ConsumerCurrentAssignment,
    ConsumerGroupRecordType,
    ConsumerSubscription,
    ResolvedRegularExpression,
)
from penstock.groups.modern_group import GroupEpoch, MemberState, ModernGroupRecord, TargetAssignmentEpoch
from penstock.protocol.stored_records import UnknownVersion

TOPIC = UUID("00000000-0000-0000-0000-0000000000ff")
ID = "000000000000000000000000000000ff"


@pytest.mark.parametrize(
    ("record", "key", "value"),
    [
        (
            ModernGroupRecord(ConsumerGroupRecordType.GROUP_METADATA, "g", "", GroupEpoch(3)),
            "0003 0001 67",
            "0000 00000003 00",
        ),
        (
            ModernGroupRecord(ConsumerGroupRecordType.GROUP_METADATA, "g", "", GroupEpoch(3, -5)),
            "0003 0001 67",
            "0000 00000003 01 00 08 fffffffffffffffb",
        ),
        (
            ModernGroupRecord(
                ConsumerGroupRecordType.MEMBER_METADATA,
                "g",
                "m",
                ConsumerSubscription(
                    instance_id=None,
                    rack_id="r",
                    client_host="h",
                    topic_names=("a", "b"),
                    rebalance_timeout_ms=5,
                    classic=ClassicMemberMetadata(5, (("range", b"x"),)),
                ),
            ),
            "0005 0001 67 0001 6d",
            "0000 00 0272 01 0268 03 0261 0262 00 00000005 00 01 00 10 01 00000005 02 06 72616e6765 0278 00 00",
        ),
        (
            ModernGroupRecord(
                ConsumerGroupRecordType.TARGET_ASSIGNMENT_METADATA, "g", "", TargetAssignmentEpoch(7)
            ),
            "0006 0001 67",
            "0000 00000007 00",
        ),
        (
            ModernGroupRecord(
                ConsumerGroupRecordType.TARGET_ASSIGNMENT_METADATA, "g", "", TargetAssignmentEpoch(7, 258)
            ),
            "0006 0001 67",
            "0000 00000007 01 00 08 0000000000000102",
        ),
        (
            ModernGroupRecord(
                ConsumerGroupRecordType.TARGET_ASSIGNMENT_MEMBER, "g", "m", {TOPIC: frozenset({0, 2})}
            ),
            "0007 0001 67 0001 6d",
            f"0000 02 {ID} 03 00000000 00000002 00 00",
        ),
        (
            ModernGroupRecord(
                ConsumerGroupRecordType.CURRENT_MEMBER_ASSIGNMENT,
                "g",
                "m",
                ConsumerCurrentAssignment(
                    4, 3, MemberState.UNREVOKED, {}, {TOPIC: frozenset({1})}, {TOPIC: {1: 2}}
                ),
            ),
            "0008 0001 67 0001 6d",
            f"0000 00000004 00000003 01 01 02 {ID} 02 00000001 01 00 05 02 00000002 00",
        ),
        (
            ModernGroupRecord(
                ConsumerGroupRecordType.REGULAR_EXPRESSION,
                "g",
                "a.*",
                ResolvedRegularExpression(frozenset({"ab"}), 2, 9),
            ),
            "0010 0001 67 0003 612e2a",
            "0000 02 03 6162 0000000000000002 0000000000000009 00",
        ),
        (
            ModernGroupRecord(ConsumerGroupRecordType.TARGET_ASSIGNMENT_MEMBER, "g", "m", None),
            "0007 0001 67 0001 6d",
            None,
        ),
    ],
)
def test_bytes_are_those_that_kafka_writes(record: ModernGroupRecord, key: str, value: str | None) -> None:
    expected = bytes.fromhex(key), None if value is None else bytes.fromhex(value)
    assert CONSUMER_GROUP_CODEC.encode(record) == expected
    assert CONSUMER_GROUP_CODEC.decode(*expected) == record


@given(
    st.dictionaries(st.uuids(), st.frozensets(st.integers(0, 1 << 20), min_size=1), max_size=4),
    st.dictionaries(st.uuids(), st.frozensets(st.integers(0, 1 << 20), min_size=1), max_size=4),
    st.sampled_from(MemberState),
)
def test_assignments_round_trip(
    assigned: dict[UUID, frozenset[int]], revoking: dict[UUID, frozenset[int]], phase: MemberState
) -> None:
    # What it had before it has had for longer.
    current = (
        ConsumerCurrentAssignment(1)
        .moved(1, MemberState.STABLE, assigned)
        .moved(2, phase, assigned, revoking)
    )
    record = ModernGroupRecord(ConsumerGroupRecordType.CURRENT_MEMBER_ASSIGNMENT, "g", "m", current)
    assert CONSUMER_GROUP_CODEC.decode(*CONSUMER_GROUP_CODEC.encode(record)) == record


def test_a_record_without_epochs_counts_from_the_epoch_of_its_member() -> None:
    """As Kafka wrote them before 4.3."""
    value = bytes.fromhex(f"0000 00000004 00000003 00 02 {ID} 02 00000001 00 01 00")
    record = CONSUMER_GROUP_CODEC.decode(bytes.fromhex("0008 0001 67 0001 6d"), value)
    assert record.value.since == {TOPIC: {1: 4}}


def test_a_value_of_an_unknown_version_is_not_guessed_at() -> None:
    key, _ = CONSUMER_GROUP_CODEC.encode(
        ModernGroupRecord(
            ConsumerGroupRecordType.TARGET_ASSIGNMENT_METADATA, "g", "", TargetAssignmentEpoch(1)
        )
    )
    with pytest.raises(UnknownVersion, match="9"):
        CONSUMER_GROUP_CODEC.decode(key, b"\x00\x09\x00")
