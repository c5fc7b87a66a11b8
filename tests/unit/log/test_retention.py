"""Which segments retention deletes, and how."""

import os

import pytest
from tests.unit.log.helpers import (
    NOW_MS,
    append,
    batch_of,
    files_in,
    fill,
    flush,
    offsets_in,
    open_log,
    values_in,
)

from penstock.log.config import DAY_MS, LogConfig
from penstock.protocol.errors import ApiError, ErrorCode

SEGMENT = LogConfig(segment_bytes=300)


def log_of(tmp_path, ages_days, **settings):
    """One segment of one batch for each age, and an empty active one."""
    log = open_log(tmp_path / "t-0", LogConfig(segment_bytes=300, **settings))
    for age in ages_days:
        append(log, bytes(150), timestamp=NOW_MS - age * DAY_MS)
    assert len(log.segments) == len(ages_days)
    return log


def expired(log, **options):
    return [segment.base_offset for segment in log.expired_segments(NOW_MS, **options)]


def remove_expired(log):
    return log.remove_segments(log.expired_segments(NOW_MS), NOW_MS, end_offset=log.end_offset)


def test_by_time_only_from_the_oldest_on(tmp_path):
    log = log_of(tmp_path, [9, 8, 3, 20, 1])
    assert expired(log) == [0, 1]
    log.configure(LogConfig(segment_bytes=300, retention_ms=2 * DAY_MS))
    assert expired(log) == [0, 1, 2, 3]
    log.configure(LogConfig(segment_bytes=300, retention_ms=-1))
    assert expired(log) == []


@pytest.mark.parametrize(
    ("retention_ms", "age_ms", "gone"), [(0, 0, 0), (0, 1, 1), (1, 1, 0), (-1, 10**12, 0)]
)
def test_the_millisecond_at_which_time_is_up(tmp_path, retention_ms, age_ms, gone):
    log = open_log(tmp_path / "t-0", LogConfig(retention_ms=retention_ms))
    append(log, b"x", timestamp=NOW_MS - age_ms)
    assert len(expired(log)) == gone


def test_records_from_the_future_wait_for_their_time(tmp_path):
    """So does a log whose clock went back."""
    log = open_log(tmp_path / "t-0", LogConfig(retention_ms=1000))
    append(log, b"x", timestamp=NOW_MS + 5000)
    append(log, b"x", timestamp=NOW_MS - 5000, now_ms=NOW_MS - 10_000)
    assert len(log.segments) == 1
    assert log.expired_segments(NOW_MS + 6000) == []
    assert len(log.expired_segments(NOW_MS + 6001)) == 1


def test_by_size(tmp_path):
    log = log_of(tmp_path, [1] * 5)
    size = log.segments[0].size
    for limit, gone in [(5 * size, 0), (5 * size - 1, 0), (4 * size, 1), (size, 4), (size - 1, 4), (0, 5)]:
        log.configure(LogConfig(segment_bytes=300, retention_bytes=limit))
        assert len(expired(log)) == gone, limit


def test_nothing_at_or_beyond_the_high_watermark(tmp_path):
    log = log_of(tmp_path, [9] * 5)
    assert expired(log) == [0, 1, 2, 3, 4]
    assert expired(log, below=4) == [0, 1, 2, 3]
    assert expired(log, below=2) == [0, 1]


def test_compacted_topics_lose_only_what_is_below_their_start(tmp_path):
    log = log_of(tmp_path, [9] * 5, cleanup_delete=False, cleanup_compact=True, retention_bytes=0)
    assert expired(log) == []
    log.delete_records_before(3)
    assert expired(log) == [0, 1, 2]


def test_a_log_that_has_expired_altogether_starts_a_new_segment(tmp_path):
    log = log_of(tmp_path, [9, 8])
    files = remove_expired(log)
    assert (log.start_offset, log.end_offset, log.size_bytes) == (2, 2, 0)
    assert all(path.name.endswith(".deleted") for path in files)
    assert append(log, b"x").base_offset == 2
    assert expired(log) == []


def test_records_that_arrive_while_retention_decides_are_not_taken_with_the_active_segment(tmp_path):
    log = open_log(tmp_path / "t-0", LogConfig(retention_ms=DAY_MS))
    append(log, b"old", timestamp=NOW_MS - 2 * DAY_MS)
    end_offset, found = log.end_offset, log.expired_segments(NOW_MS)
    assert found == [log.active_segment]
    append(log, b"new")
    assert log.remove_segments(found, NOW_MS, end_offset=end_offset) == []
    assert values_in(log) == [b"old", b"new"]


def test_an_empty_log_has_nothing_to_lose(tmp_path):
    assert open_log(tmp_path / "t-0", LogConfig(retention_ms=0)).expired_segments(NOW_MS) == []


def test_records_without_a_timestamp_age_with_their_file(tmp_path):
    log = open_log(tmp_path / "t-0", SEGMENT)
    append(log, bytes(150), timestamp=-1)
    append(log, bytes(150), timestamp=-1)
    path = log.segments[0].path
    os.utime(path, (NOW_MS / 1000 - 8 * 86400,) * 2)
    os.utime(log.segments[1].path, (NOW_MS / 1000,) * 2)
    assert expired(log) == [0]


def test_the_age_of_old_segments_is_known_after_a_restart(tmp_path):
    log = log_of(tmp_path, [9, 8, 3, 1])
    log.close()
    reopened = open_log(tmp_path / "t-0", SEGMENT, clean=True)
    assert expired(reopened) == [0, 1]
    os.unlink(reopened.segments[0].index_files[1])
    assert expired(open_log(tmp_path / "t-0", SEGMENT, clean=True)) == [0, 1]


