"""The board: a compacted topic that holds a JSON document under each key, for everybody to read.

Pipelines tell here how they are; who wants something of them writes it next to that.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any, Final
from uuid import UUID

from penstock.client.batches import batches, visible
from penstock.client.cluster import Cluster
from penstock.client.errors import ClientError, OutOfRange, TopicChanged
from penstock.client.fetching import PartitionReader
from penstock.client.metadata import Isolation, Place
from penstock.client.positions import EARLIEST, list_offsets
from penstock.client.producing import RawProducer
from penstock.client.topics import NewTopic, ensure_topic
from penstock.protocol.records import Record, decode_records, encode_batch

TOPIC: Final = "penstock-pipelines"
_PLACE: Final[Place] = (TOPIC, 0)
#: It is read from its beginning by whoever looks for the first time, so it is kept short.
_SETTINGS: Final = {
    "cleanup.policy": "compact",
    "min.cleanable.dirty.ratio": "0.1",
    "segment.bytes": str(1 << 20),
    "segment.ms": str(3_600_000),
}
_RECORD_BYTES_MAX: Final = 16 << 20

Document = dict[str, Any]


class Board:
    """As far as it was read. For one thread, as the cluster that it is given is."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._documents: dict[str, Document] = {}
        self._reader: PartitionReader | None = None
        self._position = 0
        self._producer: RawProducer | None = None

    def __repr__(self) -> str:
        return f"<Board with {len(self._documents)} documents up to offset {self._position}>"

    def read(self) -> Mapping[str, Document]:
        """Everything as it is now; nothing where there is no board yet. Raises Unavailable, Refused."""
        for _ in range(2):
            try:
                self._read_on()
                break
            except (OutOfRange, TopicChanged):
                # It was deleted, or compaction and deletion have passed by: what there is now is all there is.
                self._documents, self._reader = {}, None
        return self._documents

    def write(self, key: str, document: Document | None) -> None:
        """None takes it away. Raises Unavailable, Refused."""
        value = None if document is None else json.dumps(document, separators=(",", ":")).encode()
        record = Record(0, int(time.time() * 1000), key=key.encode(), value=value)
        try:
            producer = self._ready_producer()
            producer.send(*_PLACE, encode_batch([record]))
            producer.flush()
        except ClientError:
            self.close()
            raise

    def close(self) -> None:
        """Of no more use is only what wrote; a board that is used again writes with another one."""
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.close()

    def _ready_producer(self) -> RawProducer:
        if self._producer is None:
            ensure_topic(self.cluster, NewTopic(name=TOPIC, partitions=1, settings=_SETTINGS))
            made = RawProducer(self.cluster)
            made.init()
            self._producer = made
        return self._producer

    def _read_on(self) -> None:
        reader = self._reader or self._begin()
        while reader is not None:
            found = reader.fetch(self._position, wait_ms=0)
            for view in visible(batches(found.data), found.aborted):
                for record in decode_records(view.data, _RECORD_BYTES_MAX):
                    self._learn(record)
            if found.next_offset == self._position:
                return
            self._position = found.next_offset

    def _begin(self) -> PartitionReader | None:
        topic = self.cluster.topics([TOPIC]).get(TOPIC)
        if topic is None:
            return None
        start = list_offsets(self.cluster, {_PLACE: EARLIEST})[_PLACE]
        self._position = start.offset if start is not None else 0
        self._reader = _reader(self.cluster, topic.id)
        return self._reader

    def _learn(self, record: Record) -> None:
        if record.key is None:
            return
        key = bytes(record.key).decode(errors="replace")
        document = _document(record.value)
        if document is None:
            self._documents.pop(key, None)
        else:
            self._documents[key] = document


def _reader(cluster: Cluster, topic_id: UUID | None) -> PartitionReader:
    return PartitionReader(cluster, TOPIC, topic_id, 0, isolation=Isolation.READ_COMMITTED)


def _document(value: bytes | None) -> Document | None:
    """None for what is no document, which somebody else must have written."""
    try:
        found = json.loads(value) if value is not None else None
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
