"""What happens to a produced batch before it is appended, and after a topic has refused it.

Some topics inspect each batch, off the event loop: a compacted topic refuses records without a key, a topic with its
own codec stores every batch in that codec, and a topic with a schedule holds records back until they are due.

A refused batch may be a duplicate of one that was appended when the topic's settings were different. A duplicate gets
the reply of the first append, whatever the settings are now. Otherwise its producer would believe that the records in
the log were refused, and send them again under another sequence.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final, TypeVar

from penstock.log.producer_state import increment_sequence
from penstock.log.reader import DecompressionLimitReached
from penstock.log.segment import LogAppendInfo
from penstock.protocol.compression import (
    BytesLike,
    Codec,
    DecompressedTooLarge,
    announced_bytes,
    compress,
)
from penstock.protocol.errors import ApiError, ErrorCode, InvalidRecords
from penstock.protocol.record_batch import (
    BATCH_HEADER_BYTES,
    CODEC_MASK,
    RECORD_BYTES_MIN,
    BatchHeader,
    checksum,
    keyless_records,
    open_batch,
    pack_batch,
    read_header,
)
from penstock.protocol.steps import Steps, finish

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.broker.config.node_settings import NodeSettings
    from penstock.broker.environment import Threads
    from penstock.broker.network.connection import Connection
    from penstock.broker.partition.partition import Partition
    from penstock.scheduling.intake import ScheduleLimits


Result = TypeVar("Result")

#: How much a search for a timestamp may decompress at first: enough for a batch of ordinary size.
_TIMESTAMP_SEARCH_BYTES: Final = 1 << 20
#: How long a scan of records works at a time, and then rests. The interpreter's lock goes to the event loop meanwhile.
_SCAN_SLICE_S: Final = 0.0003
_SCAN_REST_S: Final = 0.001
_CODECS: Final = {
    "uncompressed": Codec.NONE,
    "gzip": Codec.GZIP,
    "snappy": Codec.SNAPPY,
    "lz4": Codec.LZ4,
    "zstd": Codec.ZSTD,
}

# A batch may hold a million records without a key; the error response names only the first ones.
NAMED_RECORDS_MAX: Final = 1000


class BatchWithHeldRecords(bytearray):
    """A batch without its held records, which are in `control` and must be appended right before it."""

    control: bytearray

    def stamped(self, now_ms: int) -> bytearray:
        """Return the control batch with the held records, stamped with the append time."""
        from penstock.scheduling.intake import stamp_append_time

        stamp_append_time(self.control, now_ms)
        return self.control


class DecompressionBudget:
    """Limits the bytes of batches that are decompressed at the same time: per node, and per owner (a connection).

    Waiting owners are served in rotation, each in the order of its own requests. One batch always fits.
    """

    def __init__(self, bytes_max: int, owner_bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._owner_bytes_max = owner_bytes_max
        self.bytes_in_use = 0
        self._of_owner: dict[object, int] = {}
        self._waiting: dict[object, deque[tuple[int, asyncio.Future[None]]]] = {}

    @property
    def waiting_count(self) -> int:
        return sum(map(len, self._waiting.values()))

    async def take(self, owner: object, size: int) -> None:
        """Wait until `size` bytes may be decompressed. The caller returns them with `give_back`."""
        if not self._waiting and self._fits(owner, size):
            self._hold(owner, size)
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append((size, granted))
        self._grant()  # earlier owners may be waiting for their own limit only
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self.give_back(owner, size)
            raise

    def give_back(self, owner: object, size: int) -> None:
        self._hold(owner, -size)
        self._grant()

    def _hold(self, owner: object, size: int) -> None:
        self.bytes_in_use += size
        held = self._of_owner.get(owner, 0) + size
        if held:
            self._of_owner[owner] = held
        else:
            self._of_owner.pop(owner, None)

    def _fits(self, owner: object, size: int) -> bool:
        return self._node_has(size) and self._owner_has(owner, size)

    def _node_has(self, size: int) -> bool:
        return not self.bytes_in_use or self.bytes_in_use + size <= self._bytes_max

    def _owner_has(self, owner: object, size: int) -> bool:
        held = self._of_owner.get(owner, 0)
        return not held or held + size <= self._owner_bytes_max

    def _grant(self) -> None:
        """Grant owner by owner while requests fit. Small ones do not overtake a large one, or it would never fit."""
        while self._waiting and self._grant_next():
            pass

    def _grant_next(self) -> bool:
        for owner, queue in self._waiting.items():
            size, granted = queue[0]
            if granted.done():  # it was cancelled
                break
            if self._owner_has(owner, size):
                if not self._node_has(size):
                    return False
                self._hold(owner, size)
                granted.set_result(None)
                break
        else:
            return False
        queue.popleft()
        # The owner moves to the end of the rotation.
        del self._waiting[owner]
        if queue:
            self._waiting[owner] = queue
        return True


class RecordScans:
    """Runs scans of many records in threads, so that together they leave most of the interpreter to the event loop.

    After a first slice, which is enough for batches of ordinary size, one scan at a time works and rests in turn.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        rest: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock = clock
        self._rest = rest
        self._long_scan = threading.Lock()

    def run(self, steps: Steps[None]) -> None:
        if self._run_slice(steps):
            return
        is_done = False
        while not is_done:
            # Taken for each slice, so that several long scans take turns.
            with self._long_scan:
                is_done = self._run_slice(steps)
                self._rest(_SCAN_REST_S)

    def _run_slice(self, steps: Steps[None]) -> bool:
        """Return whether no steps are left."""
        ends = self._clock() + _SCAN_SLICE_S
        return all(self._clock() < ends for _ in steps)