def test_removed_segments_are_renamed_and_their_files_handed_back(tmp_path):
    log = log_of(tmp_path, [9, 8, 3, 1])
    flush(log)
    files = remove_expired(log)
    assert (log.start_offset, offsets_in(log)) == (2, [2, 3])
    assert log.epochs.entries() == [(0, 2)]
    assert {path.name for path in files if path.suffix == ".deleted"} == set(
        files_in(log.directory, ".deleted")
    )
    for path in files:
        path.unlink()
    left = set(files_in(log.directory))
    assert not {name for name in left if name.startswith(("00000000000000000000", "00000000000000000001"))}
    log.close()
    assert offsets_in(open_log(tmp_path / "t-0", SEGMENT, clean=True)) == [2, 3]


def test_segments_that_have_gone_already_are_passed_over(tmp_path):
    log = log_of(tmp_path, [9, 8, 3, 1])
    found = log.expired_segments(NOW_MS)
    assert log.remove_segments(found, NOW_MS, end_offset=log.end_offset)
    assert log.remove_segments(found, NOW_MS, end_offset=log.end_offset) == []


def test_only_the_oldest_can_go(tmp_path):
    log = log_of(tmp_path, [1, 1, 1])
    with pytest.raises(AssertionError):
        log.remove_segments([log.segments[1]], NOW_MS, end_offset=log.end_offset)


def test_delete_records_moves_the_start_within_a_segment(tmp_path):
    log = open_log(tmp_path / "t-0")
    append(log, b"a", b"b", b"c")
    log.delete_records_before(2)
    assert log.start_offset == 2
    assert log.expired_segments(NOW_MS) == []
    assert values_in(log, 2) == [b"a", b"b", b"c"]
    log.delete_records_before(1)
    assert log.start_offset == 2
    with pytest.raises(ApiError) as raised:
        log.delete_records_before(4)
    assert raised.value.code is ErrorCode.offset_out_of_range


# Rolling


def test_segments_roll_by_size(tmp_path):
    log = open_log(tmp_path / "t-0", SEGMENT)
    fill(log, 9)
    assert [segment.base_offset for segment in log.segments] == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert all(segment.size <= 300 for segment in log.segments)


def test_segments_roll_by_the_time_of_their_records(tmp_path):
    log = open_log(tmp_path / "t-0", LogConfig(segment_ms=1000))
    for at in (0, 500, 1000, 1001, 1500, 2002):
        append(log, b"x", timestamp=NOW_MS + at)
    assert [segment.base_offset for segment in log.segments] == [0, 3, 5]


def test_segments_roll_in_time_for_max_compaction_lag(tmp_path):
    compacted = LogConfig(cleanup_compact=True, segment_ms=DAY_MS, max_compaction_lag_ms=1000)
    log = open_log(tmp_path / "t-0", compacted)
    for age_ms in (2000, 1000, 999):
        append(log, b"x", timestamp=NOW_MS - age_ms)
    assert [segment.base_offset for segment in log.segments] == [0, 2]
    log.configure(LogConfig(segment_ms=DAY_MS, max_compaction_lag_ms=1000))
    append(log, b"x", timestamp=NOW_MS + 1000)
    assert len(log.segments) == 2


def test_segments_without_timestamps_roll_by_the_clock(tmp_path):
    log = open_log(tmp_path / "t-0", LogConfig(segment_ms=1000))
    for at in (0, 1000, 1001, 2001, 2002):
        append(log, b"x", timestamp=-1, now_ms=NOW_MS + at)
    assert [segment.base_offset for segment in log.segments] == [0, 2, 4]


def test_the_smallest_segments_and_indexes_work(tmp_path):
    size = len(batch_of(b"x"))
    tiny = LogConfig(segment_bytes=size, segment_index_bytes=4, index_interval_bytes=0)
    log = open_log(tmp_path / "t-0", tiny)
    for number in range(5):
        append(log, b"%d" % number)
    assert len(log.segments) == 5
    log.configure(LogConfig(segment_bytes=10 * size, segment_index_bytes=4, index_interval_bytes=0))
    for number in range(5, 15):
        append(log, b"%d" % number)
    log.close()
    for clean in (True, False):
        log = open_log(tmp_path / "t-0", tiny, clean=clean)
        assert values_in(log, max_bytes=1) == [b"%d" % number for number in range(15)]
        log.abandon()


def test_segments_roll_when_an_index_is_full(tmp_path):
    log = open_log(tmp_path / "t-0", LogConfig(index_interval_bytes=1, segment_index_bytes=48))
    for number in range(20):
        append(log, b"x", timestamp=NOW_MS + number)
    assert len(log.segments) > 1
    assert offsets_in(log) == list(range(20))
    flush(log)
    assert all(len((log.directory / name).read_bytes()) <= 48 for name in files_in(log.directory, "index"))


def test_segments_roll_before_relative_offsets_overflow(tmp_path):
    log = open_log(tmp_path / "t-0")
    append(log, b"first")
    far = log.end._replace(offset=2**31 - 1)
    log.end = far
    append(log, b"still fits")
    append(log, b"does not")
    assert [segment.base_offset for segment in log.segments] == [0, 2**31]
    assert values_in(log, 1) == [b"still fits", b"does not"]
