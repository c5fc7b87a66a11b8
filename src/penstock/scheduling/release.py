"""Release: held records as the batch that is appended to their partition when they are due."""

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from penstock.protocol.records import BatchHeader, pack_batch
from penstock.protocol.varint import encode_varint
from penstock.scheduling.headers import SCHEDULED_FOR
from penstock.scheduling.held import HeldRecord
from penstock.scheduling.records import Due, Group

_MAGIC: Final = 2
_SCHEDULED_FOR: Final = encode_varint(len(SCHEDULED_FOR)) + SCHEDULED_FOR
#: Records of a group from which on it is worth while to find all of them at once.
_MANY: Final = 8
#: More than a record's length, attributes, deltas, count of headers and the new header take.
RECORD_OVERHEAD_BYTES: Final = 80


class Release(NamedTuple):
    """The next records of a source, and when the last of each group that they are of is due."""

    dues: tuple[Due, ...]
    records: tuple[HeldRecord, ...]
    last_dues: tuple[Due, ...]

    @property
    def finished(self) -> list[int]:
        """The offsets of groups of which nothing is held after this."""
        return [last.offset for last in self.last_dues if last <= self.dues[-1]]

    def first(self, record_count: int) -> "Release":
        return self._replace(dues=self.dues[:record_count], records=self.records[:record_count])

    def split(self, bytes_max: int) -> "tuple[Release, Release | None]":
        """What fits into one batch, at least one record, and the rest."""
        size = 0
        for count, record in enumerate(self.records):
            size += record.size + RECORD_OVERHEAD_BYTES
            if count and size > bytes_max:
                first = self.first(count)
                later = tuple(last for last in self.last_dues if last > first.dues[-1])
                return first, Release(self.dues[count:], self.records[count:], later)
        return self, None


def gather(dues: Sequence[Due], groups: Iterable[tuple[int, Group]], bytes_max: int) -> Release:
    """As many of these dues, from the first on, as fit; at least one.

    `groups` are theirs, by offset; of each that comes by only what is wanted is kept.
    """
    ranks: dict[int, list[int]] = {}
    for rank, due in enumerate(dues):
        ranks.setdefault(due.offset, []).append(rank)
    found = _Found(dues, bytes_max)
    for offset, group in groups:
        found.add(offset, group, ranks[offset])
    return found.release()


class _Found:
    """Records come in any order; the first in the order of release are kept as soon as there are too many."""

    def __init__(self, dues: Sequence[Due], bytes_max: int) -> None:
        self._dues = dues
        self._bytes_max = bytes_max
        self._records: list[HeldRecord | None] = [None] * len(dues)  # by rank
        self._last_dues: list[Due] = []
        self._size = 0
        self._bound = len(dues)  # from this rank on nothing is wanted

    def add(self, offset: int, group: Group, ranks: list[int]) -> None:
        block = group.block
        starts = block.starts() if len(ranks) >= _MANY else None
        for rank in ranks:
            if rank >= self._bound:
                break
            place = self._dues[rank].place
            record = block.record(place, block.start(place) if starts is None else starts[place])
            self._records[rank] = record
            self._size += record.size + RECORD_OVERHEAD_BYTES
        self._last_dues.append(group.last_due(offset))
        if self._size > 2 * self._bytes_max:
            self._cut()

    def release(self) -> Release:
        self._cut()
        dues = tuple(self._dues[: self._bound])
        records = tuple(record for record in self._records if record is not None)
        assert len(records) == len(dues), "every group came by"
        kept = {due.offset for due in dues}
        return Release(dues, records, tuple(last for last in self._last_dues if last.offset in kept))

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


def release_batch(
    records: Sequence[HeldRecord], *, producer_id: int, epoch: int, sequence: int, now_ms: int
) -> bytearray:
    """Key, value and headers as they were sent, with the time they were due instead of the schedule header."""
    body = b"".join(_released(place, record) for place, record in enumerate(records))
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


def _released(place: int, record: HeldRecord) -> bytes:
    due = b"%d" % record.due_ms
    content = b"".join(
        (
            b"\x00\x00",  # attributes, and a timestamp that is the batch's
            encode_varint(place),
            record.key_value,
            encode_varint(record.header_count + 1),
            record.headers,
            _SCHEDULED_FOR,
            encode_varint(len(due)),
            due,
        )
    )
    return encode_varint(len(content)) + content
