"""Checkpoint files: what a data directory knows about its logs after a crash.

Kafka's text checkpoints (recovery points, log start offsets, high watermarks) are replaced atomically: a reader
sees the old content or the new. `penstock-synced-offsets` holds, for each log, the offset up to which it is on
disk; recovery may truncate a log only beyond it. An entry is written after each sync has returned and is not synced
itself, so it costs no fsync per produce: it is exact after a killed process, and at worst too low after a power
failure. It is never too high, because a truncation lowers it durably first. The node syncs the file once a second
while it changes. The file is an array of 32-byte slots, aligned so that no slot crosses a sector: topic id,
partition, offset, CRC-32.
"""

import logging
import os
import struct
import threading
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final
from uuid import UUID

from penstock.protocol.durable_files import replace_durably

TopicPartition = tuple[str, int]


class CorruptCheckpoint(ValueError):
    """A checkpoint file with malformed content."""


def write_checkpoint(path: Path, rows: Iterable[str], version: int = 0) -> None:
    lines = list(rows)
    replace_durably(path, "".join(f"{line}\n" for line in (version, len(lines), *lines)).encode())


def read_checkpoint(path: Path, version: int = 0) -> list[str]:
    """Returns the rows; none if there is no such file. Raises CorruptCheckpoint."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except FileNotFoundError:
        return []
    except UnicodeDecodeError as error:
        raise CorruptCheckpoint(f"{path} is no text: {error}") from None
    if len(lines) < 2:
        raise CorruptCheckpoint(f"{path} is cut short")
    if lines[0] != str(version):
        raise CorruptCheckpoint(f"{path} has version {lines[0]!r}, expected {version}")
    if lines[1] != str(len(lines) - 2):
        raise CorruptCheckpoint(f"{path} promises {lines[1]!r} rows and has {len(lines) - 2}")
    return lines[2:]


def write_offset_checkpoint(path: Path, offsets: Mapping[TopicPartition, int]) -> None:
    write_checkpoint(
        path, (f"{topic} {index} {offset}" for (topic, index), offset in sorted(offsets.items()))
    )


def read_offset_checkpoint(path: Path) -> dict[TopicPartition, int]:
    """Returns the offsets by partition. Raises CorruptCheckpoint."""
    offsets: dict[TopicPartition, int] = {}
    for row in read_checkpoint(path):
        try:
            topic, index, offset = row.split(" ")
            offsets[topic, int(index)] = int(offset)
        except ValueError:
            raise CorruptCheckpoint(f"{path} has a malformed row: {row!r}") from None
    return offsets


RECOVERY_POINT_CHECKPOINT: Final = "recovery-point-offset-checkpoint"
LOG_START_OFFSET_CHECKPOINT: Final = "log-start-offset-checkpoint"
HIGH_WATERMARK_CHECKPOINT: Final = "replication-offset-checkpoint"

_logger = logging.getLogger("penstock.log")


class OffsetCheckpoints:
    """Kafka's three checkpoints. Callers hold the log manager's lock when they change them."""

    __slots__ = ("_directory", "_stale", "high_watermarks", "recovery_points", "start_offsets")

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.recovery_points = _read_or_discard(directory / RECOVERY_POINT_CHECKPOINT)
        self.start_offsets = _read_or_discard(directory / LOG_START_OFFSET_CHECKPOINT)
        self.high_watermarks = _read_or_discard(directory / HIGH_WATERMARK_CHECKPOINT)
        self._stale: set[TopicPartition] = set()  # removed here, but not yet from the files

    def write(self, high_watermarks: Mapping[TopicPartition, int] | None = None) -> None:
        """Durable when it returns. Raises OSError."""
        write_offset_checkpoint(self._directory / RECOVERY_POINT_CHECKPOINT, self.recovery_points)
        write_offset_checkpoint(self._directory / LOG_START_OFFSET_CHECKPOINT, self.start_offsets)
        if high_watermarks is not None or self._stale:
            self.write_high_watermarks(high_watermarks or {})
        self._stale.clear()

    def write_high_watermarks(self, high_watermarks: Mapping[TopicPartition, int]) -> None:
        """Durable when it returns. Raises OSError."""
        self.high_watermarks.update(high_watermarks)
        write_offset_checkpoint(self._directory / HIGH_WATERMARK_CHECKPOINT, self.high_watermarks)

    def forget(self, partition: TopicPartition) -> None:
        """Removes a log that is gone; the files change when they are next written."""
        for offsets in (self.recovery_points, self.start_offsets, self.high_watermarks):
            if offsets.pop(partition, None) is not None:
                self._stale.add(partition)

    def forget_durably(self, partitions: Iterable[TopicPartition]) -> None:
        """Call it before logs of these names are created: a log must never be opened with another log's offsets."""
        names = list(partitions)
        for partition in names:
            self.forget(partition)
        if not self._stale.isdisjoint(names):
            self.write()


def _read_or_discard(path: Path) -> dict[TopicPartition, int]:
    """Without a corrupt checkpoint no data is lost, but everything is checked from the start."""
    try:
        return read_offset_checkpoint(path)
    except CorruptCheckpoint as error:
        _logger.warning("checkpoint dropped", extra={"file": str(path), "reason": str(error)})
        return {}


