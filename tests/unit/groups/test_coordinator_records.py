"""Records of `__consumer_offsets` have Kafka's bytes, worked out by hand."""

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.groups.coordinator_records import (
    CommittedOffset,
    GroupMetadataRecord,
    OffsetCommitRecord,
    StoredGroup,
    StoredMember,
    decode_record,
    encode_group_metadata,
    encode_offset_commit,
)
from penstock.groups.group_config import GroupCoordinatorConfig
from penstock.groups.group_shard import GroupCoordinatorShard
from penstock.protocol.stored_records import UnknownVersion

OFFSET_KEY = bytes.fromhex("0001" "0002" "6731" "0003" "746f70" "00000005")  # fmt: skip
GROUP_KEY = bytes.fromhex("0002" "0002" "6731")  # fmt: skip


def offset_record(value: CommittedOffset | None) -> OffsetCommitRecord:
    return OffsetCommitRecord(group="g1", topic="top", partition=5, value=value)


def test_offset_commit_is_version_3() -> None:
    value = CommittedOffset(offset=258, leader_epoch=7, metadata="né", commit_timestamp_ms=1_000_000)
    expected = bytes.fromhex(
        "0003"  # version
        "0000000000000102"  # offset
        "00000007"  # leader epoch
        "0003" "6ec3a9"  # metadata
        "00000000000f4240"  # commit timestamp
    )  # fmt: skip
    assert encode_offset_commit(offset_record(value)) == (OFFSET_KEY, expected)
    assert decode_record(OFFSET_KEY, expected) == offset_record(value)


def test_offset_commit_with_its_own_expiry_is_version_1() -> None:
    value = CommittedOffset(offset=1, metadata="", commit_timestamp_ms=2, expire_timestamp_ms=3)
    expected = bytes.fromhex("0001" "0000000000000001" "0000" "0000000000000002" "0000000000000003")  # fmt: skip
    assert encode_offset_commit(offset_record(value)) == (OFFSET_KEY, expected)
    assert decode_record(OFFSET_KEY, expected) == offset_record(value)


@pytest.mark.parametrize(
    ("tags", "topic_id"),
    [
        ("00", None),
        ("010010000102030405060708090a0b0c0d0e0f", UUID("00010203-0405-0607-0809-0a0b0c0d0e0f")),
    ],
)
def test_offset_commit_of_newer_releases_is_read(tags: str, topic_id: UUID | None) -> None:
    data = bytes.fromhex("0004" "0000000000000001" "00000002" "02" "6d" "0000000000000003" + tags)  # fmt: skip
    value = CommittedOffset(offset=1, leader_epoch=2, metadata="m", commit_timestamp_ms=3, topic_id=topic_id)
    assert decode_record(OFFSET_KEY, data) == offset_record(value)
    assert topic_id is None or encode_offset_commit(offset_record(value)) == (OFFSET_KEY, data)


def test_tombstones_are_keys_without_a_value() -> None:
    assert encode_offset_commit(offset_record(None)) == (OFFSET_KEY, None)
    assert encode_group_metadata(GroupMetadataRecord(group="g1", value=None)) == (GROUP_KEY, None)
    assert decode_record(OFFSET_KEY, None) == offset_record(None)
    assert decode_record(GROUP_KEY, None) == GroupMetadataRecord(group="g1", value=None)


def test_group_metadata_is_version_3() -> None:
    member = StoredMember(
        member_id="m",
        instance_id="i",
        client_id="c",
        client_host="/h",
        rebalance_timeout_ms=300_000,
        session_timeout_ms=45_000,
        subscription=b"\x01\x02",
        assignment=b"\x03",
    )
    value = StoredGroup(
        protocol_type="consumer",
        generation=4,
        protocol="range",
        leader="m",
        state_timestamp_ms=5,
        members=(member,),
    )
    expected = bytes.fromhex(
        "0003"
        "0008" "636f6e73756d6572"  # protocol type
        "00000004"  # generation
        "0005" "72616e6765"  # protocol
        "0001" "6d"  # leader
        "0000000000000005"  # state timestamp
        "00000001"  # members
        "0001" "6d" "0001" "69" "0001" "63" "0002" "2f68"  # ids, client, host
        "000493e0" "0000afc8"  # rebalance and session timeout
        "00000002" "0102" "00000001" "03"  # subscription, assignment
    )  # fmt: skip
    assert encode_group_metadata(GroupMetadataRecord(group="g1", value=value)) == (GROUP_KEY, expected)
    assert decode_record(GROUP_KEY, expected) == GroupMetadataRecord(group="g1", value=value)


def test_an_empty_group_has_neither_protocol_nor_leader() -> None:
    value = StoredGroup(
        protocol_type="consumer", generation=9, protocol=None, leader=None, state_timestamp_ms=-1
    )
    expected = bytes.fromhex(
        "0003" "0008" "636f6e73756d6572" "00000009" "ffff" "ffff" "ffffffffffffffff" "00000000"
    )  # fmt: skip
    assert encode_group_metadata(GroupMetadataRecord(group="g1", value=value)) == (GROUP_KEY, expected)


def test_records_of_unknown_kinds_of_groups_are_passed_over() -> None:
    shard = GroupCoordinatorShard(GroupCoordinatorConfig())
    shard.replay(bytes.fromhex("0012" "0002" "6731"), b"\x00\x00\x00\x00\x00\x01")  # fmt: skip
    shard.replay(bytes.fromhex("0063" "0002" "6731" "0001" "6d"), None)  # fmt: skip
    assert shard.unknown_records == 2
    assert shard.stored() == ({}, {})


def test_a_value_of_an_unknown_version_is_not_guessed_at() -> None:
    with pytest.raises(UnknownVersion, match="9"):
        decode_record(OFFSET_KEY, b"\x00\x09")


@given(st.text(max_size=30), st.text(max_size=30), st.integers(0, 2**31 - 1), st.integers(-1, 2**63 - 1))
def test_offsets_round_trip(group: str, metadata: str, partition: int, offset: int) -> None:
    value = CommittedOffset(offset=offset, metadata=metadata, commit_timestamp_ms=1)
    record = OffsetCommitRecord(group=group, topic="t", partition=partition, value=value)
    assert decode_record(*encode_offset_commit(record)) == record
