"""Letters and the list of those that are done with, read as far as they are committed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from penstock.client.batches import batches, visible
from penstock.client.cluster import Cluster
from penstock.client.deadletters.letter import Letter, Spot
from penstock.client.deadletters.marks import Mark, read_mark
from penstock.client.errors import CorruptRecords, OutOfRange, Unavailable
from penstock.client.fetching import Fetched, PartitionReader
from penstock.client.letters import replayed_topic
from penstock.client.metadata import Isolation, Place, TopicInfo
from penstock.client.positions import EARLIEST, LATEST, list_offsets
from penstock.client.retrying import Deadline
from penstock.protocol.errors import ApiError
from penstock.protocol.records import Record, decode_records

_RECORDS_BYTES_MAX: Final = 256 << 20
_WAIT_MS: Final = 500
#: For who wants one record and no more; a batch comes whole, however large it is.
_LITTLE_BYTES: Final = 64 << 10

Marks = dict[Spot, Mark]


class Span(NamedTuple):
    """Of a partition, from `start` up to and without `end`."""

    partition: int
    start: int
    end: int


def spans(cluster: Cluster, topic: TopicInfo) -> list[Span]:
    """What is there at this moment, up to the first transaction that is open. Raises Unavailable, Refused."""
    places = _places(topic)
    ends = _offsets(cluster, places, LATEST, Isolation.READ_COMMITTED)
    return _spans(cluster, ends)


def settled_spans(cluster: Cluster, topic: TopicInfo) -> list[Span]:
    """The same, once nothing of it is undecided. Raises Unavailable, Refused."""
    return _spans(cluster, await_rest(cluster, _places(topic)))


def await_rest(cluster: Cluster, places: list[Place]) -> dict[Place, int]:
    """The ends of these partitions, once nothing before them is undecided. Raises Unavailable."""
    ends = _offsets(cluster, places, LATEST)
    deadline = Deadline(cluster.settings.retry_deadline_ms)
    for _ in cluster.attempts(deadline):
        stable = _offsets(cluster, places, LATEST, Isolation.READ_COMMITTED)
        if all(stable[place] >= end for place, end in ends.items()):
            return ends
    raise Unavailable(f"transactions in {places[0][0]} did not end within {deadline.timeout_ms / 1000:g} s")


def _places(topic: TopicInfo) -> list[Place]:
    return [(topic.name, each.index) for each in topic.partitions]


def _spans(cluster: Cluster, ends: dict[Place, int]) -> list[Span]:
    starts = _offsets(cluster, list(ends), EARLIEST)
    return [Span(place[1], starts[place], end) for place, end in ends.items()]


def _offsets(
    cluster: Cluster, places: list[Place], which: int, isolation: Isolation = Isolation.READ_UNCOMMITTED
) -> dict[Place, int]:
    found = list_offsets(cluster, dict.fromkeys(places, which), isolation=isolation)
    return {place: 0 if at is None else at.offset for place, at in found.items()}


# Records


def records(
    cluster: Cluster, topic: TopicInfo, span: Span, *, bytes_max: int | None = None
) -> Iterator[Record]:
    """Less what retention deletes meanwhile. Raises Unavailable, Refused, TopicChanged, CorruptRecords."""
    reader = PartitionReader(
        cluster,
        topic.name,
        topic.id,
        span.partition,
        isolation=Isolation.READ_COMMITTED,
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
        yield from _decoded(reader, found, span)
        if found.next_offset > position:
            position, deadline = found.next_offset, Deadline(cluster.settings.retry_deadline_ms)
        elif deadline.is_over:
            raise Unavailable(f"{topic.name}[{span.partition}] cannot be read from offset {position} on")


def _decoded(reader: PartitionReader, found: Fetched, span: Span) -> Iterator[Record]:
    try:
        for view in visible(batches(found.data), found.aborted):
            if view.header.base_offset >= span.end:
                return
            for record in decode_records(view.data, _RECORDS_BYTES_MAX):
                if found.offset <= record.offset < span.end:
                    yield record
    except ApiError as flaw:
        raise CorruptRecords(f"{reader.topic}[{reader.partition}] from {found.offset} on: {flaw}") from None


def letters(cluster: Cluster, topic: TopicInfo, wanted: Iterable[Span]) -> Iterator[Letter]:
    """In the order of each partition. Raises as `records` does."""
    for span in wanted:
        for record in records(cluster, topic, span):
            yield Letter(topic.name, span.partition, record)


def letter_at(cluster: Cluster, topic: TopicInfo, spot: Spot) -> Letter | None:
    """None where there is none. Raises as `records` does."""
    for span in spans(cluster, topic):
        if span.partition == spot.partition and span.start <= spot.offset < span.end:
            wanted = Span(spot.partition, spot.offset, spot.offset + 1)
            for record in records(cluster, topic, wanted, bytes_max=_LITTLE_BYTES):
                return Letter(topic.name, spot.partition, record)
    return None


# The list


def read_marks(cluster: Cluster, topic: TopicInfo, wanted: Iterable[Span], *, is_settled: bool) -> Marks:
    """Of letters within these spans. `is_settled` waits for those that are being written, for who has the turn.

    Raises as `records` does.
    """
    done = cluster.topics([replayed_topic(topic.name)]).get(replayed_topic(topic.name))
    if done is None:
        return {}
    bounds = {span.partition: range(span.start, span.end) for span in wanted}
    found: Marks = {}
    for span in settled_spans(cluster, done) if is_settled else spans(cluster, done):
        for record in records(cluster, done, span):
            told = read_mark(record.key, record.value, topic.id)
            if told is not None and told[0].offset in bounds.get(told[0].partition, ()):
                found[told[0]] = told[1]
    return found