class BatchPreparer:
    """Runs in threads what may decompress batches, once the budget has memory for the decompressed bytes."""

    def __init__(
        self,
        settings: NodeSettings,
        threads: Threads,
        schedule_limits: Callable[[Partition], ScheduleLimits],
    ) -> None:
        """`schedule_limits` is called in a thread, for partitions that hold records back until they are due."""
        self._threads = threads
        self._schedule_limits = schedule_limits
        self._scans = RecordScans()
        self._bytes_max = settings.integer("penstock.decompress.max.bytes")
        self.budget = DecompressionBudget(
            settings.integer("penstock.decompress.inflight.max.bytes"),
            settings.integer("penstock.decompress.inflight.connection.max.bytes"),
        )

    async def prepare_in_thread(
        self,
        partition: Partition,
        records: bytearray,
        connection: Connection | None,
        *,
        is_owed: bool = False,
    ) -> bytearray | memoryview:
        """Run `prepare` in a thread, once there is memory for the decompressed batch.

        If the reply `is_owed` to a connection that ends meanwhile, the batch is abandoned. Raises ApiError.
        """
        max_bytes = self._bytes_max
        announced = decompressed_bytes(
            records,
            looks_inside=partition.is_compacted or partition.is_scheduled,
            codec=None if partition.codec is None else _CODECS[partition.codec],
            max_bytes=max_bytes,
        )
        # A batch that announces too many bytes is refused at once. A batch that holds more than it announces is tried
        # once more, with the largest size.
        sizes = (0,) if announced > max_bytes else (announced, max_bytes)
        for size in sizes:
            await self.budget.take(connection, size)
            try:
                owed = connection if is_owed else None
                _check_owed(owed)
                return await self._threads.in_thread(
                    self.prepare, partition, records, size or max_bytes, owed
                )
            except DecompressedTooLarge:
                if size in (0, max_bytes):
                    raise
            finally:
                self.budget.give_back(connection, size)
        raise AssertionError("the last size is the largest")

    def prepare(
        self,
        partition: Partition,
        records: bytearray,
        max_bytes: int | None = None,
        owed: Connection | None = None,
    ) -> bytearray | memoryview:
        """Return a batch in the form that the partition's topic requires; see `prepare_batch`. Blocks.

        If the reply is `owed` to a connection that ends meanwhile, the batch is abandoned.
        """
        return prepare_batch(
            memoryview(records),
            compacted=partition.is_compacted,
            codec=None if partition.codec is None else _CODECS[partition.codec],
            max_bytes=self._bytes_max if max_bytes is None else max_bytes,
            stored_bytes_max=partition.log.config.max_message_bytes,
            schedule=self._schedule_limits(partition) if partition.is_scheduled else None,
            run_scan=lambda steps: self._scans.run(_while_owed(steps, owed)),
        )

    async def search_log(self, connection: Connection | None, look: Callable[[int | None], Result]) -> Result:
        """Search a log for a timestamp, once there is memory for what the search decompresses.

        `look` is called in a thread with the number of bytes that it may decompress; None: as many as one batch. The
        search is abandoned if the connection has ended meanwhile. Raises ApiError.
        """
        for size, allowed in (
            (min(_TIMESTAMP_SEARCH_BYTES, self._bytes_max), _TIMESTAMP_SEARCH_BYTES),
            (self._bytes_max, None),
        ):
            await self.budget.take(connection, size)
            try:
                if connection is not None and not connection.is_open:
                    raise ApiError(ErrorCode.request_timed_out)
                return await self._threads.in_thread(look, allowed)
            except DecompressionLimitReached:
                pass
            finally:
                self.budget.give_back(connection, size)
        raise AssertionError("the last search has no limit")


def _check_owed(connection: Connection | None) -> None:
    if connection is not None and not connection.is_open:
        raise ApiError(ErrorCode.request_timed_out)


def _while_owed(steps: Steps[None], connection: Connection | None) -> Steps[None]:
    for _ in steps:
        _check_owed(connection)
        yield


def decompressed_bytes(batch: BytesLike, *, looks_inside: bool, codec: Codec | None, max_bytes: int) -> int:
    """Return the memory that `prepare_batch` needs, as the batch announces it; 0 if it decompresses nothing."""
    if len(batch) < BATCH_HEADER_BYTES:
        return 0
    header = read_header(batch)
    number = header.attributes & CODEC_MASK
    if number not in Codec.__members__.values() or not (looks_inside or Codec(number) is not codec):
        return 0
    return announced_bytes(Codec(number), memoryview(batch)[BATCH_HEADER_BYTES:], max_bytes)


