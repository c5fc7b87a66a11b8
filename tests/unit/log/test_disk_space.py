"""A full disk: the reserve is used for what frees space, and all other writes are refused."""

import errno
import os
from pathlib import Path

import pytest
from tests.unit.log.helpers import append, fill, open_log, values_in

from penstock.log.config import LogConfig
from penstock.log.disk_space import RESERVE_FILE, DiskSpace
from penstock.log.segment_files import FilePool
from penstock.protocol.errors import ApiError, ErrorCode


class NarrowDisk:
    """It has room for writes only while the reserve is given up, and only for so many of them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.writes_left = 0
        self.attempts = 0
        self._reserve = folder / RESERVE_FILE
        self._real = os.pwrite
        monkeypatch.setattr("penstock.log.segment_files.os.pwrite", self._write)

    def _write(self, fd: int, data: bytes, position: int) -> int:
        self.attempts += 1
        if self._reserve.exists() or not self.writes_left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.writes_left -= 1
        return self._real(fd, data, position)


@pytest.fixture
def space(tmp_path: Path) -> DiskSpace:
    return DiskSpace(tmp_path, 1 << 16)


def without_room(space: DiskSpace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space, "_free_bytes", lambda: 1 << 16)


def test_records_are_refused_without_trying_until_there_is_room(tmp_path, space, monkeypatch):
    files = FilePool(space=space)
    log = open_log(tmp_path / "t-0", files=files)
    fill(log, 3)
    with monkeypatch.context() as patch:
        disk = NarrowDisk(tmp_path, patch)
        without_room(space, patch)
        disk.writes_left = 100
        for _ in range(5):
            with pytest.raises(ApiError) as refused:
                append(log, b"x")
            assert refused.value.code is ErrorCode.kafka_storage_error
        assert (disk.attempts, space.is_full, (tmp_path / RESERVE_FILE).exists()) == (1, True, False)
    append(log, b"room again")
    assert (space.is_full, (tmp_path / RESERVE_FILE).stat().st_size) == (False, 1 << 16)
    assert values_in(log)[3:] == [b"room again"]


def test_the_metadata_log_is_written_from_the_reserve(tmp_path, space, monkeypatch):
    files = FilePool(space=space)
    log = open_log(tmp_path / "m-0", LogConfig(uses_reserve=True), files=files)
    disk = NarrowDisk(tmp_path, monkeypatch)
    without_room(space, monkeypatch)
    disk.writes_left = 2
    assert append(log, b"1").base_offset == 0
    assert append(log, b"2").base_offset == 1
    with pytest.raises(ApiError):
        append(log, b"the reserve is used up")
    assert values_in(log) == [b"1", b"2"]


def test_a_disk_that_is_full_at_the_start_has_no_reserve(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("penstock.log.disk_space.os.posix_fallocate", refuse)
        space = DiskSpace(tmp_path)
        assert (space.is_full, list(tmp_path.iterdir())) == (True, [])
    assert not space.refuse()
    assert not DiskSpace(tmp_path).is_full


def test_other_failures_are_not_taken_for_a_full_disk(space):
    def broken() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.raises(OSError, match="Input/output"):
        space.with_reserve(broken)
    assert not space.is_full


def test_what_failed_before_there_was_room_again_does_not_count(space, monkeypatch):
    """A thread tells late of a write that has failed: the disk is not full a second time."""
    with monkeypatch.context() as patch:
        without_room(space, patch)
        space.ran_out(OSError(errno.ENOSPC, "full"))
    failures = [OSError(errno.ENOSPC, "as it was before")]

    def write() -> str:
        if failures:
            space.look()
            raise failures.pop()
        return "written"

    assert space.with_reserve(write) == "written"
    assert (space.is_full, space.recoveries) == (False, 1)
