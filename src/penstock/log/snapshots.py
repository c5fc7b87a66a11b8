"""Producer state on disk: Kafka's `<offset>.snapshot` files.

Kafka keeps one row for each producer. We write one for each remembered batch, oldest first, so that the whole
window survives a restart; Kafka's reader takes the last row of a producer, the same as its own would be.
"""

import logging
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from penstock.log.checkpoints import write_synced
from penstock.log.config import INT32_MAX
from penstock.log.names import SNAPSHOT, offset_file, parse_offset_file
from penstock.log.producers import BatchTrace, Producers, ProducerState
from penstock.protocol.checksum import crc32c

_VERSION: Final = 1
_PREFIX: Final = struct.Struct(">hIi")  # version, crc of what follows it, number of rows
_CRC_FROM: Final = 6
#: producer id, epoch, last sequence, last offset, delta, timestamp, coordinator epoch, transaction's start
_ROW: Final = struct.Struct(">qhiqiqiq")

_logger = logging.getLogger("penstock.log")


class DamagedSnapshot(ValueError):
    """A snapshot that is not used; the state is rebuilt from an older one and the log."""


class Snapshot(NamedTuple):
    """Rows copied on the event loop, to be written by a thread."""

    offset: int
    rows: list[tuple[int, ...]]

    def write(self, directory: Path, *, synced: bool = True) -> None:
        """Not atomic: one that is torn fails its checksum, and an older one serves."""
        path = directory / offset_file(self.offset, SNAPSHOT)
        if synced:
            write_synced(path, encode(self.rows))
        else:
            path.write_bytes(encode(self.rows))


def take(producers: Producers, offset: int) -> Snapshot:
    return Snapshot(offset, [row for item in producers.states.items() for row in _rows(*item)])


def encode(rows: list[tuple[int, ...]]) -> bytes:
    body = _PREFIX.pack(_VERSION, 0, len(rows))[_CRC_FROM:] + b"".join(_ROW.pack(*row) for row in rows)
    return _PREFIX.pack(_VERSION, crc32c(body), 0)[:_CRC_FROM] + body


def decode(data: bytes) -> dict[int, ProducerState]:
    """Raises DamagedSnapshot."""
    if len(data) < _PREFIX.size:
        raise DamagedSnapshot(f"{len(data)} bytes")
    version, crc, count = _PREFIX.unpack_from(data)
    if version != _VERSION:
        raise DamagedSnapshot(f"unknown version {version}")
    if crc32c(memoryview(data)[_CRC_FROM:]) != crc or len(data) != _PREFIX.size + count * _ROW.size:
        raise DamagedSnapshot("checksum does not match")
    states: dict[int, ProducerState] = {}
    for row in _ROW.iter_unpack(memoryview(data)[_PREFIX.size :]):
        _restore_row(states, *row)
    return states


def load_newest(directory: Path, upto: int) -> tuple[int, dict[int, ProducerState]] | None:
    """The newest snapshot at or below an offset that can be read; damaged ones are removed."""
    for offset in sorted((o for o in list_offsets(directory) if o <= upto), reverse=True):
        path = directory / offset_file(offset, SNAPSHOT)
        try:
            return offset, decode(path.read_bytes())
        except DamagedSnapshot as error:
            _logger.warning("producer snapshot dropped", extra={"file": str(path), "reason": str(error)})
            path.unlink()
    return None


def list_offsets(directory: Path) -> list[int]:
    parsed = (parse_offset_file(name) for name in os.listdir(directory))
    return [item[0] for item in parsed if item is not None and item[1:] == (SNAPSHOT, "")]


def remove(directory: Path, offsets: Iterable[int]) -> None:
    for offset in offsets:
        (directory / offset_file(offset, SNAPSHOT)).unlink(missing_ok=True)


def _rows(producer_id: int, state: ProducerState) -> list[tuple[int, ...]]:
    last = (state.coordinator_epoch, state.txn_first_offset)
    if not state.batches:
        return [(producer_id, state.epoch, -1, -1, 0, state.last_timestamp, *last)]
    # The last row's timestamp is when the producer was last seen; that is what readers take it for.
    traces = [*state.batches[:-1], state.batches[-1]._replace(timestamp=state.last_timestamp)]
    return [
        (
            producer_id,
            state.epoch,
            t.last_sequence,
            t.last_offset,
            t.last_offset - t.base_offset,
            t.timestamp,
            *last,
        )
        for t in traces
    ]


def _restore_row(
    states: dict[int, ProducerState], producer_id: int, epoch: int, last_sequence: int, last_offset: int,
    delta: int, timestamp: int, coordinator_epoch: int, txn_first_offset: int,
) -> None:  # fmt: skip
    state = states.setdefault(producer_id, ProducerState(epoch))
    state.enter_epoch(epoch)
    if last_offset >= 0:
        first_sequence = last_sequence if last_sequence < 0 else (last_sequence - delta) & INT32_MAX
        state.add(BatchTrace(first_sequence, last_sequence, last_offset - delta, last_offset, timestamp))
    state.last_timestamp = timestamp
    state.coordinator_epoch = coordinator_epoch
    state.txn_first_offset = txn_first_offset
