"""Where the records of raw batches lie: batches are opened, and walked by a kernel that can pause."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Final, NamedTuple

import numpy as np

from penstock.client.errors import CorruptRecords
from penstock.protocol.compression import BytesLike, decompress
from penstock.protocol.errors import ApiError
from penstock.protocol.records import CODEC_MASK, CONTROL, HEADER_BYTES, BatchHeader
from penstock.spark.columns import kernels
from penstock.spark.columns.kernels import Int64s
from penstock.spark.columns.memory import address_of, empty

_REASONS: Final = {
    kernels.BAD_MAGIC: "its format is not the one that brokers write since 0.11 (magic 2)",
    kernels.BAD_COUNT: "its record count or offset delta is impossible",
    kernels.BAD_VARINT: "a number in a record is cut short or too long",
    kernels.BAD_LENGTH: "a record or one of its fields has an impossible length",
    kernels.BAD_HEADERS: "a record has an impossible count of headers, or one without a key",
    kernels.BAD_END: "the length of a record does not match its content",
    kernels.BAD_ORDER: "its records are out of order",
    kernels.BYTES_LEFT: "there are bytes after its last record",
}
#: Rows of the matrix must not lie a power of two apart, or they would compete for the same lines of the cache.
_PADDING_ROWS: Final = 24


class CorruptBatch(CorruptRecords):
    """A batch that no producer can have meant, though its checksum may be right."""

    def __init__(self, topic: str, partition: int, offset: int, reason: str) -> None:
        super().__init__(f"the batch at offset {offset} of {topic}[{partition}] is corrupt: {reason}")
        self.topic = topic
        self.partition = partition
        self.offset = offset
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.topic, self.partition, self.offset, self.reason)


class Slice(NamedTuple):
    """The offsets of a partition that are wanted: from `start` to before `end`."""

    topic: str
    partition: int
    start: int
    end: int


class OpenBatch(NamedTuple):
    header: BatchHeader
    body: BytesLike


def open_batches(
    batches: Iterable[tuple[BatchHeader, memoryview]], wanted: Slice, decoded_bytes_max: int
) -> Iterator[OpenBatch]:
    """The batches that may hold wanted offsets, decompressed; the others are not looked into."""
    for header, data in batches:
        assert not header.attributes & CONTROL, "control batches are the reader's to leave out"
        if header.last_offset >= wanted.start and header.base_offset < wanted.end:
            yield OpenBatch(header, _open(header, data[HEADER_BYTES:], wanted, decoded_bytes_max))


def _open(header: BatchHeader, body: memoryview, wanted: Slice, decoded_bytes_max: int) -> BytesLike:
    if not header.attributes & CODEC_MASK:
        return body
    try:
        return decompress(header.codec, body, decoded_bytes_max)
    except ApiError as refused:
        raise CorruptBatch(wanted.topic, wanted.partition, header.base_offset, str(refused)) from None


def scan(batches: list[OpenBatch], wanted: Slice, *, rows_max: int, bytes_max: int) -> Iterator[Int64s]:
    """The wanted records as matrices of the fields in `kernels`, each of at most so many rows and bytes.

    Every matrix is overwritten by the next one, and its addresses hold while `batches` is held. A single record
    may be larger than `bytes_max`.
    """
    headers = _matrix((batch.header for batch in batches), (len(batches), len(BatchHeader._fields)))
    bodies = _matrix(((address_of(batch.body), len(batch.body)) for batch in batches), (len(batches), 2))
    rows_possible = np.minimum(headers[:, kernels.RECORD_COUNT], bodies[:, 1] // kernels.RECORD_BYTES_MIN)
    rows_held = max(1, min(rows_max, int(rows_possible.clip(0).sum())))
    records = empty((kernels.RECORD_FIELDS, rows_held + _PADDING_ROWS), np.int64)
    offsets, limits = (wanted.start, wanted.end), (rows_held, bytes_max)
    cursor = np.zeros(kernels.CURSOR_FIELDS, np.int64)
    ending = kernels.PAUSED
    while ending == kernels.PAUSED:
        ending = kernels.scan(headers, bodies, cursor, records, offsets, limits)
        if ending > kernels.PAUSED:
            at_fault = batches[cursor[kernels.BATCH]].header.base_offset
            raise CorruptBatch(wanted.topic, wanted.partition, at_fault, _REASONS[ending])
        if cursor[kernels.ROWS]:
            yield records[:, : cursor[kernels.ROWS]]


def _matrix(rows: Iterable[Sequence[int]], shape: tuple[int, int]) -> Int64s:
    """Half the time of np.array, which matters where batches are small."""
    return np.fromiter(chain.from_iterable(rows), np.int64, shape[0] * shape[1]).reshape(shape)
