"""Reading: whole batches, bounds, sequential hints, and reads that must not wait."""

import os
import struct
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.unit.log.helpers import append, batch_of, fill, flush, open_log, read_batches, values_in

from penstock.log.config import LogConfig
from penstock.log.segment import LogOffsetMetadata
from penstock.log.segment_files import FilePool
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.record_batch import iter_batches

SMALL = LogConfig(segment_bytes=2000, index_interval_bytes=300)


@pytest.fixture
def log(tmp_path):
    """Twenty batches of three records, in several segments."""
    log = open_log(tmp_path / "t-0", SMALL)
    for number in range(20):
        append(log, *(f"{number}-{place}".encode() * 20 for place in range(3)))
    assert len(log.segments) > 2
    return log


def test_an_offset_inside_a_batch_returns_the_whole_batch(log):
    for offset in range(log.end_offset):
        piece = log.read(offset, 1, log.end)
        ((header, _),) = iter_batches(piece.data)
        assert header.base_offset == offset // 3 * 3
        assert piece.next_offset == header.base_offset + 3


def test_a_slice_never_crosses_a_segment_nor_the_limit(log):
    for offset in range(log.end_offset):
        for max_bytes in (1, 300, 700, 1 << 20):
            piece = log.read(offset, max_bytes, log.end)
            headers = [header for header, _ in iter_batches(piece.data)]
            segment = max(s.base_offset for s in log.segments if s.base_offset <= headers[0].base_offset)
            assert all(
                s.base_offset <= segment or s.base_offset > headers[-1].base_offset for s in log.segments
            )
            assert len(piece.data) <= max_bytes or len(headers) == 1


def test_without_at_least_one_a_batch_that_is_too_large_is_left_out(log):
    piece = log.read(0, 10, log.end, at_least_one=False)
    assert (piece.data, piece.next_offset) == (b"", 0)


def test_nothing_at_or_beyond_the_limit_is_shown(log):
    for limit in range(0, log.end_offset + 1, 3):
        upto = log.position_of(limit)
        seen = []
        offset = 0
        while piece := log.read(offset, 1 << 20, upto).data:
            seen += [header.last_offset for header, _ in iter_batches(piece)]
            offset = seen[-1] + 1
        assert seen == list(range(2, limit, 3))


def test_offsets_outside_the_log_are_out_of_range(log):
    log.delete_records_before(7)
    for offset in (-1, 6, log.end_offset + 1):
        with pytest.raises(ApiError) as raised:
            log.read(offset, 100, log.end)
        assert raised.value.code is ErrorCode.offset_out_of_range
    assert log.read(log.end_offset, 100, log.end) == (b"", log.end_offset)
    assert read_batches(log, 7)[0][0].base_offset == 6


def test_a_sequential_reader_needs_no_index(log, monkeypatch):
    first = log.read(0, 300, log.end)
    monkeypatch.setattr("penstock.log.reader.LogReader.find", None)
    second = log.read(first.next_offset, 300, log.end)
    assert [header.base_offset for header, _ in iter_batches(second.data)] == [first.next_offset]


def test_a_reader_at_the_end_goes_on_in_the_next_segment(tmp_path):
    log = open_log(tmp_path / "t-0", LogConfig(segment_bytes=400))
    offset = 0
    for number in range(12):
        append(log, bytes([number]) * 100)
        piece = log.read(offset, 1 << 20, log.end)
        assert [header.base_offset for header, _ in iter_batches(piece.data)] == [number]
        offset = piece.next_offset


def test_position_of_is_the_start_of_the_batch(log):
    assert log.position_of(0) == (0, 0, 0)
    assert log.position_of(4) == log.position_of(3)
    assert log.position_of(3).offset == 3
    assert log.position_of(log.end_offset) == log.position_of(10_000) == log.end


def test_reads_go_on_while_the_loop_appends(tmp_path):
    config = LogConfig(segment_bytes=3000, index_interval_bytes=200)
    log = open_log(tmp_path / "t-0", config, files=FilePool(descriptors_max=2))
    total, grown = 400, threading.Condition()

    def consume(max_bytes):
        seen, offset = [], 0
        while offset < total:
            with grown:
                while log.end_offset == offset:
                    grown.wait()
            piece = log.read(offset, max_bytes, log.end)
            seen += [header.base_offset for header, _ in iter_batches(piece.data)]
            offset = piece.next_offset
        return seen

    with ThreadPoolExecutor(4) as pool:
        readers = [pool.submit(consume, size) for size in (1, 500, 1000, 1 << 20)]
        for number in range(total):
            fill(log, 1)
            if number % 50 == 0:
                flush(log)
            with grown:
                grown.notify_all()
        assert all(reader.result(timeout=60) == list(range(total)) for reader in readers)


def test_a_read_that_would_wait_says_so(log, monkeypatch):
    def cold(fd, buffers, position, flags=0):
        raise BlockingIOError

    monkeypatch.setattr(os, "preadv", cold)
    with pytest.raises(BlockingIOError):
        log.read(0, 300, log.end, nowait=True)
    assert log.read(0, 300, log.end).data


