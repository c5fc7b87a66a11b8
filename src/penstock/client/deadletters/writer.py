"""Writes dead letters' records and their resolutions in one transaction: both are written, or neither.

A route says to which topic a dead letter is replayed, and for which group. A record that cannot go to its original
partition goes to the partition of its key by murmur2, as with Java's producer. The replay lock lets one writer at a
time write to `<topic>.replayed`, on Spark or without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum
from itertools import chain
from typing import Final, NamedTuple, Protocol

from penstock.client.deadletters import dead_letter
from penstock.client.deadletters.dead_letter import DeadLetter, Resolution
from penstock.client.deadletters.headers import Header, Origin, failure_headers, replayed_topic, retry_topic
from penstock.client.errors import ClientError, Fenced, RecordsRefused
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.in_flight import SentBatch
from penstock.client.wire.metadata import TopicInfo, TopicPartition
from penstock.client.wire.producer import RawProducer
from penstock.protocol.compression import Codec
from penstock.protocol.dead_letter_headers import HANDLER_HEADER
from penstock.protocol.record_batch import Record, encode_batch

_MASK: Final = 0xFFFFFFFF
_MULTIPLIER: Final = 0x5BD1E995
_SEED: Final = 0x9747B28C


def partition_for_key(key: bytes, count: int) -> int:
    assert count > 0
    return (murmur2(key) & 0x7FFFFFFF) % count


def murmur2(data: bytes) -> int:
    """Returns an unsigned 32-bit hash."""
    state, whole = (_SEED ^ len(data)) & _MASK, len(data) & ~3
    for at in range(0, whole, 4):
        word = int.from_bytes(data[at : at + 4], "little") * _MULTIPLIER & _MASK
        word = (word ^ word >> 24) * _MULTIPLIER & _MASK
        state = (state * _MULTIPLIER & _MASK) ^ word
    if whole < len(data):
        state = (state ^ int.from_bytes(data[whole:], "little")) * _MULTIPLIER & _MASK
    state = (state ^ state >> 13) * _MULTIPLIER & _MASK
    return state ^ state >> 15


#: The first retry topic of a group.
_FIRST_RETRY_LEVEL: Final = 1
_REPLAYED_REASON: Final = "replayed"


class ReplayTarget(Enum):
    #: The original topic, for all groups that read it.
    ORIGINAL = "original"
    #: The retry topic of the group whose attempts failed, for this group only.
    GROUP = "group"
    #: One topic for all dead letters.
    TOPIC = "topic"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayDestination:
    target: ReplayTarget = ReplayTarget.ORIGINAL
    topic: str | None = None
    #: Records keep their original timestamps. In retry topics the timestamp is when they are due, so it is now.
    keeps_times: bool = False

    def __str__(self) -> str:
        return self.topic if self.topic is not None else self.target.value


class NotReplayable(Enum):
    """Why dead letters cannot be replayed, as the end of a sentence about them."""

    BARE = "do not contain the original record"
    STRAY = "do not name their original topic"
    UNCLAIMED = "do not name their group"


class ReplayRoute(NamedTuple):
    topic: str
    #: The group that gets the record; None for all groups.
    group: str | None = None


class OutgoingRecord(NamedTuple):
    topic: str
    partition: int
    record: Record


def replay_route(letter: DeadLetter, destination: ReplayDestination) -> ReplayRoute | NotReplayable:
    if not letter.has_record:
        return NotReplayable.BARE
    if destination.topic is not None:
        return ReplayRoute(destination.topic)
    origin = letter.origin
    if origin is None:
        return NotReplayable.STRAY
    if destination.target is ReplayTarget.ORIGINAL:
        return ReplayRoute(origin.topic)
    if letter.group is None:
        return NotReplayable.UNCLAIMED
    return ReplayRoute(retry_topic(origin.topic, _FIRST_RETRY_LEVEL), letter.group)


def outgoing_record(
    letter: DeadLetter, route: ReplayRoute, destination: ReplayDestination, *, partitions: int, now_ms: int
) -> OutgoingRecord:
    """Returns the original record; for a retry topic, with failure headers for the group."""
    record, origin = letter.record, letter.origin
    if route.group is not None:
        assert origin is not None, f"{letter.dead_letter_id} has no origin"
        headers = _retry_headers(letter, origin, route.group)
        made = Record(0, now_ms, record.key, record.value, tuple(headers))
        return OutgoingRecord(route.topic, origin.partition % partitions, made)
    timestamp_ms = now_ms
    if destination.keeps_times:
        timestamp_ms = record.timestamp if origin is None else origin.timestamp_ms
    made = Record(0, timestamp_ms, record.key, record.value, tuple(letter.own_headers))
    is_original = destination.topic is None
    return OutgoingRecord(
        route.topic, _target_partition(letter, origin if is_original else None, partitions), made
    )


def _retry_headers(letter: DeadLetter, origin: Origin, group: str) -> list[Header]:
    """Resets the attempts; keeps the last failure until the record fails again."""
    failure = replace(letter.failure, reason=_REPLAYED_REASON)
    headers = failure_headers(letter.record.headers, origin, failure, group=group, attempts=0)
    if letter.handler is not None:
        headers.append((HANDLER_HEADER, letter.handler.encode()))
    return headers


def _target_partition(letter: DeadLetter, origin: Origin | None, count: int) -> int:
    """Returns the original partition if it exists, else the partition of the key.

    Records without a key are spread by the partition of the dead letter.
    """
    if origin is not None and origin.partition < count:
        return origin.partition
    key = letter.record.key
    return letter.partition % count if key is None else partition_for_key(key, count)


#: Two writers that start at the same moment may fence each other.
_LOCK_ATTEMPTS_MAX: Final = 5
#: Short, because the writer sends a transaction at once and never waits within it.
_TRANSACTION_TIMEOUT_MS: Final = 60_000


class ReplayFenced(ClientError):
    """Another writer has taken the replay lock. No dead letter is lost or published twice; run the command again."""


class ReplayLock(Protocol):
    @property
    def name(self) -> str:
        """The transactional id of the writer."""

    def take(self) -> None:
        """Takes the lock, and fences every earlier holder. Raises Unavailable, Refused, and errors of settling."""

    def check(self) -> None:
        """Raises ReplayFenced if another writer has taken the lock since."""


def replay_query_name(topic: str) -> str:
    """Returns the query name of replays on Spark for a dead-letter topic."""
    return f"letters-{topic}"


@contextmanager
def locked_producer(cluster: Cluster, lock: ReplayLock, topic: str) -> Iterator[RawProducer]:
    """Yields a producer that holds the replay lock. Raises ReplayFenced, Unavailable, Refused."""
    try:
        with _acquire_producer(cluster, lock) as producer:
            yield producer
    except Fenced:
        raise ReplayFenced(
            f"another process has started to replay, edit or purge dead letters of {topic}"
        ) from None


def _acquire_producer(cluster: Cluster, lock: ReplayLock) -> RawProducer:
    for attempt in range(_LOCK_ATTEMPTS_MAX):
        lock.take()
        producer = RawProducer(
            cluster, transactional_id=lock.name, transaction_timeout_ms=_TRANSACTION_TIMEOUT_MS
        )
        try:
            producer.init()
            lock.check()
            return producer
        except (ReplayFenced, Fenced):
            producer.close()
            if attempt == _LOCK_ATTEMPTS_MAX - 1:
                raise
        except BaseException:
            producer.close()
            raise
    raise AssertionError("unreachable")


#: Well below the default max.message.bytes of a topic.
_BATCH_BYTES_MAX: Final = 256 << 10
_RECORD_OVERHEAD_BYTES: Final = 40
#: The limits of one transaction.
ENTRIES_MAX: Final = 500
TRANSACTION_BYTES_MAX: Final = 8 << 20


class ResolutionEntry(NamedTuple):
    """A dead letter, its resolution, and the record to publish, if any."""

    letter: DeadLetter
    resolution: Resolution
    out: OutgoingRecord | None = None

    @property
    def size_bytes(self) -> int:
        return record_size_bytes(self.letter.record)


class RefusedEntry(NamedTuple):
    entry: ResolutionEntry
    reason: str


class DeadLetterWriter:
    """Writes records and resolutions with a producer that holds the replay lock."""

    def __init__(self, producer: RawProducer, letters: TopicInfo, done: TopicInfo) -> None:
        assert done.name == replayed_topic(letters.name)
        self._producer = producer
        self._topic_id = letters.id
        self._done = done

    def write(self, entries: Sequence[ResolutionEntry]) -> list[RefusedEntry]:
        """Writes all entries, and returns those that a topic refuses; these stay unresolved.

        Raises Fenced, Refused, Unavailable (the next holder of the lock then settles the transaction).
        """
        try:
            self.write_all(entries)
            return []
        except RecordsRefused as error:
            if len(entries) == 1:
                return [RefusedEntry(entries[0], str(error))]
        # A record is too large, or a topic requires keys: write each entry alone, so that the others succeed.
        return [refusal for entry in entries for refusal in self.write([entry])]

    def write_all(self, entries: Sequence[ResolutionEntry]) -> list[SentBatch]:
        """Writes all entries and returns the published batches. Also raises RecordsRefused, and then writes nothing."""
        try:
            sent = self._send(by_topic_partition(entry.out for entry in entries if entry.out is not None))
            self._send(by_topic_partition(self._resolution_record(entry) for entry in entries))
            self._producer.end(commit=True)
            return sent
        except RecordsRefused:
            self._producer.end(commit=False)
            raise
        except ClientError:
            # Abort, so that readers need not wait for the timeout. The next holder of the lock settles it anyway.
            with suppress(ClientError):
                self._producer.end(commit=False)
            raise

    def _resolution_record(self, entry: ResolutionEntry) -> OutgoingRecord:
        key = dead_letter.resolution_key(entry.letter.dead_letter_id)
        at_ms = entry.resolution.at_ms or 0
        record = Record(
            0, at_ms, key=key, value=dead_letter.resolution_value(entry.resolution, self._topic_id)
        )
        return OutgoingRecord(self._done.name, partition_for_key(key, len(self._done.partitions)), record)

    def _send(self, wanted: dict[TopicPartition, list[Record]]) -> list[SentBatch]:
        cut = (
            (topic_partition, batch)
            for topic_partition, found in wanted.items()
            for batch in split_batches(found)
        )
        sent = [self._producer.send(*topic_partition, _encode(batch)) for topic_partition, batch in cut]
        self._producer.flush()
        return sent


def transaction_chunks(
    entries: Iterable[ResolutionEntry], entries_max: int
) -> Iterator[list[ResolutionEntry]]:
    """Yields the entries of each transaction, in order."""
    assert entries_max > 0
    chunk: list[ResolutionEntry] = []
    size_bytes = 0
    for entry in entries:
        if chunk and (len(chunk) >= entries_max or size_bytes + entry.size_bytes > TRANSACTION_BYTES_MAX):
            yield chunk
            chunk, size_bytes = [], 0
        chunk.append(entry)
        size_bytes += entry.size_bytes
    if chunk:
        yield chunk


def record_size_bytes(record: Record) -> int:
    """Returns the approximate size of the record in a batch."""
    parts = chain((record.key, record.value), *((name, value) for name, value in record.headers))
    return _RECORD_OVERHEAD_BYTES + sum(len(part) for part in parts if part is not None)


def by_topic_partition(wanted: Iterable[OutgoingRecord]) -> dict[TopicPartition, list[Record]]:
    found: dict[TopicPartition, list[Record]] = {}
    for each in wanted:
        found.setdefault((each.topic, each.partition), []).append(each.record)
    return found


def split_batches(records: Iterable[Record]) -> Iterator[list[Record]]:
    batch: list[Record] = []
    size_bytes = 0
    for record in records:
        if batch and size_bytes + record_size_bytes(record) > _BATCH_BYTES_MAX:
            yield batch
            batch, size_bytes = [], 0
        batch.append(record)
        size_bytes += record_size_bytes(record)
    if batch:
        yield batch


def _encode(batch: Sequence[Record]) -> bytearray:
    """Compresses a large batch, because its records may have been compressed before and be too large without."""
    is_large = sum(map(record_size_bytes, batch)) > _BATCH_BYTES_MAX
    numbered = [record._replace(offset=number) for number, record in enumerate(batch)]
    return encode_batch(numbered, codec=Codec.GZIP if is_large else Codec.NONE)
