"""Record batches as a broker sent them: walked, checked, and less what read_committed hides."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from penstock.client.errors import CorruptRecords
from penstock.protocol.compression import BytesLike
from penstock.protocol.records import (
    HEADER_BYTES,
    LENGTH_OVERHEAD_BYTES,
    BatchHeader,
    checksum,
    iter_batches,
    parse_end_marker,
)

_MAGIC: Final = 2
_MAGIC_AT: Final = 16
#: Producer id and first offset of a transaction that was aborted.
Aborted = tuple[int, int]


class BatchView(NamedTuple):
    header: BatchHeader
    data: memoryview


def whole(data: memoryview) -> memoryview:
    """Without the last batch where that was cut short. Raises CorruptRecords for what is no batch at all."""
    end = 0
    for header, _ in iter_batches(data):
        end += header.size
    if end < len(data):
        _check_rest(data[end:])
    return data[:end]


def _check_rest(rest: memoryview) -> None:
    """A batch that is cut short is longer than what is left of it, and of the format that we read."""
    if len(rest) > _MAGIC_AT and rest[_MAGIC_AT] != _MAGIC:
        raise CorruptRecords(
            f"records of format {rest[_MAGIC_AT]} cannot be read, only those of format {_MAGIC} "
            "(as written by Apache Kafka 0.11 and newer)"
        )
    length = int.from_bytes(rest[8:12], "big", signed=True) if len(rest) >= LENGTH_OVERHEAD_BYTES else None
    if length is not None and length + LENGTH_OVERHEAD_BYTES < HEADER_BYTES:
        raise CorruptRecords(f"a record batch of {length} bytes is no record batch")


def batches(data: BytesLike, *, checks_crc: bool = True) -> Iterator[BatchView]:
    """Whole batches, control batches among them. Raises CorruptRecords."""
    for header, batch in iter_batches(data):
        if header.magic != _MAGIC:
            _check_rest(batch)
        if checks_crc and checksum(batch) != header.crc:
            raise CorruptRecords(f"the checksum of the batch at offset {header.base_offset} is wrong")
        yield BatchView(header, batch)


def visible(found: Iterable[BatchView], aborted: Iterable[Aborted] | None) -> Iterator[BatchView]:
    """The batches that have records for an application.

    Control batches have none. With the list of aborted transactions that came with the batches (None: everything is
    to be read) those of aborted transactions are left out: from the first offset of each up to its abort marker.
    """
    if aborted is None:
        yield from (view for view in found if not view.header.is_control)
        return
    to_come = sorted(aborted, key=lambda each: each[1], reverse=True)
    hidden: set[int] = set()
    for view in found:
        while to_come and to_come[-1][1] <= view.header.last_offset:
            hidden.add(to_come.pop()[0])
        if view.header.is_control:
            marker = parse_end_marker(view.data)
            if marker is not None and not marker.committed:
                hidden.discard(marker.producer_id)
        elif not (view.header.is_transactional and view.header.producer_id in hidden):
            yield view
