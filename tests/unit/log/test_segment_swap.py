"""Swapping compacted segments in, and finishing the swap after a crash at any of its steps."""

import os
import shutil

import pytest
from tests.unit.log.helpers import NOW_MS, append, files_in, fill, flush, open_log, read_batches, values_in

from penstock.log import index_files, segment_files
from penstock.log.compaction.cleaning_pass import CleanedSegmentWriter
from penstock.log.config import LogConfig
from penstock.log.log import SegmentsChanged
from penstock.log.segment import iter_batch_headers, read_batch
from penstock.log.segment_files import FilePool
from penstock.protocol.record_batch import iter_batches

SMALL = LogConfig(segment_bytes=800, index_interval_bytes=200)


def rewritten(log, segments, keep):
    """The batches of some segments that `keep` says, in one new segment."""
    writer = CleanedSegmentWriter(log.directory, segments[0].base_offset, SMALL)
    for segment in segments:
        fd = os.open(segment.path, os.O_RDONLY)
        for position, header in iter_batch_headers(fd, 0, segment.size):
            if keep(header):
                writer.append(header, read_batch(fd, position, header))
        os.close(fd)
    return writer.finish(modified_ms=123_000)


@pytest.fixture
def log(tmp_path):
    log = open_log(tmp_path / "t-0", SMALL)
    fill(log, 20)
    flush(log)
    return log


def bases(log):
    return [header.base_offset for header, _ in read_batches(log)]


def even(header):
    return header.base_offset % 2 == 0


def test_the_new_segment_takes_the_place_of_the_old_ones(log):
    old = list(log.segments[:2])
    active_base = log.active_segment.base_offset
    untouched = [base for base in bases(log) if base >= log.segments[2].base_offset]
    unlink = log.replace_segments(old, [rewritten(log, old, even)])
    expected = [base for base in range(old[1].next_base) if base % 2 == 0] + untouched
    assert bases(log) == expected
    assert log.active_segment.base_offset == active_base
    assert all(path.name.endswith(".deleted") and path.exists() for path in unlink)
    assert len(unlink) == 6
    assert log.segments[0].path.stat().st_mtime == 123
    for path in unlink:
        path.unlink()
    log.close()
    reopened = open_log(log.directory, SMALL, clean=True)
    assert bases(reopened) == expected
    assert reopened.end_offset == 20


def test_a_reader_of_the_old_segment_is_not_disturbed(log):
    old = log.segments[0]
    before = log.read(0, 200, log.end)
    file = log.files.pin(old)
    log.replace_segments([old], [rewritten(log, [old], even)])
    assert os.pread(file.fd, len(before.data), 0) == before.data
    log.files.unpin(file)
    assert log.read(1, 200, log.end).data != before.data


def test_an_index_read_while_its_segment_is_replaced_is_not_taken_for_its_own(tmp_path, monkeypatch):
    """By the time the file is read its name may be the new segment's."""
    config = LogConfig(segment_bytes=4000, index_interval_bytes=200)
    log = open_log(tmp_path / "t-0", config)
    fill(log, 40)
    log.close()
    log = open_log(tmp_path / "t-0", config, clean=True)
    old = log.segments[0]
    new = rewritten(log, [old], even)
    content = index_files._content

    def replaced_first(path):
        monkeypatch.setattr(index_files, "_content", content)
        log.replace_segments([old], [new])
        return content(path)

    monkeypatch.setattr(index_files, "_content", replaced_first)
    ((header, _),) = iter_batches(log.read(7, 1, log.end).data)
    assert header.base_offset == 8
    assert old.offsets is None


def test_names_change_hands_only_while_no_flush_is_writing_indexes(log, monkeypatch):
    old = log.segments[0]
    held = []
    finish = segment_files.finish_swap

    def finish_swap(*args):
        held.append(log._flush.gate.lock.locked())
        return finish(*args)

    monkeypatch.setattr(segment_files, "finish_swap", finish_swap)
    log.replace_segments([old], [rewritten(log, [old], even)])
    assert held == [True]


def test_a_segment_that_was_cut_meanwhile_is_not_replaced(log):
    """Cut, written to and closed again, it would pass for the one that was rewritten."""
    old = log.segments[0]
    new = rewritten(log, [old], even)
    log.truncate_to(old.base_offset + 1, NOW_MS)
    append(log, b"another")
    log.roll(NOW_MS)
    with pytest.raises(SegmentsChanged):
        log.replace_segments([old], [new])
    assert values_in(log)[-1] == b"another"


