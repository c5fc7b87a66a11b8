"""What a dead letter looks like: the record as it was, and headers that say where it is from and why it is here.

Key, value and own headers of a record are copied as the bytes that they are: nobody looks into them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from types import MappingProxyType
from typing import Final

from penstock.groups.share_state.copies import Copy, Unreadable
from penstock.groups.share_state.ranges import Range
from penstock.groups.share_state.values import BURIED_LIMIT, BURIED_LOCK_EXPIRED, BURIED_REJECTED, Key
from penstock.protocol import varint
from penstock.protocol.compression import Codec, compress
from penstock.protocol.letters import (
    DELIVERY_COUNT,
    ERROR_CLASS,
    ERROR_STACK,
    GROUP,
    MESSAGE,
    OFFSET,
    PARTITION,
    REASON,
    TIMESTAMP,
    TOPIC,
    WITHOUT_RECORD,
)
from penstock.protocol.records import BatchHeader, pack_batch
from penstock.protocol.share_failures import WorkerError

GONE: Final = "gone from the source"
UNREADABLE: Final = "cannot be read"
LEFT_OUT: Final = "too large beside the others"

_REASONS: Final = {
    BURIED_LIMIT: ("limit", "delivered as often as the group allows"),
    BURIED_REJECTED: ("rejected", "rejected by a consumer"),
    BURIED_LOCK_EXPIRED: ("lock expired", "delivered as often as the group allows, the last time unanswered"),
}
#: Ours, with the one that differs between those with a record and those without.
_HEADERS: Final = 8
#: No attributes, and no time after the batch's.
_RECORD_HEAD: Final = b"\x00\x00"
_NULL: Final = b"\x01"

#: Lengths and counts come again and again.
_varint = lru_cache(maxsize=1 << 14)(varint.encode_varint)


def _sized(value: bytes) -> bytes:
    return _varint(len(value)) + value


@cache
def _header_key(name: str) -> bytes:
    return _sized(name.encode())


def _header(name: str, value: str) -> bytes:
    return _header_key(name) + _sized(value.encode())


class Letters:
    """The dead letters of one plan, encoded as they come, in the order of their offsets."""

    def __init__(
        self,
        key: Key,
        topic: str,
        *,
        now_ms: int,
        copies_record: bool,
        bytes_max: int,
        errors: Mapping[int, tuple[int, WorkerError]] = MappingProxyType({}),
    ) -> None:
        """`errors` are what workers said, by offset, each of one delivery."""
        self._errors = errors
        self._now_ms = now_ms
        self._copies_record = copies_record
        self._bytes_max = bytes_max
        self._group = key.group
        self._before_offset = (
            _header(TOPIC, topic) + _header(PARTITION, str(key.partition)) + _header_key(OFFSET)
        )
        self._fates: dict[tuple[int, int], bytes] = {}
        self._parts: list[bytes] = []
        self._size = 0
        self.count = 0
        #: As which they were compressed at their source, if they were.
        self.codec = Codec.NONE
        #: The offsets that they are from, as ranges.
        self.offsets: list[tuple[int, int]] = []

    @property
    def is_full(self) -> bool:
        return self._size >= self._bytes_max

    def fill(self, found: Iterable[Copy | Unreadable]) -> int | None:
        """As many as there is room for, and one at least; the offset of the first that was left out, if any."""
        for one in found:
            if self.is_full:
                return one.offset
            self.add(one)
        return None

    def repeat(self, owed: Iterator[tuple[int, tuple[int, int]]], found: Iterable[Copy | Unreadable]) -> None:
        """One for each that is owed, up to the last that is found: how many there are was said before."""
        for one in found:
            for offset, fate in owed:
                if offset < one.offset:
                    self.add_without(offset, fate, GONE)
                    continue
                if self.is_full:
                    self.add_without(offset, fate, LEFT_OUT)
                else:
                    self.add(one)
                break

    def add(self, copy: Copy | Unreadable) -> None:
        if isinstance(copy, Unreadable):
            self.add_without(copy.offset, copy.fate, UNREADABLE)
            return
        self.codec = copy.codec or self.codec
        time = b"%d" % copy.timestamp_ms
        told, count = self._upto_reason(copy.offset, copy.fate)
        headers = (told, _header_key(TIMESTAMP), _sized(time))
        if self._copies_record:
            self._put(
                copy.offset,
                copy.key_and_value,
                _varint(copy.headers_count + count),
                copy.headers,
                *headers,
            )
        else:
            self._put(copy.offset, _NULL + _NULL, _varint(count), *headers)

    def add_without(self, offset: int, fate: tuple[int, int], why: str, name: bytes | None = None) -> None:
        """Of a record that cannot be brought along; `name` is a key for those topics that need one."""
        key_and_value = (_NULL if name is None else _sized(name)) + _NULL
        told, count = self._upto_reason(offset, fate)
        self._put(offset, key_and_value, _varint(count), told, _header(WITHOUT_RECORD, why))

    def _upto_reason(self, offset: int, fate: tuple[int, int]) -> tuple[bytes, int]:
        """With how many headers there are in all."""
        delivery_count, error = self._errors.get(offset, (-1, None))
        if error is not None and delivery_count == fate[1]:
            return self._before_offset + _sized(b"%d" % offset) + self._of_worker(fate, error), _HEADERS + 2
        told = self._fates.get(fate)
        if told is None:
            reason, explanation = _REASONS[fate[0]]
            told = self._fates[fate] = (
                _header(GROUP, self._group)
                + _header(DELIVERY_COUNT, str(fate[1]))
                + _header(MESSAGE, explanation)
                + _header(REASON, reason)
            )
        return self._before_offset + _sized(b"%d" % offset) + told, _HEADERS

    def _of_worker(self, fate: tuple[int, int], error: WorkerError) -> bytes:
        reason, _ = _REASONS[fate[0]]
        return (
            _header(GROUP, self._group)
            + _header(DELIVERY_COUNT, str(fate[1]))
            + _header(MESSAGE, error.message)
            + _header(ERROR_CLASS, error.name)
            + _header(ERROR_STACK, error.stack)
            + _header(REASON, reason)
        )

    def _put(self, offset: int, *parts: bytes) -> None:
        body = b"".join((_RECORD_HEAD, _varint(self.count), *parts))
        self._parts += (_varint(len(body)), body)
        self._size += len(body)
        self.count += 1
        if self.offsets and self.offsets[-1][1] == offset - 1:
            self.offsets[-1] = (self.offsets[-1][0], offset)
        else:
            self.offsets.append((offset, offset))

    def batch(self, *, producer_id: int, epoch: int, sequence: int, codec: Codec = Codec.NONE) -> bytearray:
        header = BatchHeader(
            base_offset=0,
            length=0,
            leader_epoch=-1,
            magic=2,
            crc=0,
            attributes=codec,
            last_offset_delta=self.count - 1,
            base_timestamp=self._now_ms,
            max_timestamp=self._now_ms,
            producer_id=producer_id,
            producer_epoch=epoch,
            base_sequence=sequence,
            record_count=self.count,
        )
        return pack_batch(header, compress(codec, b"".join(self._parts)))


def fated(pending: Sequence[Range], offsets: Iterable[tuple[int, int]]) -> list[Range]:
    """These offsets with what is known of them. Both are sorted, and all of them are pending."""
    out: list[Range] = []
    place = 0
    for first, last in offsets:
        while first <= last:
            while pending[place][1] < first:
                place += 1
            _, end, reason, count = pending[place]
            out.append((first, min(last, end), reason, count))
            first = min(last, end) + 1
    return out


def fates(
    pending: Sequence[Range], offsets: Iterable[tuple[int, int]]
) -> Iterator[tuple[int, tuple[int, int]]]:
    """Each of these offsets with its reason and delivery count."""
    for first, last, reason, count in fated(pending, offsets):
        for offset in range(first, last + 1):
            yield offset, (reason, count)
