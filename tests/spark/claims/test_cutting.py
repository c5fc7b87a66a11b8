"""What is left of a plan when some of it was claimed before, and what may have been lost by that."""

from uuid import UUID

from penstock.client.positions import CommittedOffset
from penstock.spark.claims import Claim, claim_of, cut, in_doubt, positions
from penstock.spark.offsets import OffsetRange, Position
from penstock.spark.progress import METADATA
from penstock.spark.tickets import covered

OLD, NEW = UUID(int=1), UUID(int=2)


def span(start: int, end: int, partition: int = 0, topic_id: UUID | None = OLD) -> OffsetRange:
    return OffsetRange("t", topic_id, partition, start, end)


def claimed(offset: int, topic_id: UUID | None = OLD) -> dict:
    return {("t", 0): Claim(offset, topic_id)}


def test_what_lies_below_the_claim_is_cut_away():
    assert cut([span(5, 10)], {}) == ([span(5, 10)], [])
    assert cut([span(5, 10)], claimed(5)) == ([span(5, 10)], [])
    assert cut([span(5, 10)], claimed(7)) == ([span(7, 10)], [span(5, 7)])
    assert cut([span(5, 10)], claimed(10)) == ([], [span(5, 10)])
    assert cut([span(5, 10)], claimed(99)) == ([], [span(5, 10)])
    assert cut([span(0, 3), span(0, 3, partition=1)], claimed(3)) == (
        [span(0, 3, partition=1)],
        [span(0, 3)],
    )


def test_a_topic_that_was_created_anew_begins_anew():
    assert cut([span(0, 10, topic_id=NEW)], claimed(7)) == ([span(0, 10, topic_id=NEW)], [])
    assert cut([span(0, 10, topic_id=None)], claimed(7))[0] == [span(7, 10, topic_id=None)]
    assert cut([span(0, 10)], claimed(7, None))[0] == [span(7, 10)]


def test_a_claim_is_read_as_it_was_written():
    told = positions([span(4, 6), span(2, 4), span(0, 9, partition=1)], base=77)
    assert {place: claim_of(each) for place, each in told.items()} == {
        ("t", 0): Claim(6, OLD, since=2, base=77),
        ("t", 1): Claim(9, OLD, since=0, base=77),
    }
    assert all(each.metadata.startswith(METADATA) for each in told.values())


def test_positions_of_others_count_as_claims():
    for metadata in ("", METADATA, f"{METADATA} 7", f"{METADATA}-x", "{", '{"topic": "x"}'):
        assert claim_of(CommittedOffset(offset=5, metadata=metadata)) == Claim(5)


def test_only_the_last_batch_of_all_is_in_doubt():
    start = Position.of(dict.fromkeys([("t", 0), ("t", 1), ("t", 2)], 0), {"t": OLD})
    claims = {
        ("t", 0): Claim(10, OLD, since=6, base=40),
        ("t", 1): Claim(20, OLD, since=15, base=30),  # over when the other one was claimed
        ("t", 2): Claim(30, NEW, since=25, base=40),  # of another topic
    }
    assert in_doubt(start, claims) == [span(6, 10)]
    later = Position.of({("t", 0): 8, ("t", 1): 0, ("t", 2): 0}, {"t": OLD})
    assert in_doubt(later, claims) == [span(8, 10)]
    assert in_doubt(start, {("t", 0): Claim(10)}) == []
    assert in_doubt(start, {}) == []


def test_what_is_told_of_twice_counts_once():
    assert covered([]) == 0
    assert covered([span(0, 5), span(3, 8), span(3, 4), span(10, 11)]) == 9
    assert covered([span(0, 5), span(0, 5, partition=1), span(0, 5, topic_id=NEW)]) == 15