def test_segments_that_have_gone_are_not_replaced(log):
    old = log.segments[0]
    new = rewritten(log, [old], even)
    log.remove_segments([old], NOW_MS, end_offset=log.end_offset)
    with pytest.raises(SegmentsChanged):
        log.replace_segments([old], [new])
    assert new.path.name.endswith(".cleaned")


class Crash(Exception):
    pass


def crash_after(monkeypatch, renames):
    """The process ends before the n-th rename from here."""
    real, left = os.rename, [renames]

    def rename(*args):
        if left[0] == 0:
            raise Crash
        left[0] -= 1
        real(*args)

    monkeypatch.setattr(os, "rename", rename)


@pytest.mark.parametrize("steps", range(26))
def test_a_crash_at_any_step_leaves_either_the_old_or_the_new(log, tmp_path, monkeypatch, steps):
    """Two old segments become two new ones; each rename tried is a step: four files of each segment."""
    old = list(log.segments[:2])
    everything = bases(log)
    compacted = [b for b in everything if b >= old[1].next_base or b % 2 == 0]
    writers = [rewritten(log, [segment], even) for segment in old]
    with monkeypatch.context() as patched:
        crash_after(patched, steps)
        try:
            log.replace_segments(old, writers)
            crashed = False
        except Crash:
            crashed = True
    shutil.copytree(log.directory, tmp_path / "copy-0")
    recovered = open_log(tmp_path / "copy-0", SMALL, recovery_point=20)
    assert bases(recovered) == (everything if steps < 8 else compacted)
    assert recovered.end_offset == 20
    assert not [n for n in files_in(tmp_path / "copy-0") if n.endswith((".swap", ".cleaned", ".deleted"))]
    assert crashed == (steps < 24)
    for offset in range(20):
        found = read_batches(recovered, offset)
        assert not found or found[0][0].base_offset >= offset


def failing_rename(number):
    """`os.rename`, whose call of this number fails."""
    real, calls = os.rename, []

    def rename(source, target):
        calls.append(source)
        if len(calls) == number + 1 and source.exists():
            raise OSError(5, "I/O error")
        real(source, target)

    return rename


@pytest.mark.parametrize("failing", range(8))
def test_a_rename_that_fails_withdraws_the_new_segments(log, monkeypatch, failing):
    """Up to the point where the swap counts; the old segments go on, and a restart agrees."""
    old = list(log.segments[:2])
    new = [rewritten(log, [segment], even) for segment in old]
    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", failing_rename(failing))
        if failing in (2, 6):  # there is no transaction index to rename
            log.replace_segments(old, new)
            return
        with pytest.raises(OSError, match="I/O error"):
            log.replace_segments(old, new)
    assert bases(log) == list(range(20))
    assert not [name for name in files_in(log.directory) if name.count(".") > 1]
    again = [rewritten(log, [segment], even) for segment in old]
    log.replace_segments(old, again)
    assert log.segments[:2] == again


@pytest.mark.parametrize("failing", range(8, 24))
def test_a_rename_that_fails_after_that_leaves_the_new_segments_readable(log, tmp_path, monkeypatch, failing):
    old = list(log.segments[:2])
    expected = [base for base in range(20) if base >= old[1].next_base or base % 2 == 0]
    new = [rewritten(log, [segment], even) for segment in old]
    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", failing_rename(failing))
        if failing % 4 == 2:
            log.replace_segments(old, new)
        else:
            with pytest.raises(OSError, match="I/O error"):
                log.replace_segments(old, new)
    assert bases(log) == expected
    shutil.copytree(log.directory, tmp_path / "copy-0")
    assert bases(open_log(tmp_path / "copy-0", SMALL, recovery_point=20)) == expected


def test_half_written_cleaned_files_are_removed(log, tmp_path):
    writer = CleanedSegmentWriter(log.directory, 0, SMALL)
    fd = os.open(log.segments[0].path, os.O_RDONLY)
    for position, header in iter_batch_headers(fd, 0, log.segments[0].size):
        writer.append(header, read_batch(fd, position, header))
    os.close(fd)
    log.abandon()
    reopened = open_log(log.directory, SMALL, files=FilePool())
    assert bases(reopened) == list(range(20))
    assert not list(files_in(log.directory, ".cleaned"))


def test_a_discarded_writer_leaves_nothing(log):
    before = set(files_in(log.directory))
    CleanedSegmentWriter(log.directory, 0, SMALL).discard()
    assert set(files_in(log.directory)) == before