def test_half_a_page_in_the_cache_is_not_enough(log, monkeypatch):
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, position, flags: len(buffers[0]) - 1)
    with pytest.raises(BlockingIOError):
        log.read(0, 300, log.end, nowait=True)


def test_a_file_system_that_cannot_tell_is_read_plainly(log, monkeypatch):
    calls = []

    def unsupported(fd, buffers, position, flags):
        calls.append(position)
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "preadv", unsupported)
    expected = log.read(0, 300, log.end).data
    for _ in range(3):
        assert log.read(0, 300, log.end, nowait=True).data == expected
    assert len(calls) == 1


def test_an_index_that_is_not_loaded_is_not_waited_for(log, tmp_path):
    log.close()
    reopened = open_log(tmp_path / "t-0", SMALL, clean=True)
    with pytest.raises(BlockingIOError):
        reopened.read(4, 100, reopened.end, nowait=True)
    expected = reopened.read(4, 100, reopened.end)
    assert reopened.read(4, 100, reopened.end, nowait=True) == expected


def test_damage_in_an_old_segment_is_refused_as_a_corrupt_message(log, tmp_path):
    with open(tmp_path / "t-0" / "00000000000000000000.log", "r+b") as file:
        file.seek(8)
        file.write(b"\xff\xff\xff\xff")
    with pytest.raises(ApiError) as raised:
        log.read(0, 1 << 10, log.end)
    assert raised.value.code is ErrorCode.corrupt_message
    assert read_batches(log, log.segments[1].base_offset)


def test_damage_between_an_index_entry_and_the_offset_is_not_passed_over(log, tmp_path):
    """The next segment would be the answer otherwise, and the records between would silently be missing."""
    offset = log.segments[1].base_offset - 1
    position = log.position_of(offset).position
    with open(log.segments[0].path, "r+b") as file:
        file.seek(position + 8)
        file.write(b"\xff\xff\xff\xff")
    with pytest.raises(ApiError) as raised:
        log.read(offset, 1 << 10, log.end)
    assert raised.value.code is ErrorCode.corrupt_message


@pytest.mark.parametrize("shift", [7, 0])
def test_a_wrong_index_is_rebuilt(log, tmp_path, shift):
    """It ascends and stays within the log, but the batch that ends at offset 2 is not there."""
    log.close()
    log.segments[0].index_files[0].write_bytes(struct.pack(">ii", 2, log.position_of(6).position + shift))
    reopened = open_log(tmp_path / "t-0", SMALL, clean=True)
    for offset in (3, 4, 12, 30):
        ((header, _),) = iter_batches(reopened.read(offset, 1, reopened.end).data)
        assert header.base_offset == offset // 3 * 3
    reopened.close()
    assert open_log(tmp_path / "t-0", SMALL, clean=True).position_of(3).position < log.position_of(6).position


def test_a_file_that_has_lost_its_end_is_a_storage_error(log):
    os.truncate(log.segments[0].path, log.segments[0].size - 10)
    for max_bytes in (1 << 20, 70):
        with pytest.raises(ApiError) as raised:
            log.read(log.segments[1].base_offset - 1, max_bytes, log.end)
        assert raised.value.code is ErrorCode.kafka_storage_error


def test_a_limit_taken_before_compaction_still_holds(log):
    """The limit lies in a segment that was rewritten shorter since; its position means nothing any more."""
    from tests.unit.log.test_segment_swap import rewritten

    upto = log.position_of(6)
    first = log.segments[0]
    log.replace_segments([first], [rewritten(log, [first], keep=lambda header: header.base_offset != 0)])
    piece = log.read(0, 1 << 20, upto)
    assert [header.base_offset for header, _ in iter_batches(piece.data)] == [3]
    assert piece.next_offset == 6


def test_reading_what_retention_removed_meanwhile_is_out_of_range(log):
    gone = log.segments[0]
    log.remove_segments([gone], now_ms=0, end_offset=log.end_offset)
    with pytest.raises(ApiError) as raised:
        log.read(0, 100, log.end)
    assert raised.value.code is ErrorCode.offset_out_of_range


def test_one_batch_larger_than_every_chunk_is_found(tmp_path):
    log = open_log(tmp_path / "t-0", LogConfig(max_message_bytes=1 << 22))
    big = [os.urandom(100_000) for _ in range(4)]
    for value in big:
        append(log, value)
    assert values_in(log, max_bytes=1) == big
    assert log.position_of(2).position == 2 * len(batch_of(big[0]))


def test_a_limit_at_the_start_of_a_segment(log):
    second = log.segments[1]
    upto = LogOffsetMetadata(second.base_offset, second.base_offset, 0)
    assert log.read(0, 1 << 20, upto).next_offset == second.base_offset
    assert log.read(second.base_offset, 1 << 20, upto).data == b""
