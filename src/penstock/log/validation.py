"""What a batch must satisfy before it is appended, and Kafka's error for each way to fail."""

from typing import Any, Final, Protocol

from penstock.log.config import INT32_MAX, LogConfig
from penstock.log.reader import damaged_records
from penstock.log.segment import LogSlice
from penstock.protocol.compression import BytesLike, Codec
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.record_batch import (
    ATTRIBUTES_OFFSET,
    BATCH_HEADER,
    BATCH_HEADER_BYTES,
    CODEC_MASK,
    CONTROL,
    DELETE_HORIZON,
    LOG_APPEND_TIME,
    LOG_OVERHEAD_BYTES,
    RECORD_BYTES_MIN,
    BatchOffsets,
    checksum,
    crc32c,
    iter_batches,
)

BatchHeaderFields = tuple[int, int, int, int, int, int, int, int, int, int, int, int, int]

_CODEC_MAX: Final = max(Codec)
#: The largest expansion of each format: deflate makes 1032 bytes of 8 bits, snappy copies of 64 bytes of 3, LZ4 lengths
#: of 255 of one byte, zstd blocks of 128 KiB of 4 bytes.
EXPANSION_RATIO_MAX: Final = {Codec.GZIP: 1032, Codec.SNAPPY: 22, Codec.LZ4: 255, Codec.ZSTD: 32768}
_MAGIC: Final = 2
_OLDER_MAGICS: Final = (0, 1)
#: A delete horizon set by a client would let the first compaction pass remove its tombstones.
_BROKER_ONLY_ATTRIBUTES: Final = CONTROL | DELETE_HORIZON


def validate_batch(
    batch: memoryview, config: LogConfig, now_ms: int, internal: bool, sparse: bool = False
) -> BatchHeaderFields:
    """Returns the header fields of exactly one valid batch. Raises ApiError.

    `sparse` allows a client's batch from which some or all records have been removed.
    """
    size = len(batch)
    if size < BATCH_HEADER_BYTES:
        raise ApiError(ErrorCode.corrupt_message, f"{size} bytes are not a record batch")
    header: BatchHeaderFields = BATCH_HEADER.unpack_from(batch)
    (
        base_offset,
        length,
        _,
        magic,
        crc,
        attributes,
        delta,
        first_ts,
        max_ts,
        producer,
        epoch,
        sequence,
        count,
    ) = header
    if magic != _MAGIC or length != size - LOG_OVERHEAD_BYTES:
        raise _shape_error(header, size)
    if (size > config.max_message_bytes or size > config.segment_bytes) and not (
        internal
        and attributes & CONTROL  # a transaction must be able to end, whatever the topic's settings are
    ):
        raise _size_error(size, config)
    if crc32c(batch[ATTRIBUTES_OFFSET:]) != crc:
        raise ApiError(ErrorCode.corrupt_message, "checksum of the record batch does not match")
    if (count < 1 or delta != count - 1) and not (sparse and 0 <= count <= delta):
        raise _invalid(f"record batch of {count} records with last offset delta {delta}")
    if attributes & CODEC_MASK > _CODEC_MAX:
        raise ApiError(ErrorCode.unsupported_compression_type, "unknown compression codec")
    if count * RECORD_BYTES_MIN > size - BATCH_HEADER_BYTES:
        _check_record_count(attributes, count, size, config)
    if not internal and (
        base_offset or attributes & _BROKER_ONLY_ATTRIBUTES or (producer >= 0 and (sequence < 0 or epoch < 0))
    ):
        raise _client_error(header)
    if config.timestamp_type == "CreateTime":
        if max_ts - now_ms > config.timestamp_after_max_ms or attributes & LOG_APPEND_TIME:
            raise _timestamp_error(attributes, max_ts, now_ms)
        if first_ts >= 0 and now_ms - first_ts > config.timestamp_before_max_ms:
            raise _timestamp_error(attributes, first_ts, now_ms)
    return header


def _check_record_count(attributes: int, count: int, size: int, config: LogConfig) -> None:
    """Raises ApiError if a batch claims more records, and so offsets, than its bytes can hold.

    A compressed batch may claim as many of the smallest records as its codec could expand to, within the node's
    limit for the decompressed size of a batch.
    """
    body_bytes = size - BATCH_HEADER_BYTES
    codec = attributes & CODEC_MASK
    if codec:
        body_bytes = min(body_bytes * EXPANSION_RATIO_MAX[Codec(codec)], config.decoded_bytes_max)
    if count * RECORD_BYTES_MIN > body_bytes:
        raise _invalid(f"record batch of {size} bytes claims {count} records, which it cannot hold")


