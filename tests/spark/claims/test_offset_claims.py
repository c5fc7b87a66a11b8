"""The part of a plan that was not claimed before, and the offsets that may have been lost."""

from uuid import UUID

from penstock.client.wire.offsets import CommittedOffset
from penstock.spark.at_most_once.offset_claims import (
    OffsetClaim,
    claimed_offsets,
    find_in_doubt,
    parse_claim,
    split_at_claims,
)
from penstock.spark.at_most_once.task_claims import count_covered
from penstock.spark.offsets import GROUP_METADATA, OffsetRange, Position

OLD, NEW = UUID(int=1), UUID(int=2)


def span(start: int, end: int, partition: int = 0, topic_id: UUID | None = OLD) -> OffsetRange:
    return OffsetRange("t", topic_id, partition, start, end)


def claimed(offset: int, topic_id: UUID | None = OLD) -> dict:
    return {("t", 0): OffsetClaim(offset, topic_id)}


def test_claimed_offsets_are_removed():
    assert split_at_claims([span(5, 10)], {}) == ([span(5, 10)], [])
    assert split_at_claims([span(5, 10)], claimed(5)) == ([span(5, 10)], [])
    assert split_at_claims([span(5, 10)], claimed(7)) == ([span(7, 10)], [span(5, 7)])
    assert split_at_claims([span(5, 10)], claimed(10)) == ([], [span(5, 10)])
    assert split_at_claims([span(5, 10)], claimed(99)) == ([], [span(5, 10)])
    assert split_at_claims([span(0, 3), span(0, 3, partition=1)], claimed(3)) == (
        [span(0, 3, partition=1)],
        [span(0, 3)],
    )


def test_a_recreated_topic_starts_over():
    assert split_at_claims([span(0, 10, topic_id=NEW)], claimed(7)) == ([span(0, 10, topic_id=NEW)], [])
    assert split_at_claims([span(0, 10, topic_id=None)], claimed(7))[0] == [span(7, 10, topic_id=None)]
    assert split_at_claims([span(0, 10)], claimed(7, None))[0] == [span(7, 10)]


def test_a_claim_survives_a_round_trip():
    committed = claimed_offsets([span(4, 6), span(2, 4), span(0, 9, partition=1)], base=77)
    assert {tp: parse_claim(each) for tp, each in committed.items()} == {
        ("t", 0): OffsetClaim(6, OLD, since=2, base=77),
        ("t", 1): OffsetClaim(9, OLD, since=0, base=77),
    }
    assert all(each.metadata.startswith(GROUP_METADATA) for each in committed.values())


def test_committed_offsets_of_other_clients_count_as_claims():
    for metadata in ("", GROUP_METADATA, f"{GROUP_METADATA} 7", f"{GROUP_METADATA}-x", "{", '{"topic": "x"}'):
        assert parse_claim(CommittedOffset(offset=5, metadata=metadata)) == OffsetClaim(5)


def test_only_the_last_batch_is_in_doubt():
    start = Position.of(dict.fromkeys([("t", 0), ("t", 1), ("t", 2)], 0), {"t": OLD})
    claims = {
        ("t", 0): OffsetClaim(10, OLD, since=6, base=40),
        ("t", 1): OffsetClaim(20, OLD, since=15, base=30),  # finished when the other one was claimed
        ("t", 2): OffsetClaim(30, NEW, since=25, base=40),  # of another topic
    }
    assert find_in_doubt(start, claims) == [span(6, 10)]
    later = Position.of({("t", 0): 8, ("t", 1): 0, ("t", 2): 0}, {"t": OLD})
    assert find_in_doubt(later, claims) == [span(8, 10)]
    assert find_in_doubt(start, {("t", 0): OffsetClaim(10)}) == []
    assert find_in_doubt(start, {}) == []


def test_offsets_in_several_ranges_count_once():
    assert count_covered([]) == 0
    assert count_covered([span(0, 5), span(3, 8), span(3, 4), span(10, 11)]) == 9
    assert count_covered([span(0, 5), span(0, 5, partition=1), span(0, 5, topic_id=NEW)]) == 15
