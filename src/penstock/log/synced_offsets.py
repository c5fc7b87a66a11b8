"""How far the disk has each log, noted after every sync: `penstock-synced-offsets` in the data folder.

Recovery may cut a log only beyond this. A note is written after the sync that it tells of has returned, and is not
synced itself, so it costs no fsync per produce: a process that is killed leaves it exact, and after a power cut it is
at worst too low. It is never too high, because a truncation lowers it durably first. The node syncs the file once a
second while it changes.

The file is an array of slots of 32 bytes, aligned so that none crosses a sector: topic id, partition, offset, CRC-32.
"""

import logging
import os
import struct
import threading
import zlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final
from uuid import UUID

SYNCED_OFFSETS: Final = "penstock-synced-offsets"

_KEY: Final = struct.Struct(">16si")
_VALUE: Final = struct.Struct(">q")
_CRC: Final = struct.Struct(">I")
_SLOT_BYTES: Final = _KEY.size + _VALUE.size + _CRC.size
_FREE: Final = bytes(_SLOT_BYTES)

_logger = logging.getLogger("penstock.log")

#: Topic id and partition.
SlotKey = tuple[UUID, int]


class SyncedSlot:
    """The note of one log. `note` is called by one thread at a time, and only after a sync."""

    __slots__ = ("_file", "_key", "_key_crc", "offset", "place")

    def __init__(self, file: "SyncedOffsets", key: bytes, place: int, offset: int) -> None:
        self._file = file
        self._key = key
        self._key_crc = zlib.crc32(key)
        self.place = place
        self.offset = offset

    def note(self, offset: int) -> None:
        """Everything below `offset` is on disk. A lower offset changes nothing: see `lower`."""
        if offset > self.offset:
            self.offset = offset
            with suppress(OSError):  # what cannot be noted leaves an older note, too low and therefore safe
                self._write()

    def lower(self, offset: int) -> None:
        """Before the log is cut back to `offset`. Durable when it returns. Raises OSError."""
        if offset < self.offset:
            self.offset = offset
            self._write()
            self._file.sync()

    def _write(self) -> None:
        value = _VALUE.pack(self.offset)
        self._file.write(self.place, self._key + value + _CRC.pack(zlib.crc32(value, self._key_crc)))


class SyncedOffsets:
    """The slots of all logs in a data folder. Safe in any thread."""

    def __init__(self, directory: Path) -> None:
        """Raises OSError. A slot that fails its checksum is free again: its log is then checked from further back."""
        path = directory / SYNCED_OFFSETS
        #: Whether an earlier run has kept notes here; without, a log that has none may still have existed.
        self.is_new = not path.exists()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._lock = threading.Lock()
        self._slots: dict[SlotKey, SyncedSlot] = {}
        self._free: list[int] = []
        self.is_dirty = False
        self._read(path)

    def _read(self, path: Path) -> None:
        data = path.read_bytes()
        self._end = len(data) - len(data) % _SLOT_BYTES
        for place in range(0, self._end, _SLOT_BYTES):
            slot = data[place : place + _SLOT_BYTES]
            (crc,) = _CRC.unpack_from(slot, _SLOT_BYTES - _CRC.size)
            if slot == _FREE or zlib.crc32(slot[: -_CRC.size]) != crc:
                if slot != _FREE:
                    _logger.warning("synced offset dropped", extra={"file": str(path), "position": place})
                self._free.append(place)
                continue
            topic_id, index = _KEY.unpack_from(slot)
            (offset,) = _VALUE.unpack_from(slot, _KEY.size)
            key = (UUID(bytes=topic_id), index)
            self._slots[key] = SyncedSlot(self, slot[: _KEY.size], place, offset)

    def __contains__(self, key: SlotKey) -> bool:
        return key in self._slots

    def offset(self, key: SlotKey) -> int:
        """0 where nothing is known."""
        slot = self._slots.get(key)
        return 0 if slot is None else slot.offset

    def slot(self, key: SlotKey) -> SyncedSlot:
        """The slot of a log, made if there is none yet. It is durable after the next `sync`."""
        with self._lock:
            slot = self._slots.get(key)
            if slot is None:
                place = self._free.pop() if self._free else self._end
                self._end = max(self._end, place + _SLOT_BYTES)
                slot = SyncedSlot(self, _KEY.pack(key[0].bytes, key[1]), place, -1)
                self._slots[key] = slot
                slot.note(0)
        return slot

    def forget(self, keys: Iterable[SlotKey]) -> None:
        """These logs have gone from the folder, or are begun again. Durable when it returns. Raises OSError."""
        with self._lock:
            slots = [slot for slot in (self._slots.pop(key, None) for key in keys) if slot is not None]
            for slot in slots:
                self.write(slot.place, _FREE)
                self._free.append(slot.place)
        if slots:
            self.sync()

    def write(self, place: int, data: bytes) -> None:
        """Raises OSError."""
        os.pwrite(self._fd, data, place)
        self.is_dirty = True

    def sync(self) -> None:
        """Raises OSError."""
        if self.is_dirty:
            self.is_dirty = False
            os.fdatasync(self._fd)

    def close(self) -> None:
        with suppress(OSError):
            self.sync()
        fd, self._fd = self._fd, -1  # its number may soon be another file's
        os.close(fd)