def prepare_batch(
    batch: memoryview,
    *,
    compacted: bool,
    codec: Codec | None,
    max_bytes: int,
    stored_bytes_max: int = sys.maxsize,
    schedule: ScheduleLimits | None = None,
    run_scan: Callable[[Steps[None]], None] = finish,
) -> bytearray | memoryview:
    """Return the batch to append: the same one, an equal one in the topic's codec, or a BatchWithHeldRecords.

    `codec` is None if the topic keeps the producer's codec; `schedule` is None if it holds no records back. `run_scan`
    runs what looks at all records of a compacted topic. Raises INVALID_RECORD for a record without a key in a compacted
    topic, for a record that cannot be scheduled as requested, and for a batch that cannot be read or decompresses to
    more than `max_bytes`. Raises MESSAGE_TOO_LARGE for a batch that would have to be stored uncompressed and is larger
    than `stored_bytes_max`.
    """
    # The append refuses such a batch with the right error; a new checksum here would only hide the damage.
    if not _is_valid(batch):
        return batch
    recode = codec is not None and read_header(batch).codec is not codec
    if not compacted and not recode and schedule is None:
        return batch
    try:
        header, body = open_batch(batch, max_bytes)
        if header.record_count * RECORD_BYTES_MIN > len(body):
            # In another codec the same false record count could pass the checks of the append.
            raise ApiError(
                ErrorCode.invalid_record, f"{len(body)} bytes cannot hold {header.record_count} records"
            )
        if compacted:
            run_scan(_check_keys(header, body))
        if codec is not None:
            header = header._replace(attributes=(header.attributes & ~CODEC_MASK) | codec)
        if schedule is not None and (parted := _split_held(header, body, schedule)) is not None:
            return parted
    except InvalidRecords:
        raise
    except DecompressedTooLarge as error:
        raise DecompressedTooLarge(ErrorCode.invalid_record, error.message) from None
    except ApiError as error:
        if error.code is ErrorCode.request_timed_out:
            raise
        # The checksum is right, so the producer has sent exactly this batch, and a retry would not help.
        raise ApiError(ErrorCode.invalid_record, error.message) from None
    if not recode:
        return batch
    if header.codec is Codec.NONE and len(body) + BATCH_HEADER_BYTES > stored_bytes_max:
        raise ApiError(
            ErrorCode.message_too_large,
            f"record batch of {len(body) + BATCH_HEADER_BYTES} bytes, the topic takes {stored_bytes_max}",
        )
    return pack_batch(header, compress(header.codec, body))


def _is_valid(batch: BytesLike) -> bool:
    if len(batch) < BATCH_HEADER_BYTES:
        return False
    header = read_header(batch)
    return (
        header.size == len(batch)
        and header.magic == 2
        and header.crc == checksum(batch)
        and header.last_offset_delta == header.record_count - 1 >= 0
        and not header.is_control
    )


def _check_keys(header: BatchHeader, body: bytes | memoryview) -> Steps[None]:
    places = yield from keyless_records(header, body, NAMED_RECORDS_MAX)
    if places:
        raise InvalidRecords(
            f"record {places[0]} of the batch has no key, and the topic is compacted", places
        )


def _split_held(
    header: BatchHeader, body: bytes | memoryview, schedule: ScheduleLimits
) -> BatchWithHeldRecords | None:
    from penstock.scheduling.intake import split_batch

    parted = split_batch(header, body, schedule)
    if parted is None:
        return None
    batch = BatchWithHeldRecords(parted.rest)
    batch.control = parted.control
    return batch


#: Errors that depend on the settings of the topic.
_TOPIC_SETTING_ERRORS: Final = frozenset(
    {
        ErrorCode.message_too_large,
        ErrorCode.record_list_too_large,
        ErrorCode.invalid_record,
        ErrorCode.invalid_timestamp,
        ErrorCode.policy_violation,
    }
)


def duplicate_or_raise(partition: Partition, batch: memoryview, error: ApiError) -> LogAppendInfo:
    """Return the result of the first append if the batch is a duplicate. Otherwise raise `error`."""
    found = find_duplicate(partition, batch) if error.code in _TOPIC_SETTING_ERRORS else None
    if found is None:
        raise error
    return found


def find_duplicate(partition: Partition, batch: memoryview) -> LogAppendInfo | None:
    if len(batch) < BATCH_HEADER_BYTES:
        return None
    header, log = read_header(batch), partition.log
    state = log.producers.states.get(header.producer_id)
    if state is None or state.epoch != header.producer_epoch or header.crc != checksum(batch):
        return None
    sequence = header.base_sequence
    trace = state.find_duplicate(sequence, increment_sequence(sequence, header.last_offset_delta))
    if trace is None:
        return None
    append_time_ms = trace.timestamp if log.config.timestamp_type == "LogAppendTime" else -1
    return LogAppendInfo(trace.base_offset, trace.last_offset, append_time_ms, True, log.end)
