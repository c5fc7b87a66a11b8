"""Offsets by timestamp, exact to the record."""

import struct

import pytest
from tests.unit.log.helpers import NOW_MS, append, marker_of, open_log

from penstock.log.config import LogConfig
from penstock.log.reader import DecompressionLimitReached
from penstock.protocol.compression import Codec
from penstock.protocol.record_batch import (
    ATTRIBUTES_OFFSET,
    BATCH_HEADER,
    CRC_OFFSET,
    BatchHeader,
    Record,
    crc32c,
    encode_batch,
    open_batch,
)

CONFIG = LogConfig(segment_bytes=600, index_interval_bytes=100)


def append_at(log, *timestamps, codec=Codec.NONE, epoch=0):
    records = [Record(place, timestamp, None, b"value") for place, timestamp in enumerate(timestamps)]
    return log.append(memoryview(encode_batch(records, codec=codec)), leader_epoch=epoch, now_ms=NOW_MS)


@pytest.mark.parametrize("codec", list(Codec))
def test_the_first_record_not_before_the_timestamp(tmp_path, codec):
    log = open_log(tmp_path / "t-0", CONFIG)
    timestamps = [10, 30, 20, 30, 40, 35, 90, 60, 70, 95, 80, 100]
    for start in range(0, len(timestamps), 3):
        append_at(log, *timestamps[start : start + 3], codec=codec, epoch=start)
    for asked in range(105):
        expected = next(
            ((ts, offset, offset // 3 * 3) for offset, ts in enumerate(timestamps) if ts >= asked), None
        )
        assert log.offset_for_timestamp(asked) == expected


def test_records_before_the_start_of_the_log_do_not_count(tmp_path):
    log = open_log(tmp_path / "t-0", CONFIG)
    append_at(log, 50, 60, 10)
    append_at(log, 20, 55)
    log.delete_records_before(2)
    assert log.offset_for_timestamp(5) == (10, 2, 0)
    assert log.offset_for_timestamp(30) == (55, 4, 0)
    assert log.offset_for_timestamp(56) is None


def test_the_largest_timestamp_and_where_it_first_is(tmp_path):
    log = open_log(tmp_path / "t-0", CONFIG)
    assert log.offset_of_max_timestamp() is None
    for number in range(40):
        append_at(log, number, 1000 if number in (17, 30) else 0, epoch=2)
    assert log.offset_of_max_timestamp() == (1000, 35, 2)


def test_a_marker_does_not_hide_the_largest_timestamp(tmp_path):
    log = open_log(tmp_path / "t-0", CONFIG)
    append(log, b"x", timestamp=5, producer=(1, 0, 0), attributes=0x10)
    append(log, b"y", timestamp=7, producer=(1, 0, 1), attributes=0x10)
    append(log, b"y", timestamp=7, producer=(1, 0, 2), attributes=0x10)
    log.append(marker_of(1, 0, commit=True), leader_epoch=0, now_ms=NOW_MS, internal=True)
    assert log.offset_of_max_timestamp() == (7, 1, 0)


def test_what_lies_before_the_start_does_not_hide_the_largest_timestamp(tmp_path):
    log = open_log(tmp_path / "t-0", CONFIG)
    append_at(log, 90, 40, 50)
    append_at(log, 45)
    assert log.offset_of_max_timestamp() == (90, 0, 0)
    log.delete_records_before(1)
    assert log.offset_of_max_timestamp() == (50, 2, 0)
    log.delete_records_before(3)
    assert log.offset_of_max_timestamp() == (45, 3, 0)
    log.delete_records_before(4)
    assert log.offset_of_max_timestamp() is None


def test_under_log_append_time_every_record_has_the_time_of_its_append(tmp_path):
    log = open_log(tmp_path / "t-0", LogConfig(timestamp_type="LogAppendTime", index_interval_bytes=0))
    for now_ms in (1000, 1000, 900, 2000):
        append(log, b"x", b"y", timestamp=5, now_ms=now_ms)
    found = [log.offset_for_timestamp(asked) for asked in (0, 900, 1000, 1001, 2000, 2001)]
    assert found == [(1000, 0, 0), (1000, 0, 0), (1000, 0, 0), (2000, 6, 0), (2000, 6, 0), None]
    assert log.offset_of_max_timestamp() == (2000, 6, 0)


def test_control_records_are_not_found(tmp_path):
    log = open_log(tmp_path / "t-0", CONFIG)
    append(log, b"x", timestamp=5, producer=(1, 0, 0), attributes=0x10)
    log.append(marker_of(1, 0, commit=True), leader_epoch=0, now_ms=NOW_MS, internal=True)
    assert log.offset_for_timestamp(6) is None


def test_it_works_on_a_log_that_was_just_opened(tmp_path):
    log = open_log(tmp_path / "t-0", CONFIG)
    for number in range(30):
        append_at(log, number * 10)
    log.close()
    for clean in (True, False):
        reopened = open_log(tmp_path / "t-0", CONFIG, clean=clean)
        assert [reopened.offset_for_timestamp(number * 10 - 5).offset for number in range(30)] == list(
            range(30)
        )
        assert reopened.offset_of_max_timestamp() == (290, 29, 0)
        reopened.abandon()


def append_lies(log, count, *, size=1000, codec=Codec.ZSTD):
    """Batches of one record each, whose headers claim a later timestamp than they hold."""
    for _ in range(count):
        batch = bytearray(encode_batch([Record(0, 10, None, bytes(size))], codec=codec))
        header = BatchHeader._make(BATCH_HEADER.unpack_from(batch))._replace(max_timestamp=90)
        BATCH_HEADER.pack_into(batch, 0, *header)
        struct.pack_into(">I", batch, CRC_OFFSET, crc32c(memoryview(batch)[ATTRIBUTES_OFFSET:]))
        log.append(memoryview(batch), leader_epoch=3, now_ms=NOW_MS)


@pytest.mark.parametrize("codec", list(Codec))
def test_a_search_unfolds_a_bounded_number_of_bytes_and_then_believes_a_header(tmp_path, codec, monkeypatch):
    log = open_log(tmp_path / "t-0", LogConfig(decoded_bytes_max=5_000))
    append_lies(log, 50, codec=codec)
    unfolded = []

    def counted(batch, max_bytes):
        found = open_batch(batch, max_bytes)
        unfolded.append(len(found[1]))
        return found

    monkeypatch.setattr("penstock.log.reader.open_batch", counted)
    # Four of them fit, a fifth is more than there may be, and its own word is taken: nothing is missed by that.
    found = log.offset_for_timestamp(50)
    assert (found.timestamp, found.leader_epoch) == (90, 3)
    assert found.offset in (4, 5)
    assert sum(unfolded) <= 6_100
    assert log.offset_for_timestamp(91) is None
    assert log.offset_of_max_timestamp().timestamp == 90


def test_a_search_with_little_to_unfold_says_so_and_finds_what_it_can(tmp_path):
    log = open_log(tmp_path / "t-0", LogConfig())
    append_at(log, 5)
    append_lies(log, 3)
    append_at(log, 95)
    assert log.offset_for_timestamp(4, bytes_max=100) == (5, 0, 0)
    with pytest.raises(DecompressionLimitReached):
        log.offset_for_timestamp(50, bytes_max=100)
    with pytest.raises(DecompressionLimitReached):
        log.offset_for_timestamp(50, bytes_max=2_000)
    assert log.offset_for_timestamp(50, bytes_max=10_000) == (95, 4, 0)
    assert log.offset_for_timestamp(50) == (95, 4, 0)


def test_a_batch_that_unfolds_to_more_than_it_may_hides_nothing_behind_it(tmp_path):
    log = open_log(tmp_path / "t-0", LogConfig(decoded_bytes_max=5_000))
    append_lies(log, 1, size=100_000)
    append_at(log, 95)
    assert log.offset_for_timestamp(50) == (90, 0, 3)
    assert log.offset_for_timestamp(91) == (95, 1, 0)
