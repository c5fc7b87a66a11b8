"""Release: encodes held records as the batch that is appended to their partition when they are due."""

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from penstock.protocol.record_batch import BatchHeader, pack_batch
from penstock.protocol.wire import encode_varint
from penstock.scheduling.intake import SCHEDULED_FOR
from penstock.scheduling.schedule_log import DueEntry, HeldRecord, StoredBlock

_MAGIC: Final = 2
_SCHEDULED_FOR: Final = encode_varint(len(SCHEDULED_FOR)) + SCHEDULED_FOR
#: From this many records of a stored block on, it is cheaper to compute the positions of all its records at once.
_MANY_RECORDS: Final = 8
#: An upper bound for a record's length, attributes, deltas, header count and the new header.
RECORD_OVERHEAD_BYTES: Final = 80


class DueRecords(NamedTuple):
    """The next records of a source, and the last due entry of each stored block that they come from."""

    dues: tuple[DueEntry, ...]
    records: tuple[HeldRecord, ...]
    last_dues: tuple[DueEntry, ...]

    @property
    def finished(self) -> list[int]:
        """The offsets of the stored blocks that hold no more records after this release."""
        return [last.offset for last in self.last_dues if last <= self.dues[-1]]

    def first(self, record_count: int) -> "DueRecords":
        return self._replace(dues=self.dues[:record_count], records=self.records[:record_count])

    def split(self, bytes_max: int) -> "tuple[DueRecords, DueRecords | None]":
        """Split into what fits into one batch (at least one record) and the rest."""
        size = 0
        for count, record in enumerate(self.records):
            size += record.size + RECORD_OVERHEAD_BYTES
            if count and size > bytes_max:
                first = self.first(count)
                later = tuple(last for last in self.last_dues if last > first.dues[-1])
                return first, DueRecords(self.dues[count:], self.records[count:], later)
        return self, None


def gather_due_records(
    dues: Sequence[DueEntry], groups: Iterable[tuple[int, StoredBlock]], bytes_max: int
) -> DueRecords:
    """Collect the records of as many of these entries, from the first on, as fit; at least one.

    `groups` are their stored blocks, by offset. Of each block, only the needed records are kept.
    """
    ranks: dict[int, list[int]] = {}
    for rank, due in enumerate(dues):
        ranks.setdefault(due.offset, []).append(rank)
    found = _DueRecordCollector(dues, bytes_max)
    for offset, group in groups:
        found.add(offset, group, ranks[offset])
    return found.release()


class _DueRecordCollector:
    """Collects records in any order. When it has too many, it keeps only those that are released first."""

    def __init__(self, dues: Sequence[DueEntry], bytes_max: int) -> None:
        self._dues = dues
        self._bytes_max = bytes_max
        self._records: list[HeldRecord | None] = [None] * len(dues)  # by rank
        self._last_dues: list[DueEntry] = []
        self._size = 0
        self._bound = len(dues)  # records of this and later ranks are not needed

    def add(self, offset: int, group: StoredBlock, ranks: list[int]) -> None:
        block = group.block
        starts = block.starts() if len(ranks) >= _MANY_RECORDS else None
        for rank in ranks:
            if rank >= self._bound:
                break
            index = self._dues[rank].record_index
            record = block.record(index, block.start(index) if starts is None else starts[index])
            self._records[rank] = record
            self._size += record.size + RECORD_OVERHEAD_BYTES
        self._last_dues.append(group.last_due(offset))
        if self._size > 2 * self._bytes_max:
            self._cut()

    def release(self) -> DueRecords:
        self._cut()
        dues = tuple(self._dues[: self._bound])
        records = tuple(record for record in self._records if record is not None)
        assert len(records) == len(dues), "every group came by"
        kept = {due.offset for due in dues}
        return DueRecords(dues, records, tuple(last for last in self._last_dues if last.offset in kept))

    def _cut(self) -> None:
        size = 0
        for rank, record in enumerate(self._records):
            if record is None:
                continue
            added = record.size + RECORD_OVERHEAD_BYTES
            if size and size + added > self._bytes_max:
                self._bound = rank
                del self._records[rank:]
                break
            size += added
        self._size = size


def encode_release_batch(
    records: Sequence[HeldRecord], *, producer_id: int, epoch: int, sequence: int, now_ms: int
) -> bytearray:
    """Keep key, value and headers, but replace the schedule header with the time when the record was due."""
    body = b"".join(_encode_released_record(index, record) for index, record in enumerate(records))
    header = BatchHeader(
        base_offset=0,
        length=0,
        leader_epoch=-1,
        magic=_MAGIC,
        crc=0,
        attributes=0,
        last_offset_delta=len(records) - 1,
        base_timestamp=now_ms,
        max_timestamp=now_ms,
        producer_id=producer_id,
        producer_epoch=epoch,
        base_sequence=sequence,
        record_count=len(records),
    )
    return pack_batch(header, body)


def _encode_released_record(position: int, record: HeldRecord) -> bytes:
    due = b"%d" % record.due_ms
    content = b"".join(
        (
            b"\x00\x00",  # attributes, and a timestamp delta of 0
            encode_varint(position),
            record.key_value,
            encode_varint(record.header_count + 1),
            record.headers,
            _SCHEDULED_FOR,
            encode_varint(len(due)),
            due,
        )
    )
    return encode_varint(len(content)) + content
