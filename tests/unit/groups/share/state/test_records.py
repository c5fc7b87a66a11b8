"""The bytes of share state are Kafka's own: these were written by Apache Kafka 4.3.1."""

from uuid import UUID

import pytest

from penstock.groups.share.state import share_state_records
from penstock.groups.share.state.share_state import SharePartitionKey
from penstock.groups.share.state.share_state_records import (
    DeadLetterPlan,
    DeadLetterProducer,
    DeadLetterSnapshot,
    DeadLetterTarget,
    SettledPlan,
    ShareSnapshot,
    ShareUpdate,
)
from penstock.groups.topics import coordinator_partition
from penstock.protocol.stored_records import UnknownVersion

TOPIC = UUID(bytes=bytes(range(1, 17)))
SNAPSHOT_KEY = "000000076772c3bc7070650102030405060708090a0b0c0d0e0f1000000003"
SNAPSHOT_VALUE = (
    "0000000000010000000200000003000000000000000400000000000000060000000000000007"
    "03000000000000000500000000000000070200010000000000000000"
    "08000000e8d4a5100004012c0001000400000005"
)
UPDATE_KEY = "00010001670102030405060708090a0b0c0d0e0f1000000003"
UPDATE_VALUE = "00000000000100000003ffffffffffffffff02000000000000000500000000000000070000010000"

SNAPSHOT = ShareSnapshot(1, 2, 3, 4, 6, 7, 5, [(5, 7, 2, 1), (8, 10**12, 4, 300)])
UPDATE = ShareUpdate(1, 3, -1, -1, [(5, 7, 0, 1)])


def test_what_kafka_writes_is_written() -> None:
    assert (
        share_state_records.encode_key(
            share_state_records.SHARE_SNAPSHOT, SharePartitionKey("grüppe", TOPIC, 3)
        ).hex()
        == SNAPSHOT_KEY
    )
    assert share_state_records.encode_snapshot(SNAPSHOT).hex() == SNAPSHOT_VALUE
    assert (
        share_state_records.encode_key(
            share_state_records.SHARE_UPDATE, SharePartitionKey("g", TOPIC, 3)
        ).hex()
        == UPDATE_KEY
    )
    assert share_state_records.encode_update(UPDATE).hex() == UPDATE_VALUE


def test_what_kafka_writes_is_read() -> None:
    assert share_state_records.decode_key(bytes.fromhex(SNAPSHOT_KEY)) == SharePartitionKey(
        "grüppe", TOPIC, 3
    )
    assert share_state_records.decode_snapshot(bytes.fromhex(SNAPSHOT_VALUE)) == SNAPSHOT
    assert share_state_records.decode_update(bytes.fromhex(UPDATE_VALUE)) == UPDATE


def test_fields_of_later_versions_are_passed_over() -> None:
    value = bytes.fromhex(UPDATE_VALUE)
    in_batch = value[:-2] + bytes.fromhex("01 05 02 abcd") + value[-1:]
    assert share_state_records.decode_update(in_batch) == UPDATE
    behind = value[:-1] + bytes.fromhex("02 00 04 00000009 07 01 ff")
    assert share_state_records.decode_update(behind) == UPDATE._replace(delivery_complete_count=9)
    with pytest.raises(UnknownVersion):
        share_state_records.decode_update(b"\x00\x01" + value[2:])


def test_a_share_partition_lives_where_kafka_puts_it() -> None:
    assert coordinator_partition("grüppe:AQIDBAUGBwgJCgsMDQ4PEA:3", 50) == 46


def test_records_of_dead_letters_are_read_as_they_were_written() -> None:
    target = DeadLetterTarget(TOPIC, 2)
    plan = DeadLetterPlan(9, 1, 77, "jobs.dlq", target, ((1, 5), (8, 8)), ((1, 2), (4, 5), (8, 8)))
    assert share_state_records.decode_plan(share_state_records.encode_plan(plan)) == plan
    for settled in (SettledPlan(True, 0, ((1, 5),)), SettledPlan(False, 3, ())):
        assert share_state_records.decode_settled(share_state_records.encode_settled(settled)) == settled
    for dead_letters in (
        DeadLetterSnapshot(5, 6, DeadLetterProducer(9, 1, 80, target)),
        DeadLetterSnapshot(0, 0, None),
    ):
        assert (
            share_state_records.decode_dead_letter_snapshot(
                share_state_records.encode_dead_letter_snapshot(dead_letters)
            )
            == dead_letters
        )
    entries = [(1, 5, 32, 5), (8, 8, 33, 1)]
    assert share_state_records.decode_pending(share_state_records.encode_pending(entries)) == entries