def validate_replicated_batch(batch: memoryview, end_offset: int) -> BatchHeaderFields:
    """Returns the header of a batch as the leader wrote it, which must continue this log. Raises ApiError."""
    size = len(batch)
    if size < BATCH_HEADER_BYTES:
        raise ApiError(ErrorCode.corrupt_message, f"{size} bytes are not a record batch")
    header: BatchHeaderFields = BATCH_HEADER.unpack_from(batch)
    if header[3] != _MAGIC or header[1] != size - LOG_OVERHEAD_BYTES:
        raise _shape_error(header, size)
    if crc32c(batch[ATTRIBUTES_OFFSET:]) != header[4]:
        raise ApiError(ErrorCode.corrupt_message, "checksum of the record batch does not match")
    if header[0] < end_offset or not 0 <= header[6] <= INT32_MAX or header[2] < 0:
        raise _invalid(
            f"batch at offset {header[0]}, epoch {header[2]} does not continue a log ending at {end_offset}"
        )
    return header


def validate_fetched_batches(records: BytesLike) -> None:
    """Raises ApiError for batches read from the log that no follower would accept."""
    checked_bytes = 0
    end_offset: int | None = None
    for header, batch in iter_batches(records):
        # The expected offset of the first batch is unknown here: a log may start in the middle of a batch.
        validate_replicated_batch(batch, header.base_offset if end_offset is None else end_offset)
        checked_bytes += len(batch)
        end_offset = header.last_offset + 1
    if checked_bytes < len(records):
        raise ApiError(ErrorCode.corrupt_message, f"only {checked_bytes} of {len(records)} bytes are batches")


class _ReadableLog(Protocol):
    def read(self, offset: int, max_bytes: int, upto: Any) -> LogSlice: ...


def read_validated(log: _ReadableLog, offset: int, max_bytes: int, upto: Any) -> LogSlice:
    """Blocking: read for the broker's own use. Raises CORRUPT_MESSAGE for damage, and any other error of a read."""
    piece = log.read(offset, max_bytes, upto)
    try:
        validate_fetched_batches(piece.data)
    except ApiError as error:
        raise damaged_records(offset, piece, error.message or error.code.name) from None
    return piece


def read_intact(log: _ReadableLog, offset: int, max_bytes: int, upto: Any) -> LogSlice:
    """Blocking: read the batches before the first damaged one. Raises CORRUPT_MESSAGE if there are none."""
    piece = log.read(offset, max_bytes, upto)
    offsets, end, next_offset = BatchOffsets(offset), 0, offset
    before = end, next_offset
    for header, batch in iter_batches(piece.data):
        if header.magic != _MAGIC or header.crc != checksum(batch):
            break
        if header.last_offset >= upto.offset or not offsets.follow(header.base_offset, header.last_offset):
            if offsets.is_last_doubtful:
                end, next_offset = before
            break
        before = end, next_offset
        end, next_offset = end + header.size, header.last_offset + 1
    if end == len(piece.data):
        return piece
    if end == 0:
        raise damaged_records(offset, piece, "checksum of the record batch does not match")
    return LogSlice(piece.data[:end], next_offset)


def _shape_error(header: BatchHeaderFields, size: int) -> ApiError:
    """Damage gets a retriable error; a batch that the producer built wrongly gets a permanent one."""
    if header[3] in _OLDER_MAGICS:
        return _invalid(f"record batch of magic {header[3]}, only {_MAGIC} is taken")
    batch_bytes = header[1] + LOG_OVERHEAD_BYTES
    if header[3] != _MAGIC or batch_bytes < BATCH_HEADER_BYTES:
        message = f"record batch of magic {header[3]} and {batch_bytes} bytes in {size}"
        return ApiError(ErrorCode.corrupt_message, message)
    return _invalid("more than one record batch" if batch_bytes < size else "less than one record batch")


def _size_error(size: int, config: LogConfig) -> ApiError:
    if size > config.max_message_bytes:
        return ApiError(
            ErrorCode.message_too_large,
            f"record batch of {size} bytes, the topic takes {config.max_message_bytes}",
        )
    return ApiError(
        ErrorCode.record_list_too_large,
        f"record batch of {size} bytes, a segment takes {config.segment_bytes}",
    )


def _client_error(header: BatchHeaderFields) -> ApiError:
    if header[0]:
        return _invalid(f"record batch with base offset {header[0]} instead of 0")
    if header[5] & CONTROL:
        return _invalid("clients may not write control records")
    if header[5] & DELETE_HORIZON:
        return _invalid("clients may not set a delete horizon")
    return _invalid(f"producer {header[9]} sent epoch {header[10]} and sequence {header[11]}")


def _timestamp_error(attributes: int, timestamp: int, now_ms: int) -> ApiError:
    if attributes & LOG_APPEND_TIME:
        return ApiError(
            ErrorCode.invalid_timestamp, "producers may not set the timestamp type to LogAppendTime"
        )
    return ApiError(
        ErrorCode.invalid_timestamp, f"timestamp {timestamp} is too far from the broker's {now_ms}"
    )


def _invalid(message: str) -> ApiError:
    return ApiError(ErrorCode.invalid_record, message)
