"""Producer state on disk: Kafka's `<offset>.snapshot` files, and rebuilding the state from a snapshot and the log
after it.

Kafka writes one row for each producer. We write one row for each retained batch, oldest first, so that duplicates
of all of them are recognised after a restart; Kafka's reader takes the last row of a producer, which is the row
that Kafka itself would have written. A batch that was acknowledged and not written has a sequence and offset -1.
"""

import logging
import os
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, NamedTuple

from penstock.log.config import INT32_MAX, INT64_MAX
from penstock.log.data_directory import PRODUCER_SNAPSHOT_SUFFIX, offset_file_name, parse_offset_file_name
from penstock.log.index_files import modified_ms
from penstock.log.indexes import TransactionIndex
from penstock.log.producer_state import (
    BatchMetadata,
    CompletedTransaction,
    ProducerStateEntry,
    ProducerStateManager,
    batch_metadata,
    skipped_batch_metadata,
)
from penstock.log.segment import LogSegment, LogSegments, iter_batch_headers, read_batch
from penstock.log.segment_files import FilePool
from penstock.protocol.durable_files import write_synced
from penstock.protocol.record_batch import crc32c, parse_end_marker

_SNAPSHOT_VERSION: Final = 1
_SNAPSHOT_PREFIX: Final = struct.Struct(">hIi")  # version, crc of what follows it, number of rows
_SNAPSHOT_CRC_FROM: Final = 6
#: producer id, epoch, last sequence, last offset, delta, timestamp, coordinator epoch, transaction's start
_SNAPSHOT_ROW: Final = struct.Struct(">qhiqiqiq")

_logger = logging.getLogger("penstock.log")


class CorruptProducerSnapshot(ValueError):
    """A snapshot that cannot be used; the state is rebuilt from an older one and the log."""


class ProducerSnapshot(NamedTuple):
    """Rows copied on the event loop, for a thread to write."""

    offset: int
    rows: list[tuple[int, ...]]

    def write(self, directory: Path, *, synced: bool = True) -> None:
        """Not atomic: a torn snapshot fails its checksum, and an older one is used instead."""
        path = directory / offset_file_name(self.offset, PRODUCER_SNAPSHOT_SUFFIX)
        if synced:
            write_synced(path, encode_snapshot(self.rows))
        else:
            path.write_bytes(encode_snapshot(self.rows))


def take_snapshot(producers: ProducerStateManager, offset: int) -> ProducerSnapshot:
    return ProducerSnapshot(
        offset, [row for item in producers.states.items() for row in _snapshot_rows(*item)]
    )


def encode_snapshot(rows: list[tuple[int, ...]]) -> bytes:
    body = _SNAPSHOT_PREFIX.pack(_SNAPSHOT_VERSION, 0, len(rows))[_SNAPSHOT_CRC_FROM:] + b"".join(
        _SNAPSHOT_ROW.pack(*row) for row in rows
    )
    return _SNAPSHOT_PREFIX.pack(_SNAPSHOT_VERSION, crc32c(body), 0)[:_SNAPSHOT_CRC_FROM] + body


def decode_snapshot(data: bytes) -> dict[int, ProducerStateEntry]:
    """Raises CorruptProducerSnapshot."""
    if len(data) < _SNAPSHOT_PREFIX.size:
        raise CorruptProducerSnapshot(f"{len(data)} bytes")
    version, crc, count = _SNAPSHOT_PREFIX.unpack_from(data)
    if version != _SNAPSHOT_VERSION:
        raise CorruptProducerSnapshot(f"unknown version {version}")
    if (
        crc32c(memoryview(data)[_SNAPSHOT_CRC_FROM:]) != crc
        or len(data) != _SNAPSHOT_PREFIX.size + count * _SNAPSHOT_ROW.size
    ):
        raise CorruptProducerSnapshot("checksum does not match")
    states: dict[int, ProducerStateEntry] = {}
    for row in _SNAPSHOT_ROW.iter_unpack(memoryview(data)[_SNAPSHOT_PREFIX.size :]):
        _restore_row(states, *row)
    return states


def load_newest_snapshot(directory: Path, upto: int) -> tuple[int, dict[int, ProducerStateEntry]] | None:
    """Returns the newest readable snapshot at or below an offset; removes corrupt ones."""
    for offset in sorted((o for o in list_snapshot_offsets(directory) if o <= upto), reverse=True):
        path = directory / offset_file_name(offset, PRODUCER_SNAPSHOT_SUFFIX)
        try:
            return offset, decode_snapshot(path.read_bytes())
        except CorruptProducerSnapshot as error:
            _logger.warning("producer snapshot dropped", extra={"file": str(path), "reason": str(error)})
            path.unlink()
    return None


def list_snapshot_offsets(directory: Path) -> list[int]:
    parsed = (parse_offset_file_name(name) for name in os.listdir(directory))
    return [item[0] for item in parsed if item is not None and item[1:] == (PRODUCER_SNAPSHOT_SUFFIX, "")]