SYNCED_OFFSETS_FILE: Final = "penstock-synced-offsets"

_SLOT_KEY: Final = struct.Struct(">16si")
_SLOT_OFFSET: Final = struct.Struct(">q")
_SLOT_CRC: Final = struct.Struct(">I")
_SLOT_BYTES: Final = _SLOT_KEY.size + _SLOT_OFFSET.size + _SLOT_CRC.size
_FREE_SLOT: Final = bytes(_SLOT_BYTES)


#: Topic id and partition.
SlotKey = tuple[UUID, int]


class SyncedOffsetSlot:
    """The entry of one log. One thread at a time calls `note`, and only after a sync."""

    __slots__ = ("_file", "_key", "_key_crc", "offset", "position")

    def __init__(self, file: "SyncedOffsets", key: bytes, position: int, offset: int) -> None:
        self._file = file
        self._key = key
        self._key_crc = zlib.crc32(key)
        self.position = position
        self.offset = offset

    def note(self, offset: int) -> None:
        """Records that everything below `offset` is on disk. A lower offset changes nothing: see `lower`."""
        if offset > self.offset:
            self.offset = offset
            with suppress(OSError):  # on failure the old entry stays, which is too low and therefore safe
                self._write()

    def lower(self, offset: int) -> None:
        """Call it before the log is truncated to `offset`. Durable when it returns. Raises OSError."""
        if offset < self.offset:
            self.offset = offset
            self._write()
            self._file.sync()

    def _write(self) -> None:
        value = _SLOT_OFFSET.pack(self.offset)
        self._file.write(self.position, self._key + value + _SLOT_CRC.pack(zlib.crc32(value, self._key_crc)))


class SyncedOffsets:
    """The slots of all logs in a data folder. Thread-safe."""

    def __init__(self, directory: Path) -> None:
        """Raises OSError. A slot with a wrong checksum becomes free: its log is then checked from further back."""
        path = directory / SYNCED_OFFSETS_FILE
        #: Whether this is the first run that keeps entries here. A log without an entry may then have existed before.
        self.is_new = not path.exists()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._lock = threading.Lock()
        self._slots: dict[SlotKey, SyncedOffsetSlot] = {}
        self._free: list[int] = []
        self.is_dirty = False
        self._read(path)

    def _read(self, path: Path) -> None:
        data = path.read_bytes()
        self._end = len(data) - len(data) % _SLOT_BYTES
        for position in range(0, self._end, _SLOT_BYTES):
            slot = data[position : position + _SLOT_BYTES]
            (crc,) = _SLOT_CRC.unpack_from(slot, _SLOT_BYTES - _SLOT_CRC.size)
            if slot == _FREE_SLOT or zlib.crc32(slot[: -_SLOT_CRC.size]) != crc:
                if slot != _FREE_SLOT:
                    _logger.warning("synced offset dropped", extra={"file": str(path), "position": position})
                self._free.append(position)
                continue
            topic_id, index = _SLOT_KEY.unpack_from(slot)
            (offset,) = _SLOT_OFFSET.unpack_from(slot, _SLOT_KEY.size)
            key = (UUID(bytes=topic_id), index)
            self._slots[key] = SyncedOffsetSlot(self, slot[: _SLOT_KEY.size], position, offset)

    def __contains__(self, key: SlotKey) -> bool:
        return key in self._slots

    def offset(self, key: SlotKey) -> int:
        """Returns 0 if nothing is known."""
        slot = self._slots.get(key)
        return 0 if slot is None else slot.offset

    def slot(self, key: SlotKey) -> SyncedOffsetSlot:
        """Returns the slot of a log, and creates it if there is none. It is durable after the next `sync`."""
        with self._lock:
            slot = self._slots.get(key)
            if slot is None:
                position = self._free.pop() if self._free else self._end
                self._end = max(self._end, position + _SLOT_BYTES)
                slot = SyncedOffsetSlot(self, _SLOT_KEY.pack(key[0].bytes, key[1]), position, -1)
                self._slots[key] = slot
                slot.note(0)
        return slot

    def forget(self, keys: Iterable[SlotKey]) -> None:
        """Removes logs that are gone from the folder or start over. Durable when it returns. Raises OSError."""
        with self._lock:
            slots = [slot for slot in (self._slots.pop(key, None) for key in keys) if slot is not None]
            for slot in slots:
                self.write(slot.position, _FREE_SLOT)
                self._free.append(slot.position)
        if slots:
            self.sync()

    def write(self, position: int, data: bytes) -> None:
        """Raises OSError."""
        os.pwrite(self._fd, data, position)
        self.is_dirty = True

    def sync(self) -> None:
        """Raises OSError."""
        if self.is_dirty:
            self.is_dirty = False
            os.fdatasync(self._fd)

    def close(self) -> None:
        with suppress(OSError):
            self.sync()
        fd, self._fd = self._fd, -1  # another file may soon get this number
        os.close(fd)
