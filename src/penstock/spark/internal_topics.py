"""The single-partition topics in which the Spark integration keeps its own state. They are created when needed.

`DocumentStore` is the compacted topic `penstock-pipelines`, which contains a JSON document for each key. Pipelines
write their status there, and other processes write requests to pipelines there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from penstock.client.errors import ClientError, OutOfRange, Refused, TopicChanged
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.fetch import BatchView, PartitionReader, checked_batches, visible_batches
from penstock.client.wire.metadata import IsolationLevel, TopicPartition
from penstock.client.wire.offsets import EARLIEST, LATEST, list_offsets
from penstock.client.wire.producer import RawProducer
from penstock.client.wire.topics import NewTopic, ensure_topic
from penstock.protocol.compression import Codec
from penstock.protocol.record_batch import Record, decode_records, encode_batch

#: Which transactions make up the batches of queries that write exactly once.
DECISIONS_TOPIC: Final = "penstock-sink-decisions"
#: Which offsets were handed out to the tasks of queries that read at most once.
CLAIMS_TOPIC: Final = "penstock-claims"
#: Which of those offsets may have been lost.
SKIPPED_TOPIC: Final = "penstock-claims-skipped"
#: The status of pipelines, and requests to them.
PIPELINES_TOPIC: Final = "penstock-pipelines"
#: A query that reads all topics skips these: each of its batches writes to them, so it would always have more to read.
INTERNAL_TOPICS: Final = frozenset({DECISIONS_TOPIC, CLAIMS_TOPIC, SKIPPED_TOPIC, PIPELINES_TOPIC})

_RECORD_BYTES_MAX: Final = 64 << 20
_WAIT_MS: Final = 500


def only_partition(topic: str) -> TopicPartition:
    """Return the only partition of an internal topic."""
    return topic, 0


def ensure_internal_topic(cluster: Cluster, topic: NewTopic) -> None:
    """Create the topic unless it exists. Raises Unavailable, Refused."""
    with suppress(Refused):
        cluster.topic(topic.name)
        return
    ensure_topic(cluster, topic)


# Writing


def encode_record(key: str, value: bytes | None) -> bytearray:
    """Encode a batch with one record. Without a value it is a tombstone."""
    record = Record(0, int(time.time() * 1000), key=key.encode(), value=value)
    return encode_batch([record], codec=Codec.GZIP)


def encode_document(content: dict[str, Any] | None, *, key: str) -> bytearray:
    """Encode a batch with one JSON document, or a tombstone."""
    return encode_record(
        key, None if content is None else json.dumps(content, separators=(",", ":")).encode()
    )


def append_document(cluster: Cluster, topic: str, content: dict[str, Any], *, key: str) -> None:
    """Append a document and wait for the acknowledgement. Raises Refused; Unavailable (it may be written then)."""
    with RawProducer(cluster) as producer:
        producer.init()
        producer.send(*only_partition(topic), encode_document(content, key=key))
        producer.flush()


# Reading


def end_offset(cluster: Cluster, topic: str) -> int:
    return _list_offset(cluster, topic, LATEST)


def beginning_offset(cluster: Cluster, topic: str) -> int:
    return _list_offset(cluster, topic, EARLIEST)


def _list_offset(cluster: Cluster, topic: str, edge: int) -> int:
    found = list_offsets(cluster, {only_partition(topic): edge})[only_partition(topic)]
    return 0 if found is None else found.offset


def batches_at(cluster: Cluster, topic: str, offset: int) -> Iterator[BatchView]:
    """Yield the batches of one fetch, starting with the batch that contains the offset. Raises OutOfRange."""
    found = PartitionReader(cluster, topic, None, 0).fetch(offset, wait_ms=_WAIT_MS)
    yield from checked_batches(found.data)


def read_batches(cluster: Cluster, topic: str, start: int) -> Iterator[BatchView]:
    """Yield all batches from `start` to the end, including those of open and aborted transactions.

    Raises OutOfRange, Unavailable, Refused.
    """
    reader, position = PartitionReader(cluster, topic, None, 0), start
    while True:
        found = reader.fetch(position, wait_ms=0)
        yield from checked_batches(found.data)
        if found.next_offset == position and position >= found.high_watermark:
            return
        position = found.next_offset


def decode_view(view: BatchView) -> Sequence[Record]:
    return () if view.header.is_control else decode_records(view.data, _RECORD_BYTES_MAX)


def read_documents(cluster: Cluster, topic: str, start: int, *, key: str) -> Iterator[dict[str, Any]]:
    """Yield all documents with this key, from an offset to the end. Raises the same errors as `read_batches`."""
    wanted = key.encode()
    for view in read_batches(cluster, topic, start):
        for record in decode_view(view):
            if record.key == wanted and record.value is not None:
                yield json.loads(record.value)


#: A new reader reads the topic from its beginning, so small segments and early compaction keep it short.
_STORE_TOPIC: Final = NewTopic(
    name=PIPELINES_TOPIC,
    partitions=1,
    settings={
        "cleanup.policy": "compact",
        "min.cleanable.dirty.ratio": "0.1",
        "segment.bytes": str(1 << 20),
        "segment.ms": str(3_600_000),
    },
)

Document = dict[str, Any]


class DocumentStore:
    """The documents as of the last read. Not thread-safe, because `cluster` is not."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._documents: dict[str, Document] = {}
        self._reader: PartitionReader | None = None
        self._position = 0
        self._producer: RawProducer | None = None

    def __repr__(self) -> str:
        return f"<DocumentStore with {len(self._documents)} documents up to offset {self._position}>"

    def read(self) -> Mapping[str, Document]:
        """Return all current documents, or none if the topic does not exist yet. Raises Unavailable, Refused."""
        for _ in range(2):
            try:
                self._read_new()
                break
            except (OutOfRange, TopicChanged):
                # The topic was recreated, or records at our position were deleted: read it from the beginning.
                self._documents, self._reader = {}, None
        return self._documents

    def write(self, key: str, document: Document | None) -> None:
        """Write a document under a key; None deletes it. Raises Unavailable, Refused."""
        try:
            producer = self._ready_producer()
            producer.send(*only_partition(PIPELINES_TOPIC), encode_document(document, key=key))
            producer.flush()
        except ClientError:
            self.close()
            raise

    def close(self) -> None:
        """Close the producer. The store stays usable: the next write creates another producer."""
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.close()

    def _ready_producer(self) -> RawProducer:
        if self._producer is None:
            ensure_internal_topic(self.cluster, _STORE_TOPIC)
            made = RawProducer(self.cluster)
            made.init()
            self._producer = made
        return self._producer

    def _read_new(self) -> None:
        reader = self._reader or self._open_reader()
        while reader is not None:
            found = reader.fetch(self._position, wait_ms=0)
            for view in visible_batches(checked_batches(found.data), found.aborted):
                for record in decode_view(view):
                    self._apply(record)
            if found.next_offset == self._position:
                return
            self._position = found.next_offset

    def _open_reader(self) -> PartitionReader | None:
        topic = self.cluster.topics([PIPELINES_TOPIC]).get(PIPELINES_TOPIC)
        if topic is None:
            return None
        self._position = beginning_offset(self.cluster, PIPELINES_TOPIC)
        self._reader = PartitionReader(
            self.cluster, PIPELINES_TOPIC, topic.id, 0, isolation=IsolationLevel.READ_COMMITTED
        )
        return self._reader

    def _apply(self, record: Record) -> None:
        if record.key is None:
            return
        key = bytes(record.key).decode(errors="replace")
        try:
            document = json.loads(record.value) if record.value is not None else None
        except ValueError:
            document = None  # another program has written this record
        if isinstance(document, dict):
            self._documents[key] = document
        else:
            self._documents.pop(key, None)
