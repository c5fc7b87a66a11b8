"""Numba kernels that scan, gather, write and hash records in raw memory.

All of it is in this one file because numba's cache watches only the file of a kernel: after an edit to a helper in
another file, old machine code would stay in use.

Fields of records are passed as spans, an address and a length (-1: null), in one row of an int64 matrix for each of the
fields below. Kernels trust the caller for the memory behind addresses, but not for its content: they check every length
and count in a record against the bytes that remain before they use it.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from penstock.protocol.record_batch import LOG_APPEND_TIME, BatchHeader

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
IntPair = tuple[int, int]
Kernel = TypeVar("Kernel", bound=Callable[..., Any])

# The rows of a matrix of records; the first four are also those of a matrix of headers.
KEY_AT: Final = 0
KEY_BYTES: Final = 1
VALUE_AT: Final = 2
VALUE_BYTES: Final = 3
HEADERS_AT: Final = 4  # reading: address of the record's headers; writing: index of its first header
HEADERS_COUNT: Final = 5
TIMESTAMP: Final = 6
OFFSET: Final = 7
TIMESTAMP_TYPE: Final = 8
RECORD_FIELDS: Final = 9
#: Replaces the offset in records to be written.
CONTENT_BYTES: Final = 7
HEADER_FIELDS: Final = 4

# The fields of a scan's cursor, which lets a scan pause and continue.
BATCH: Final = 0
AT: Final = 1
RECORDS_DONE: Final = 2
LAST_DELTA: Final = 3
ROWS: Final = 4
BYTES: Final = 5
CURSOR_FIELDS: Final = 6

# The results of a scan. From BAD_MAGIC on, each is a reason why a batch is corrupt.
FINISHED: Final = 0
PAUSED: Final = 1
BAD_MAGIC: Final = 2
BAD_COUNT: Final = 3
BAD_VARINT: Final = 4
BAD_LENGTH: Final = 5
BAD_HEADERS: Final = 6
BAD_END: Final = 7
BAD_ORDER: Final = 8
BYTES_LEFT: Final = 9

# The fields of a batch to be written.
FIRST_ROW: Final = 0
BODY_BYTES: Final = 1
MAX_TIMESTAMP: Final = 2
BATCH_FIELDS: Final = 3

#: Length, attributes, timestamp, offset, key, value and header count take at least one byte each.
RECORD_BYTES_MIN: Final = 7
_INT_GROUPS_MAX: Final = 5
_LONG_GROUPS_MAX: Final = 10
_MAGIC: Final = 2
#: Largest timestamp that fits into 64 bits as microseconds. Later ones are clamped to it, which keeps the order.
_TIMESTAMP_MS_MAX: Final = ((1 << 63) - 1) // 1000

_BASE_OFFSET: Final = BatchHeader._fields.index("base_offset")
_MAGIC_FIELD: Final = BatchHeader._fields.index("magic")
_ATTRIBUTES: Final = BatchHeader._fields.index("attributes")
_LAST_OFFSET_DELTA: Final = BatchHeader._fields.index("last_offset_delta")
_BASE_TIMESTAMP: Final = BatchHeader._fields.index("base_timestamp")
_MAX_TIMESTAMP: Final = BatchHeader._fields.index("max_timestamp")
RECORD_COUNT: Final = BatchHeader._fields.index("record_count")


def kernel(function: Kernel) -> Kernel:
    """Compile a function on its first call, and keep the result in numba's cache.

    The cache is in NUMBA_CACHE_DIR, next to this file, or in the user's cache directory. If none of these is writable,
    each process compiles the function again.
    """
    compiled = numba.njit(nogil=True)(function)
    with suppress(RuntimeError):
        compiled.enable_caching()
    return cast(Kernel, compiled)


def inlined(function: Kernel) -> Kernel:
    """Compile a function that is inlined into the kernels that call it, which makes scans 1.5 times as fast."""
    return cast(Kernel, numba.njit(nogil=True, inline="always")(function))


# -- memory access by address ------------------------------------------------------------------------------------


def _load(_typing: Any, _address: Any) -> Any:
    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        byte = builder.load(builder.inttoptr(args[0], cgutils.voidptr_t))
        return builder.zext(byte, ir.IntType(64))

    return types.int64(types.int64), emit


def _store(_typing: Any, _address: Any, _byte: Any) -> Any:
    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        byte = builder.trunc(args[1], ir.IntType(8))
        builder.store(byte, builder.inttoptr(args[0], cgutils.voidptr_t))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


def _copy(_typing: Any, _target: Any, _source: Any, _count: Any) -> Any:
    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        target, source = (builder.inttoptr(address, cgutils.voidptr_t) for address in args[:2])
        cgutils.raw_memcpy(builder, target, source, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit


byte_at: Callable[[int], int] = intrinsic(_load)
put_byte: Callable[[int, int], None] = intrinsic(_store)
copy_bytes: Callable[[int, int, int], None] = intrinsic(_copy)


# -- reading: a negative address is an error, the negated reason why the batch is corrupt --------------------------


@inlined
def _read_varint(at: int, end: int, groups_max: int) -> tuple[int, int]:
    """Return the number and the address after it."""
    if end - at >= 2:  # nearly all numbers take one or two bytes
        value = byte_at(at)
        if value < 0x80:
            return (value >> 1) ^ -(value & 1), at + 1
        byte = byte_at(at + 1)
        if byte < 0x80:
            value = (value & 0x7F) | byte << 7
            return (value >> 1) ^ -(value & 1), at + 2
    return _read_any_varint(at, end, groups_max)


@kernel
def _read_any_varint(at: int, end: int, groups_max: int) -> tuple[int, int]:
    value = 0
    for group in range(min(groups_max, end - at)):
        byte = byte_at(at + group)
        if group == 9:  # after the zigzag shift, only two bits of the tenth byte remain
            if byte < 0x80:
                return (value >> 1 | (byte & 3) << 62) ^ -(value & 1), at + 10
            break
        value |= (byte & 0x7F) << (7 * group)
        if byte < 0x80:
            return (value >> 1) ^ -(value & 1), at + group + 1
    return 0, -BAD_VARINT


@inlined
def _read_sized(at: int, end: int) -> tuple[int, int]:
    """Return the length of a field and the address after it. The field begins at that address minus the length."""
    length, at = _read_varint(at, end, _INT_GROUPS_MAX)
    if at < 0 or length == -1:
        return -1, at
    if length < 0 or length > end - at:
        return -1, -BAD_LENGTH
    return length, at + length


@inlined
def _skip_headers(at: int, end: int, count: int) -> int:
    """Return the address after `count` headers."""
    if count < 0 or count > (end - at) // 2:
        return -BAD_HEADERS
    for _ in range(count):
        length, at = _read_sized(at, end)
        if at < 0:
            return at
        if length < 0:
            return -BAD_HEADERS
        _, at = _read_sized(at, end)
        if at < 0:
            return at
    return at


@inlined
def _read_record(at: int, body_end: int, records: Int64s, row: int) -> int:
    """Store the fields of one record, with deltas for offset and timestamp. Return the address after it."""
    length, at = _read_varint(at, body_end, _INT_GROUPS_MAX)
    if at < 0:
        return at
    if length < 0 or length > body_end - at:
        return -BAD_LENGTH
    end = at + length
    records[TIMESTAMP, row], at = _read_varint(at + 1, end, _LONG_GROUPS_MAX)
    if at < 0:
        return at
    records[OFFSET, row], at = _read_varint(at, end, _INT_GROUPS_MAX)
    if at < 0:
        return at
    length, at = _read_sized(at, end)
    if at < 0:
        return at
    records[KEY_BYTES, row], records[KEY_AT, row] = length, at - length
    length, at = _read_sized(at, end)
    if at < 0:
        return at
    records[VALUE_BYTES, row], records[VALUE_AT, row] = length, at - length
    count, at = _read_varint(at, end, _INT_GROUPS_MAX)
    if at < 0:
        return at
    records[HEADERS_COUNT, row], records[HEADERS_AT, row] = count, at
    at = _skip_headers(at, end, count)
    if at >= 0 and at != end:
        return -BAD_END
    return at


@inlined
def _microseconds(timestamp_ms: int) -> int:
    return max(-_TIMESTAMP_MS_MAX, min(timestamp_ms, _TIMESTAMP_MS_MAX)) * 1000


@kernel
def _check_batch(header: Int64s, body_bytes: int) -> int:
    if header[_MAGIC_FIELD] != _MAGIC:
        return BAD_MAGIC
    count = header[RECORD_COUNT]
    if count < 0 or count > body_bytes // RECORD_BYTES_MIN or header[_LAST_OFFSET_DELTA] < 0:
        return BAD_COUNT
    return FINISHED


@kernel
def _scan_batch(
    header: Int64s, body_end: int, cursor: Int64s, records: Int64s, wanted: IntPair, limits: IntPair
) -> int:
    """Append the wanted records of one batch to `records`, starting at the cursor."""
    at, done, delta = cursor[AT], cursor[RECORDS_DONE], cursor[LAST_DELTA]
    row, used = cursor[ROWS], cursor[BYTES]
    base_offset, base_timestamp = header[_BASE_OFFSET], header[_BASE_TIMESTAMP]
    count, delta_max = header[RECORD_COUNT], header[_LAST_OFFSET_DELTA]
    append_time = header[_ATTRIBUTES] & LOG_APPEND_TIME
    ending = FINISHED
    while done < count:
        if row == limits[0]:
            ending = PAUSED
            break
        after = _read_record(at, body_end, records, row)
        if after < 0:
            ending = -after
            break
        if row > 0 and used + after - at > limits[1]:
            ending = PAUSED
            break
        if not delta < records[OFFSET, row] <= delta_max:
            ending = BAD_ORDER
            break
        delta = records[OFFSET, row]
        offset = base_offset + delta
        if wanted[0] <= offset < wanted[1]:
            used += after - at
            timestamp = header[_MAX_TIMESTAMP] if append_time else base_timestamp + records[TIMESTAMP, row]
            records[OFFSET, row] = offset
            records[TIMESTAMP, row] = _microseconds(timestamp)
            records[TIMESTAMP_TYPE, row] = 1 if append_time else 0
            row += 1
        at, done = after, done + 1
    if ending == FINISHED and at != body_end:
        ending = BYTES_LEFT
    cursor[AT], cursor[RECORDS_DONE], cursor[LAST_DELTA] = at, done, delta
    cursor[ROWS], cursor[BYTES] = row, used
    return ending


@kernel
def scan(
    headers: Int64s, bodies: Int64s, cursor: Int64s, records: Int64s, wanted: IntPair, limits: IntPair
) -> int:
    """Fill `records` with the records of all batches whose offsets are wanted (from, to), and return the result.

    The scan pauses at the limits of rows and bytes, though a single record may be larger. The cursor then has the
    number of stored records, and the next call continues from there.
    """
    cursor[ROWS] = cursor[BYTES] = 0
    while cursor[BATCH] < len(bodies):
        batch = cursor[BATCH]
        start, length = bodies[batch, 0], bodies[batch, 1]
        if cursor[RECORDS_DONE] == 0:
            cursor[AT], cursor[LAST_DELTA] = start, -1
            fault = _check_batch(headers[batch], length)
            if fault != FINISHED:
                return fault
        ending = _scan_batch(headers[batch], start + length, cursor, records, wanted, limits)
        if ending != FINISHED:
            return ending
        cursor[BATCH] += 1
        cursor[RECORDS_DONE] = 0
    return FINISHED


@kernel
def read_headers(starts: Int64s, counts: Int64s, headers: Int64s) -> int:
    """Store every header of records that a scan has validated. Return how many there are."""
    index = 0
    for row in range(len(starts)):
        at = starts[row]
        for _ in range(counts[row]):
            # The scan has checked this number against its bounds, so they need no second check.
            length, at = _read_varint(at, at + _INT_GROUPS_MAX, _INT_GROUPS_MAX)
            headers[KEY_AT, index], headers[KEY_BYTES, index] = at, length
            at += length
            length, at = _read_varint(at, at + _INT_GROUPS_MAX, _INT_GROUPS_MAX)
            headers[VALUE_AT, index], headers[VALUE_BYTES, index] = at, length
            at += max(length, 0)
            index += 1
    return index


# -- gathering -----------------------------------------------------------------------------------------------------


@kernel
def measure(lengths: Int64s) -> tuple[int, int]:
    """Return the total size of all fields, and how many fields are null."""
    total = nulls = 0
    for row in range(len(lengths)):
        if lengths[row] < 0:
            nulls += 1
        else:
            total += lengths[row]
    return total, nulls


@kernel
def gather(starts: Int64s, lengths: Int64s, offsets: Int32s, target: int) -> int:
    """Copy all fields to `target`, one after the other, and store where each begins. Return where the last ends."""
    end = 0
    offsets[0] = 0
    for row in range(len(starts)):
        if lengths[row] > 0:
            copy_bytes(target + end, starts[row], lengths[row])
            end += lengths[row]
        offsets[row + 1] = end
    return end


# -- writing -------------------------------------------------------------------------------------------------------


@kernel
def _varint_bytes(value: int) -> int:
    """Return the size of a number as a zigzag varint. The zigzag form is treated as 64 unsigned bits."""
    left = (value << 1) ^ (value >> 63)
    count = 1
    while left & ~0x7F:
        left = left >> 7 & (1 << 57) - 1
        count += 1
    return count


@kernel
def _put_varint(at: int, value: int) -> int:
    left = (value << 1) ^ (value >> 63)
    while left & ~0x7F:
        put_byte(at, left & 0x7F | 0x80)
        left = left >> 7 & (1 << 57) - 1
        at += 1
    put_byte(at, left)
    return at + 1


@inlined
def _sized_bytes(length: int) -> int:
    return _varint_bytes(length) + max(length, 0)


@inlined
def _put_sized(at: int, start: int, length: int) -> int:
    at = _put_varint(at, length)
    if length > 0:
        copy_bytes(at, start, length)
        at += length
    return at


@kernel
def _content_bytes_fixed(records: Int64s, row: int, headers: Int64s) -> int:
    """Return the size of a record without its length field and its two deltas."""
    count = records[HEADERS_COUNT, row]
    total = 1 + _sized_bytes(records[KEY_BYTES, row]) + _sized_bytes(records[VALUE_BYTES, row])
    total += _varint_bytes(count)
    for header in range(records[HEADERS_AT, row], records[HEADERS_AT, row] + count):
        total += _sized_bytes(headers[KEY_BYTES, header]) + _sized_bytes(headers[VALUE_BYTES, header])
    return total


@kernel
def split_batches(records: Int64s, headers: Int64s, body_bytes_max: int, batches: Int64s) -> int:
    """Divide records into batches. A batch exceeds the bound only if a single record does. Return how many."""
    batch = -1
    first = used = 0
    for row in range(records.shape[1]):
        fixed = _content_bytes_fixed(records, row, headers)
        timestamp = records[TIMESTAMP, row]
        content = fixed + _varint_bytes(timestamp - records[TIMESTAMP, first]) + _varint_bytes(row - first)
        whole = content + _varint_bytes(content)
        if batch < 0 or used + whole > body_bytes_max:
            batch += 1
            first, used = row, 0
            content = fixed + 2  # both deltas are zero
            whole = content + _varint_bytes(content)
            batches[FIRST_ROW, batch], batches[MAX_TIMESTAMP, batch] = first, timestamp
        used += whole
        records[CONTENT_BYTES, row] = content
        batches[BODY_BYTES, batch] = used
        batches[MAX_TIMESTAMP, batch] = max(batches[MAX_TIMESTAMP, batch], timestamp)
    return batch + 1


@kernel
def write(records: Int64s, headers: Int64s, first: int, end: int, at: int) -> int:
    """Write the records of one batch, as divided by `split_batches`. Return the address after them."""
    base_timestamp = records[TIMESTAMP, first]
    for row in range(first, end):
        at = _put_varint(at, records[CONTENT_BYTES, row])
        put_byte(at, 0)
        at = _put_varint(at + 1, records[TIMESTAMP, row] - base_timestamp)
        at = _put_varint(at, row - first)
        at = _put_sized(at, records[KEY_AT, row], records[KEY_BYTES, row])
        at = _put_sized(at, records[VALUE_AT, row], records[VALUE_BYTES, row])
        count = records[HEADERS_COUNT, row]
        at = _put_varint(at, count)
        for header in range(records[HEADERS_AT, row], records[HEADERS_AT, row] + count):
            at = _put_sized(at, headers[KEY_AT, header], headers[KEY_BYTES, header])
            at = _put_sized(at, headers[VALUE_AT, header], headers[VALUE_BYTES, header])
    return at


# -- partitioning --------------------------------------------------------------------------------------------------


@kernel
def _murmur2(start: int, length: int) -> int:
    """Return the hash of Java's producer as an unsigned 32-bit number. All products stay below 2^63."""
    mask, multiplier = 0xFFFFFFFF, 0x5BD1E995
    state = 0x9747B28C ^ length
    whole = length & ~3
    for at in range(start, start + whole, 4):
        word = byte_at(at) | byte_at(at + 1) << 8 | byte_at(at + 2) << 16 | byte_at(at + 3) << 24
        word = word * multiplier & mask
        word = (word ^ word >> 24) * multiplier & mask
        state = (state * multiplier & mask) ^ word
    for index in range(length - whole):
        state ^= byte_at(start + whole + index) << 8 * index
    if length > whole:
        state = state * multiplier & mask
    state = (state ^ state >> 13) * multiplier & mask
    return state ^ state >> 15


@kernel
def partition(starts: Int64s, lengths: Int64s, count: int, without_key: int, partitions: Int32s) -> None:
    """Store the partition to which Java's producer would send each key."""
    for row in range(len(starts)):
        if lengths[row] < 0:
            partitions[row] = without_key
        else:
            partitions[row] = (_murmur2(starts[row], lengths[row]) & 0x7FFFFFFF) % count
