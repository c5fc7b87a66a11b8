"""The pool of read descriptors."""

import errno
import os

import pytest

from penstock.log.indexes import OffsetIndex, TimeIndex
from penstock.log.segment import LogSegment
from penstock.log.segment_files import FilePool


def segments(tmp_path, count):
    made = [LogSegment(tmp_path, number) for number in range(count)]
    for segment in made:
        segment.path.write_bytes(str(segment.base_offset).encode())
    return made


def is_open(fd):
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_the_least_recently_used_is_closed_first(tmp_path):
    pool, (a, b, c) = FilePool(descriptors_max=2), segments(tmp_path, 3)
    files = {}
    for segment in (a, b, a, c):
        files[segment] = pool.pin(segment)
        pool.unpin(files[segment])
    assert [is_open(files[segment].fd) for segment in (a, b)] == [True, False] or files[b].fd == files[c].fd
    assert len(pool) == 2
    again = pool.pin(a)
    assert again is files[a]


def test_a_descriptor_in_use_is_never_closed(tmp_path):
    pool, made = FilePool(descriptors_max=2), segments(tmp_path, 5)
    pinned = [pool.pin(segment) for segment in made]
    assert [os.pread(file.fd, 9, 0) for file in pinned] == [b"0", b"1", b"2", b"3", b"4"]
    pool.forget(made[0])
    assert os.pread(pinned[0].fd, 9, 0) == b"0"
    fd = pinned[0].fd
    pool.unpin(pinned[0])
    assert not is_open(fd)


def test_a_segment_that_has_left_its_log_does_not_stay_open(tmp_path):
    """Otherwise its space would stay in use until the descriptor is evicted."""
    pool, (segment,) = FilePool(), segments(tmp_path, 1)
    pool.forget(segment)
    file = pool.pin(segment)
    again = pool.pin(segment)
    assert os.pread(file.fd, 9, 0) == os.pread(again.fd, 9, 0) == b"0"
    pool.unpin(file)
    pool.unpin(again)
    assert not is_open(file.fd)
    assert not is_open(again.fd)
    assert len(pool) == 0


def test_without_descriptors_to_spare_idle_ones_are_given_up(tmp_path, monkeypatch):
    pool, (a, b, c) = FilePool(), segments(tmp_path, 3)
    idle, used = pool.pin(a), pool.pin(b)
    pool.unpin(idle)
    real = os.open

    def scarce(path, *args):
        if is_open(idle.fd):
            raise OSError(errno.EMFILE, "Too many open files")
        return real(path, *args)

    monkeypatch.setattr(os, "open", scarce)
    assert os.pread(pool.pin(c).fd, 9, 0) == b"2"
    assert os.pread(used.fd, 9, 0) == b"1"


def test_a_renamed_segment_is_found_under_its_new_name(tmp_path):
    pool, (segment,) = FilePool(), segments(tmp_path, 1)
    pool.rename(segment, ".swap")
    assert segment.path.name == "00000000000000000000.log.swap"
    assert os.pread(pool.pin(segment).fd, 9, 0) == b"0"
    segment.path.unlink()
    with pytest.raises(FileNotFoundError):
        pool.rename(segment, "")


def test_the_name_of_a_deleted_segment_may_be_anothers(tmp_path):
    pool, (old,) = FilePool(), segments(tmp_path, 1)
    in_use = pool.pin(old)
    pool.rename(old, ".deleted")
    pool.forget(old)
    (new,) = segments(tmp_path, 1)
    new.path.write_bytes(b"compacted")
    pool.rename(new, ".deleted")
    assert os.pread(in_use.fd, 9, 0) == b"0"
    with pytest.raises(FileNotFoundError):
        pool.pin(old)


def test_loaded_indexes_are_bounded_in_bytes(tmp_path):
    pool = FilePool(index_bytes_max=100)
    made = [LogSegment(tmp_path, number) for number in range(4)]
    for segment in made:
        index = OffsetIndex()
        for number in range(5):
            index.append(number, number)
        pool.index_loaded(segment, index, TimeIndex())
    assert [segment.offsets is not None for segment in made] == [False, False, True, True]
    pool.keep_index(made[3])
    pool.index_loaded(made[0], index, TimeIndex())
    assert made[3].offsets is not None
