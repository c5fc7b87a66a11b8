"""A task reads its range and nothing else."""

from uuid import uuid4

import pytest
from tests.compat.message import Message

from penstock.client.errors import Unavailable
from penstock.client.wire.fetch import FetchResult
from penstock.spark.offsets import OffsetRange
from penstock.spark.source.discovery import DataLoss
from penstock.spark.source.task import RangeReader

COLUMNS = ("offset", "value")


def read(topics, wanted: OffsetRange, **options: str) -> list[tuple[int, bytes]]:
    parsed = topics.options(subscribe=wanted.topic, **options)
    with topics.cluster() as cluster:
        batches = list(RangeReader(cluster, wanted, parsed).read(COLUMNS))
    return [(row["offset"], row["value"]) for batch in batches for row in batch.to_pylist()]


def topic_id(topics, topic: str):
    with topics.cluster() as cluster:
        return cluster.await_topic(topic).id


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_any_part_of_a_log(topics, unique, codec):
    topic = topics.create(unique("t"))
    topics.fill(topic, [Message(value=b"%d" % number) for number in range(100)], codec)
    wanted = topic_id(topics, topic)
    for start, end in [(0, 100), (17, 18), (33, 71), (99, 100)]:
        found = read(topics, OffsetRange(topic, wanted, 0, start, end))
        assert found == [(offset, b"%d" % offset) for offset in range(start, end)]


def test_a_range_that_takes_several_fetches(topics, unique):
    topic = topics.create(unique("t"))
    for lot in range(5):
        topics.fill(topic, [Message(value=b"%d" % (10 * lot + number)) for number in range(10)])
    wanted = OffsetRange(topic, topic_id(topics, topic), 0, 3, 47)
    found = read(topics, wanted, **{"kafka.max.partition.fetch.bytes": "1"})
    assert found == [(offset, b"%d" % offset) for offset in range(3, 47)]


def test_only_committed_records(topics, unique):
    topic = topics.create(unique("t"))
    topics.commit_abort_commit(topic, unique("x"))
    wanted = OffsetRange(topic, topic_id(topics, topic), 0, 0, 6)
    assert read(topics, wanted) == [(0, b"0"), (4, b"2")], "the default is read_committed"
    everything = read(topics, wanted, **{"kafka.isolation.level": "read_uncommitted"})
    assert everything == [(0, b"0"), (2, b"1"), (4, b"2")]
    middle = wanted._replace(start=2, end=5)
    assert read(topics, middle) == [(4, b"2")]


def test_records_that_were_deleted_after_planning(topics, unique):
    topic = topics.create(unique("t"))
    topics.count(topic, range(10))
    wanted = OffsetRange(topic, topic_id(topics, topic), 0, 2, 10)
    topics.trim(topic, 6)
    with pytest.raises(DataLoss, match=rf"{topic}\[0\] offsets 2 to 5 \(the log goes from 6 to 10\)"):
        read(topics, wanted)
    assert read(topics, wanted, failOnDataLoss="false") == [(n, b"%d" % n) for n in range(6, 10)]
    earlier = wanted._replace(end=5)
    with pytest.raises(DataLoss, match="offsets 2 to 4 "):
        read(topics, earlier)
    assert read(topics, earlier, failOnDataLoss="false") == []


def test_a_recreated_topic_is_not_read(topics, unique):
    topic = topics.create(unique("t"))
    topics.count(topic, range(10))
    wanted = OffsetRange(topic, uuid4(), 0, 2, 10)
    with pytest.raises(DataLoss, match=rf"{topic}\[0\] offsets 2 to 9 "):
        read(topics, wanted)
    assert read(topics, wanted, failOnDataLoss="false") == []


class Answers:
    """A partition whose leader returns given results."""

    topic, partition = "t", 0

    def __init__(self, *high_watermarks: int) -> None:
        self.left = list(high_watermarks)

    def fetch(self, offset: int, *, wait_ms: int) -> FetchResult:
        end = self.left.pop(0) if len(self.left) > 1 else self.left[0]
        return FetchResult(
            offset=offset,
            data=memoryview(b""),
            high_watermark=end,
            last_stable_offset=end,
            log_start_offset=0,
        )


def reader_of(topics, answers: Answers) -> RangeReader:
    parsed = topics.options(subscribe="t")
    with topics.cluster() as cluster:
        reader = RangeReader(cluster, OffsetRange("t", None, 0, 0, 10), parsed)
    reader._reader = answers
    return reader


def test_a_range_without_records_ends(topics):
    answers = Answers(10, 10, 10)
    assert list(reader_of(topics, answers).read(COLUMNS)) == []
    assert len(answers.left) == 1, "one empty fetch is not enough"


class Patience:
    """A deadline that is over after it was checked a number of times."""

    def __init__(self, timeout_ms: float) -> None:
        self.timeout_ms, self.looks = timeout_ms, 0

    @property
    def is_over(self) -> bool:
        self.looks += 1
        return self.looks > 5


def test_a_leader_with_a_low_high_watermark_is_not_the_end_of_the_range(topics, monkeypatch):
    reader = reader_of(topics, Answers(4))
    monkeypatch.setattr("penstock.spark.source.task.Deadline", Patience)
    with pytest.raises(Unavailable, match=r"t\[0\]: offsets 0 to 9 .* leader is 4"):
        list(reader.read(COLUMNS))


def test_a_leader_whose_high_watermark_grows_is_asked_again(topics):
    answers = Answers(4, 4, 4, 10, 10, 10)
    assert list(reader_of(topics, answers).read(COLUMNS)) == []
    assert answers.left == [10]
