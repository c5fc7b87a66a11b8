"""Flushing: what counts as durable, and when."""

import os

import pytest
from tests.unit.log.helpers import append, files_in, fill, flush, open_files, open_log

from penstock.log.config import LogConfig
from penstock.log.flush import HELD_FILES_MAX

SMALL = LogConfig(segment_bytes=400)


class Disk:
    """Notes which files below a folder are synced; a node of another test may still have threads."""

    def __init__(self, monkeypatch, folder):
        self.synced: list[str] = []
        self._folder = str(folder)
        for name in ("fsync", "fdatasync"):
            monkeypatch.setattr(os, name, self._noting(getattr(os, name)))

    def _noting(self, real):
        def sync(fd):
            path = os.readlink(f"/proc/self/fd/{fd}")
            if path.startswith(self._folder):
                self.synced.append(os.path.basename(path))
            real(fd)

        return sync


def test_synced_moves_to_where_the_log_ended_when_the_flush_began(tmp_path):
    log = open_log(tmp_path / "t-0")
    fill(log, 2)
    assert log.synced.offset == 0
    flush_job = log.flush_begin()
    begun = log.end
    fill(log, 2)
    flush_job.run()
    assert log.synced.offset == 0
    log.flush_done(flush_job)
    assert log.synced == begun
    flush(log)
    assert log.synced == log.end
    assert log.flush_begin() is None
    assert not log.needs_flush


def test_every_rolled_segment_is_synced_before_the_flush_is_done(tmp_path, monkeypatch):
    log = open_log(tmp_path / "t-0", SMALL)
    fill(log, 10)
    names = {segment.path.name for segment in log.segments}
    assert len(names) > 2
    assert log.rolled_unsynced == len(names) - 1
    disk = Disk(monkeypatch, tmp_path)
    flush(log)
    assert names <= set(disk.synced)
    assert "t-0" in disk.synced
    assert log.rolled_unsynced == 0
    assert {name.removesuffix(".index") for name in files_in(log.directory, ".index")} == {
        segment.path.stem for segment in log.segments[:-1]
    }


def test_a_flush_after_that_syncs_only_the_active_segment(tmp_path, monkeypatch):
    log = open_log(tmp_path / "t-0", SMALL)
    fill(log, 10)
    flush(log)
    log.configure(LogConfig())
    fill(log, 1)
    disk = Disk(monkeypatch, tmp_path)
    flush(log)
    assert disk.synced == [log.active_segment.path.name]


def test_segments_beyond_the_held_descriptors_are_synced_too(tmp_path, monkeypatch):
    log = open_log(tmp_path / "t-0", LogConfig(segment_bytes=180))
    fill(log, HELD_FILES_MAX * 2)
    assert len(open_files(tmp_path)) <= HELD_FILES_MAX + 1
    disk = Disk(monkeypatch, tmp_path)
    flush(log)
    assert {segment.path.name for segment in log.segments} <= set(disk.synced)


def test_an_error_from_fsync_is_not_caught(tmp_path, monkeypatch):
    log = open_log(tmp_path / "t-0")
    fill(log, 1)

    def broken(fd):
        raise OSError(5, "I/O error")

    monkeypatch.setattr(os, "fdatasync", broken)
    flush_job = log.flush_begin()
    with pytest.raises(OSError, match="I/O error"):
        flush_job.run()
    assert log.synced.offset == 0


@pytest.mark.parametrize(
    "writer", ["penstock.log.flush.write_indexes", "penstock.log.flush.leader_epochs.write"]
)
def test_a_full_disk_keeps_notes_from_being_written_but_not_data_from_being_durable(
    tmp_path, monkeypatch, writer
):
    log = open_log(tmp_path / "t-0", SMALL)
    fill(log, 10)

    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(writer, full)
        flush(log)
        assert (log.synced, log.recovery_point) == (log.end, 0)
        assert log.needs_flush
    flush(log)
    assert (log.recovery_point, log.needs_flush) == (log.end_offset, False)
    assert (log.directory / "leader-epoch-checkpoint").exists()


def test_half_an_index_is_not_left_behind(tmp_path, monkeypatch):
    log = open_log(tmp_path / "t-0", LogConfig(segment_bytes=400, index_interval_bytes=0))
    fill(log, 10)

    def half(path, data):
        path.write_bytes(data[: len(data) // 16 * 8])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("penstock.log.index_files.write_synced", half)
        flush(log)
    assert not list(files_in(log.directory, "index"))


def test_a_log_that_cannot_be_closed_cleanly_says_so(tmp_path, monkeypatch):
    log = open_log(tmp_path / "t-0", SMALL)
    fill(log, 10)

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("penstock.log.flush.write_indexes", full)
    with pytest.raises(OSError, match="no space"):
        log.close()
    assert open_files(tmp_path) == []


def test_one_flush_at_a_time(tmp_path):
    log = open_log(tmp_path / "t-0")
    fill(log, 1)
    log.flush_begin()
    with pytest.raises(AssertionError):
        log.flush_begin()


def test_a_log_can_be_closed_while_a_flush_is_under_way(tmp_path):
    log = open_log(tmp_path / "t-0", SMALL)
    fill(log, 10)
    flush_job = log.flush_begin()
    fill(log, 10)
    log.close()
    flush_job.run()
    log.flush_done(flush_job)
    reopened = open_log(tmp_path / "t-0", SMALL, clean=True)
    assert reopened.end == log.end


def test_retention_of_an_unsynced_segment_does_not_disturb_a_flush(tmp_path):
    log = open_log(tmp_path / "t-0", LogConfig(segment_bytes=180))
    fill(log, HELD_FILES_MAX * 2)
    flush_job = log.flush_begin()
    for path in log.remove_segments(log.segments[:10], now_ms=0, end_offset=log.end_offset):
        path.unlink()
    flush_job.run()
    log.flush_done(flush_job)
    assert log.synced == log.end


def test_no_descriptor_is_left_open(tmp_path):
    log = open_log(tmp_path / "t-0", LogConfig(segment_bytes=180))
    fill(log, 50)
    flush(log)
    fill(log, 50)
    log.read(0, 100, log.end)
    log.remove_segments(log.segments[:60], now_ms=0, end_offset=log.end_offset)
    log.truncate_to(90, now_ms=0)
    append(log, b"x")
    log.close()
    assert open_files(tmp_path) == []