def remove_snapshots(directory: Path, offsets: Iterable[int]) -> None:
    for offset in offsets:
        (directory / offset_file_name(offset, PRODUCER_SNAPSHOT_SUFFIX)).unlink(missing_ok=True)


def _snapshot_rows(producer_id: int, state: ProducerStateEntry) -> list[tuple[int, ...]]:
    last = (state.coordinator_epoch, state.txn_first_offset)
    if not state.batches:
        return [(producer_id, state.epoch, -1, -1, 0, state.last_timestamp, *last)]
    # Readers use the timestamp of the last row as the time when the producer was last seen.
    traces = [*state.batches[:-1], state.batches[-1]._replace(timestamp=state.last_timestamp)]
    return [
        (
            producer_id,
            state.epoch,
            t.last_sequence,
            t.last_offset,
            t.last_delta if t.first_sequence >= 0 else t.last_offset - t.base_offset,
            t.timestamp,
            *last,
        )
        for t in traces
    ]


def _restore_row(
    states: dict[int, ProducerStateEntry], producer_id: int, epoch: int, last_sequence: int, last_offset: int,
    delta: int, timestamp: int, coordinator_epoch: int, txn_first_offset: int,
) -> None:  # fmt: skip
    state = states.setdefault(producer_id, ProducerStateEntry(epoch))
    state.enter_epoch(epoch)
    if last_offset >= 0:
        first_sequence = last_sequence if last_sequence < 0 else (last_sequence - delta) & INT32_MAX
        state.add(BatchMetadata(first_sequence, last_sequence, last_offset - delta, last_offset, timestamp))
    elif last_sequence >= 0:
        state.add(skipped_batch_metadata((last_sequence - delta) & INT32_MAX, delta, timestamp))
    state.last_timestamp = timestamp
    state.coordinator_epoch = coordinator_epoch
    state.txn_first_offset = txn_first_offset


def restore_producer_state(
    producers: ProducerStateManager,
    directory: Path,
    segments: LogSegments,
    files: FilePool,
    start_offset: int,
    end_offset: int,
    now_ms: int,
) -> None:
    """Loads the newest usable snapshot and replays the log after it."""
    position, states = load_newest_snapshot(directory, end_offset) or (start_offset, {})
    producers.restore(states.items(), now_ms)
    if position < end_offset:
        for segment in segments.items[segments.slot_of(position) :]:
            _replay_segment(producers, segment, files, position)
        producers.expire(now_ms)
    producers.transactions.truncate(end_offset)


def prune_snapshots(directory: Path, segments: LogSegments, end_offset: int) -> None:
    """Keeps the snapshots at segment base offsets, for truncation, and the newest one, for the next start."""
    offsets = list_snapshot_offsets(directory)
    newest = max((offset for offset in offsets if offset <= end_offset), default=None)
    keep = {newest, *segments.bases}
    remove_snapshots(directory, (offset for offset in offsets if offset > end_offset or offset not in keep))


def rebuild_transaction_indexes(
    segments: LogSegments, wanted: list[LogSegment], files: FilePool, start_offset: int
) -> list[TransactionIndex]:
    """Finds the aborted transactions of adjacent segments again by reading the log."""
    directory, base_offset = wanted[0].directory, wanted[0].base_offset
    position, states = load_newest_snapshot(directory, base_offset) or (start_offset, {})
    producers = ProducerStateManager(INT64_MAX)
    producers.restore(states.items(), 0)
    for segment in segments.items[segments.slot_of(position) :]:
        if segment.base_offset < base_offset:
            _replay_segment(producers, segment, files, position)
    indexes: list[TransactionIndex] = []
    for segment in wanted:
        indexes.append(aborted := TransactionIndex())
        _replay_segment(producers, segment, files, position, aborted.note)
        segment.aborted, segment.has_aborted = aborted, len(aborted) > 0
    return indexes


def _replay_segment(
    producers: ProducerStateManager,
    segment: LogSegment,
    files: FilePool,
    from_offset: int,
    note_ended: Callable[[CompletedTransaction], None] = lambda _: None,
) -> None:
    touched_ms = modified_ms(segment)
    file = files.pin(segment)
    try:
        for position, header in iter_batch_headers(
            file.fd, 0, segment.size, damaged_ranges=segment.damaged_ranges
        ):
            if header.producer_id < 0 or header.last_offset < from_offset:
                continue
            # Record timestamps may be far in the past; the modification time shows when the file was written.
            seen_ms = max(header.max_timestamp, touched_ms)
            if header.is_control:
                marker = parse_end_marker(read_batch(file.fd, position, header))
                if marker is not None and (
                    ended := producers.learn_marker(marker, header.base_offset, seen_ms)
                ):
                    note_ended(ended)
            else:
                trace = batch_metadata(
                    header.base_sequence, header.base_offset, header.last_offset_delta, header.max_timestamp
                )
                producers.learn(
                    header.producer_id, header.producer_epoch, trace, header.is_transactional, seen_ms
                )
    finally:
        files.unpin(file)
