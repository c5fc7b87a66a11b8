"""Reads dead letters and their resolutions up to the last stable offset, and summarises them in one pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from penstock.client.deadletters.dead_letter import (
    DeadLetter,
    DeadLetterFilter,
    DeadLetterId,
    Resolution,
    ResolutionState,
    parse_resolution,
)
from penstock.client.deadletters.headers import replayed_topic
from penstock.client.errors import CorruptRecords, OutOfRange, Refused, Unavailable, UnsupportedVersion
from penstock.client.retry import Deadline
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.fetch import FetchResult, PartitionReader, checked_batches, visible_batches
from penstock.client.wire.metadata import IsolationLevel, TopicInfo, TopicPartition
from penstock.client.wire.offsets import EARLIEST, LATEST, list_offsets
from penstock.client.wire.topics import topic_settings
from penstock.protocol.errors import ApiError
from penstock.protocol.record_batch import Record, decode_records

_RECORDS_BYTES_MAX: Final = 256 << 20
_WAIT_MS: Final = 500
#: To read a single record; brokers still return the first batch whole.
_ONE_RECORD_BYTES: Final = 64 << 10

Resolutions = dict[DeadLetterId, Resolution]


class OffsetRange(NamedTuple):
    """Offsets of a partition, from `start` to before `end`."""

    partition: int
    start: int
    end: int


def offset_ranges(cluster: Cluster, topic: TopicInfo) -> list[OffsetRange]:
    """Returns the offsets of each partition up to its last stable offset. Raises Unavailable, Refused."""
    topic_partitions = _topic_partitions(topic)
    ends = _list_offsets(cluster, topic_partitions, LATEST, IsolationLevel.READ_COMMITTED)
    return _ranges_up_to(cluster, ends)


def settled_offset_ranges(cluster: Cluster, topic: TopicInfo) -> list[OffsetRange]:
    """Waits for open transactions, then returns the offsets of each partition. Raises Unavailable, Refused."""
    return _ranges_up_to(cluster, wait_for_open_transactions(cluster, _topic_partitions(topic)))


def wait_for_open_transactions(
    cluster: Cluster, topic_partitions: list[TopicPartition]
) -> dict[TopicPartition, int]:
    """Waits until all transactions before the current ends have ended; returns these ends. Raises Unavailable."""
    ends = _list_offsets(cluster, topic_partitions, LATEST)
    deadline = Deadline(cluster.settings.retry_deadline_ms)
    for _ in cluster.attempts(deadline):
        stable = _list_offsets(cluster, topic_partitions, LATEST, IsolationLevel.READ_COMMITTED)
        if all(stable[topic_partition] >= end for topic_partition, end in ends.items()):
            return ends
    raise Unavailable(
        f"transactions in {topic_partitions[0][0]} did not end within {deadline.timeout_ms / 1000:g} s"
    )


def _topic_partitions(topic: TopicInfo) -> list[TopicPartition]:
    return [(topic.name, each.index) for each in topic.partitions]


def _ranges_up_to(cluster: Cluster, ends: dict[TopicPartition, int]) -> list[OffsetRange]:
    starts = _list_offsets(cluster, list(ends), EARLIEST)
    return [
        OffsetRange(topic_partition[1], starts[topic_partition], end) for topic_partition, end in ends.items()
    ]


def _list_offsets(
    cluster: Cluster,
    topic_partitions: list[TopicPartition],
    which: int,
    isolation: IsolationLevel = IsolationLevel.READ_UNCOMMITTED,
) -> dict[TopicPartition, int]:
    found = list_offsets(cluster, dict.fromkeys(topic_partitions, which), isolation=isolation)
    return {topic_partition: 0 if at is None else at.offset for topic_partition, at in found.items()}


# Records


def read_records(
    cluster: Cluster, topic: TopicInfo, span: OffsetRange, *, bytes_max: int | None = None
) -> Iterator[Record]:
    """Skips records that retention deletes meanwhile. Raises Unavailable, Refused, TopicChanged, CorruptRecords."""
    reader = PartitionReader(
        cluster,
        topic.name,
        topic.id,
        span.partition,
        isolation=IsolationLevel.READ_COMMITTED,
        bytes_max=bytes_max,
    )
    position, deadline = span.start, Deadline(cluster.settings.retry_deadline_ms)
    while position < span.end:
        try:
            found = reader.fetch(position, wait_ms=_WAIT_MS)
        except OutOfRange as error:
            if error.log_start <= position:
                raise
            position = error.log_start
            continue
        yield from _decode(reader, found, span)
        if found.next_offset > position:
            position, deadline = found.next_offset, Deadline(cluster.settings.retry_deadline_ms)
        elif deadline.is_over:
            raise Unavailable(f"{topic.name}[{span.partition}] cannot be read from offset {position} on")


def _decode(reader: PartitionReader, found: FetchResult, span: OffsetRange) -> Iterator[Record]:
    try:
        for view in visible_batches(checked_batches(found.data), found.aborted):
            if view.header.base_offset >= span.end:
                return
            for record in decode_records(view.data, _RECORDS_BYTES_MAX):
                if found.offset <= record.offset < span.end:
                    yield record
    except ApiError as flaw:
        raise CorruptRecords(f"{reader.topic}[{reader.partition}] from {found.offset} on: {flaw}") from None


def read_dead_letters(
    cluster: Cluster, topic: TopicInfo, wanted: Iterable[OffsetRange]
) -> Iterator[DeadLetter]:
    """Yields dead letters partition by partition. Raises as `read_records` does."""
    for span in wanted:
        for record in read_records(cluster, topic, span):
            yield DeadLetter(topic.name, span.partition, record)


def read_dead_letter(cluster: Cluster, topic: TopicInfo, dead_letter_id: DeadLetterId) -> DeadLetter | None:
    """Returns None if there is no record. Raises as `read_records` does."""
    for span in offset_ranges(cluster, topic):
        if span.partition == dead_letter_id.partition and span.start <= dead_letter_id.offset < span.end:
            wanted = OffsetRange(dead_letter_id.partition, dead_letter_id.offset, dead_letter_id.offset + 1)
            for record in read_records(cluster, topic, wanted, bytes_max=_ONE_RECORD_BYTES):
                return DeadLetter(topic.name, dead_letter_id.partition, record)
    return None


# Resolutions


def read_resolutions(
    cluster: Cluster, topic: TopicInfo, wanted: Iterable[OffsetRange], *, is_settled: bool
) -> Resolutions:
    """Returns the resolutions of dead letters in these ranges.

    `is_settled` waits for open transactions; the caller holds the replay lock. Raises as `read_records` does.
    """
    done = cluster.topics([replayed_topic(topic.name)]).get(replayed_topic(topic.name))
    if done is None:
        return {}
    bounds = {span.partition: range(span.start, span.end) for span in wanted}
    found: Resolutions = {}
    for span in settled_offset_ranges(cluster, done) if is_settled else offset_ranges(cluster, done):
        for record in read_records(cluster, done, span):
            entry = parse_resolution(record.key, record.value, topic.id)
            if entry is not None and entry[0].offset in bounds.get(entry[0].partition, ()):
                found[entry[0]] = entry[1]
    return found


@dataclass(slots=True, kw_only=True)
class DeadLetterSummary:
    """Counts of the selected dead letters of one topic."""

    topic: str
    waiting: int = 0
    done: Counter[ResolutionState] = field(default_factory=Counter)
    oldest_ms: int | None = None
    #: The topic's retention; None if it is unlimited or unknown.
    retention_ms: int | None = None
    newest_ms: int | None = None
    groups: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)

    def oldest_left_ms(self, now_ms: int) -> int | None:
        """The time until retention deletes the oldest unresolved dead letter; None if it never does."""
        if self.oldest_ms is None or self.retention_ms is None:
            return None
        return max(self.oldest_ms + self.retention_ms - now_ms, 0)

    @property
    def total(self) -> int:
        return self.waiting + self.done.total()

    def add(self, letter: DeadLetter, resolution: Resolution | None) -> None:
        if resolution is not None:
            self.done[resolution.state] += 1
            return
        self.waiting += 1
        timestamp_ms = letter.timestamp_ms
        self.oldest_ms = timestamp_ms if self.oldest_ms is None else min(self.oldest_ms, timestamp_ms)
        self.newest_ms = timestamp_ms if self.newest_ms is None else max(self.newest_ms, timestamp_ms)
        self.groups[letter.group or ""] += 1
        self.errors[failure_cause(letter)] += 1


def failure_cause(letter: DeadLetter) -> str:
    """Returns the error class; dead letters that brokers write may have only a reason."""
    return letter.failure.error_class or letter.failure.reason


def _retention_ms(cluster: Cluster, topic: str) -> int | None:
    try:
        entry = topic_settings(cluster, topic).get("retention.ms")
    except (Refused, UnsupportedVersion):
        return None  # the user may not have the right to describe configs
    return None if entry is None or int(entry) < 0 else int(entry)


def summarise(cluster: Cluster, topic: TopicInfo, wanted: DeadLetterFilter) -> DeadLetterSummary:
    """Raises Unavailable, Refused, TopicChanged, CorruptRecords."""
    there = offset_ranges(cluster, topic)
    done = read_resolutions(cluster, topic, there, is_settled=False)
    found = DeadLetterSummary(topic=topic.name, retention_ms=_retention_ms(cluster, topic.name))
    for letter in read_dead_letters(cluster, topic, there):
        if wanted.matches(letter):
            found.add(letter, done.get(letter.dead_letter_id))
    return found
