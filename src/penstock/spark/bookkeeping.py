"""Topics of one partition in which the Spark side keeps its own books: made when they are needed, and read in order."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Final

from penstock.client.batches import BatchView, batches
from penstock.client.cluster import Cluster
from penstock.client.errors import Refused
from penstock.client.fetching import PartitionReader
from penstock.client.metadata import Place
from penstock.client.positions import EARLIEST, LATEST, list_offsets
from penstock.client.producing import RawProducer
from penstock.client.topics import NewTopic, ensure_topic
from penstock.protocol.compression import Codec
from penstock.protocol.records import Record, decode_records, encode_batch

#: Which transactions make up the batches of queries that write exactly once.
DECISIONS: Final = "penstock-sink-decisions"
#: Which offsets were given to the tasks of queries that read at most once.
CLAIMS: Final = "penstock-claims"
#: Which of those may have been lost.
SKIPPED: Final = "penstock-claims-skipped"
#: How pipelines are.
PIPELINES: Final = "penstock-pipelines"
#: A query that reads all topics does not read these: it would write to them with every batch, and never come to an end.
OWN_TOPICS: Final = frozenset({DECISIONS, CLAIMS, SKIPPED, PIPELINES})

_RECORD_BYTES_MAX: Final = 64 << 20
_WAIT_MS: Final = 500


def place_of(topic: str) -> Place:
    """All that there is of it."""
    return topic, 0


def make_ready(cluster: Cluster, topic: NewTopic) -> None:
    """Raises Unavailable, Refused."""
    with suppress(Refused):
        cluster.topic(topic.name)
        return
    ensure_topic(cluster, topic)


# Writing


def batch_of(content: dict[str, Any], *, key: str) -> bytearray:
    """One JSON document as a batch."""
    value = json.dumps(content, separators=(",", ":")).encode()
    record = Record(0, int(time.time() * 1000), key=key.encode(), value=value)
    return encode_batch([record], codec=Codec.GZIP)


def append(cluster: Cluster, topic: str, content: dict[str, Any], *, key: str) -> None:
    """Returns when it is there for good. Raises Unavailable (it may be there then), Refused."""
    with RawProducer(cluster) as producer:
        producer.init()
        producer.send(*place_of(topic), batch_of(content, key=key))
        producer.flush()


# Reading


def end_of(cluster: Cluster, topic: str) -> int:
    return _edge(cluster, topic, LATEST)


def beginning_of(cluster: Cluster, topic: str) -> int:
    return _edge(cluster, topic, EARLIEST)


def _edge(cluster: Cluster, topic: str, edge: int) -> int:
    found = list_offsets(cluster, {place_of(topic): edge})[place_of(topic)]
    return 0 if found is None else found.offset


def views_at(cluster: Cluster, topic: str, offset: int) -> Iterator[BatchView]:
    """What there is from the batch with that offset on, as much as comes at once. Raises OutOfRange."""
    found = PartitionReader(cluster, *_reading(topic)).fetch(offset, wait_ms=_WAIT_MS)
    yield from batches(found.data)


def views(cluster: Cluster, topic: str, start: int) -> Iterator[BatchView]:
    """From there to the end, of open and aborted transactions too. Raises OutOfRange, Unavailable, Refused."""
    reader, position = PartitionReader(cluster, *_reading(topic)), start
    while True:
        found = reader.fetch(position, wait_ms=0)
        yield from batches(found.data)
        if found.next_offset == position and position >= found.high_watermark:
            return
        position = found.next_offset


def _reading(topic: str) -> tuple[str, None, int]:
    return topic, None, place_of(topic)[1]


def records_of(view: BatchView) -> Sequence[Record]:
    return () if view.header.is_control else decode_records(view.data, _RECORD_BYTES_MAX)


def documents(cluster: Cluster, topic: str, start: int, *, key: str) -> Iterator[dict[str, Any]]:
    """What stands under a key, from an offset to the end. Raises as `views` does."""
    wanted = key.encode()
    for view in views(cluster, topic, start):
        for record in records_of(view):
            if record.key == wanted and record.value is not None:
                yield json.loads(record.value)
