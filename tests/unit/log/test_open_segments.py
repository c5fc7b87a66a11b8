"""Files open for writing are limited by the pool, whatever the number of logs."""

import errno
import os
from pathlib import Path

import pytest
from tests.unit.log.helpers import append, fill, flush, open_files, open_log, values_in

from penstock.log.flush import FlushJob
from penstock.log.log import Log
from penstock.log.segment_files import FilePool
from penstock.protocol.errors import ApiError, ErrorCode


def opened(tmp_path: Path, count: int, files: FilePool) -> list[Log]:
    return [open_log(tmp_path / f"t-{index}", files=files) for index in range(count)]


@pytest.fixture
def files() -> FilePool:
    pool = FilePool(tails_max=4)
    pool.tails.written_by_this_thread()
    return pool


def test_idle_logs_keep_no_descriptor(tmp_path, files):
    logs = opened(tmp_path, 20, files)
    assert (len(files.tails), open_files(tmp_path)) == (0, [])
    for number in range(60):
        append(logs[number * 7 % 20], str(number).encode())
        flush(logs[number * 7 % 20])
        assert len(files.tails) <= 4
    assert sum(len(values_in(log)) for log in logs) == 60
    for log in logs:
        log.close()
    files.close()
    assert open_files(tmp_path) == []
    assert all(len(values_in(log)) == 3 for log in opened(tmp_path, 20, files))


def test_a_log_that_is_being_synced_keeps_its_descriptor(tmp_path, files):
    logs = opened(tmp_path, 8, files)
    tickets = []
    for log in logs:
        append(log, b"x")
        tickets.append(log.flush_begin())
    assert len(files.tails) == 8, "none could be closed"
    for log, flush_job in zip(logs, tickets, strict=True):
        flush_job.run()
        log.flush_done(flush_job)
    append(logs[0], b"y")
    files.close_idle()
    assert len(files.tails) == 0
    append(logs[1], b"y")
    assert values_in(logs[1]) == [b"x", b"y"]


def test_the_one_used_least_recently_is_closed_first(tmp_path, files):
    logs = opened(tmp_path, 5, files)
    for log in logs[:4]:
        append(log, b"x")
        flush(log)
    files.tails._close_idle(0)
    for tail in files.tails._open:
        tail.is_used = tail.segment is not logs[2].active_segment
    append(logs[4], b"x")
    closed = {log.directory.name for log in logs if log._tail.file is None}
    assert closed == {"t-2"}


def test_without_descriptors_an_append_is_refused_and_the_next_one_works(tmp_path, files, monkeypatch):
    (log,) = opened(tmp_path, 1, files)

    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr("penstock.log.segment_files.os.open", refuse)
        with pytest.raises(ApiError) as refused:
            append(log, b"x")
    assert refused.value.code is ErrorCode.kafka_storage_error
    append(log, b"y")
    assert values_in(log) == [b"y"]


def test_a_flush_without_descriptors_is_postponed_and_makes_nothing_durable(tmp_path, files, monkeypatch):
    (log,) = opened(tmp_path, 1, files)
    fill(log, 3)
    log.roll(0)
    fill(log, 3)
    flush_job = log.flush_begin()
    assert isinstance(flush_job, FlushJob)

    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr("penstock.log.flush.sync_directory", refuse)
        flush_job.run()
    log.flush_done(flush_job)
    assert (flush_job.postponed, log.synced.offset, log.needs_flush) == (True, 0, True)
    flush(log)
    assert (log.synced.offset, log.recovery_point, log.needs_flush) == (6, 6, False)
