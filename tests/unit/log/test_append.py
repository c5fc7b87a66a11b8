"""Appending: what is stored, and which errors refused batches get."""

import errno
import os
import struct

import pytest
from crc32c import crc32c
from tests.unit.log.helpers import (
    NOW_MS,
    append,
    batch_of,
    fill,
    marker_of,
    offsets_in,
    open_log,
    read_batches,
    values_in,
)

from penstock.log.config import LogConfig
from penstock.log.validation import EXPANSION_RATIO_MAX
from penstock.protocol.compression import Codec, compress
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.record_batch import (
    Record,
    checksum,
    decode_records,
    encode_batch,
    iter_batches,
    read_header,
)


def refused(log, batch, code, **options):
    before = (log.end, log.size_bytes, len(log.producers))
    with pytest.raises(ApiError) as raised:
        log.append(batch, leader_epoch=0, now_ms=NOW_MS, **options)
    assert raised.value.code is code
    assert (log.end, log.size_bytes, len(log.producers)) == before


def changed(batch, position, layout, value, *, mend=True):
    struct.pack_into(layout, batch, position, value)
    if mend:
        struct.pack_into(">I", batch, 17, crc32c(batch[21:]))
    return batch


def test_offsets_follow_each_other_and_batches_are_stored_as_sent(tmp_path):
    log = open_log(tmp_path / "t-0")
    sent = [batch_of(b"a", b"b"), batch_of(b"c")]
    bodies = [bytes(batch[61:]) for batch in sent]
    results = [log.append(batch, leader_epoch=7, now_ms=NOW_MS) for batch in sent]
    assert [(r.base_offset, r.last_offset, r.duplicate) for r in results] == [(0, 1, False), (2, 2, False)]
    assert results[-1].end == log.end == (3, 0, sum(map(len, sent)))
    stored = read_batches(log)
    assert [bytes(batch[61:]) for _, batch in stored] == bodies
    assert [(h.base_offset, h.leader_epoch) for h, _ in stored] == [(0, 7), (2, 7)]
    assert all(checksum(batch) == header.crc for header, batch in stored)


def test_the_file_holds_exactly_the_batches(tmp_path):
    log = open_log(tmp_path / "t-0")
    fill(log, 3)
    data = (tmp_path / "t-0" / "00000000000000000000.log").read_bytes()
    assert [header.base_offset for header, _ in iter_batches(data)] == [0, 1, 2]
    assert len(data) == log.size_bytes == log.end.position


@pytest.mark.parametrize(
    ("batch", "code"),
    [
        (memoryview(bytearray(10)), ErrorCode.corrupt_message),
        (batch_of(b"x")[:-1], ErrorCode.invalid_record),
        (changed(batch_of(b"x"), 16, ">b", 1), ErrorCode.invalid_record),
        (changed(batch_of(b"x"), 16, ">b", 3), ErrorCode.corrupt_message),
        (changed(batch_of(b"x"), 8, ">i", 1 << 30, mend=False), ErrorCode.invalid_record),
        (changed(batch_of(b"x"), 8, ">i", 10, mend=False), ErrorCode.corrupt_message),
        (memoryview(bytearray(bytes(batch_of(b"x")) + bytes(batch_of(b"y")))), ErrorCode.invalid_record),
        (changed(batch_of(b"x"), 70, ">b", 99, mend=False), ErrorCode.corrupt_message),
        (changed(batch_of(b"x"), 57, ">i", 0), ErrorCode.invalid_record),
        (changed(batch_of(b"x"), 57, ">i", -1), ErrorCode.invalid_record),
        (changed(batch_of(b"x", b"y"), 23, ">i", 0), ErrorCode.invalid_record),
        (changed(batch_of(b"x"), 21, ">h", 6), ErrorCode.unsupported_compression_type),
        (changed(batch_of(b"x"), 0, ">q", 5), ErrorCode.invalid_record),
        (batch_of(b"x", attributes=0x20), ErrorCode.invalid_record),
        (batch_of(b"x", attributes=0x40), ErrorCode.invalid_record),
        (batch_of(b"x", attributes=0x08), ErrorCode.invalid_timestamp),
        (batch_of(b"x", producer=(1, 0, -1)), ErrorCode.invalid_record),
        (batch_of(b"x", producer=(1, -1, 0)), ErrorCode.invalid_record),
        (batch_of(b"x", timestamp=NOW_MS + 3_600_001), ErrorCode.invalid_timestamp),
    ],
    ids=[
        "short", "cut", "magic", "no magic", "length", "no length", "two batches", "checksum", "no records",
        "negative count", "delta", "codec", "base offset", "control", "delete horizon",
        "log append time", "no sequence", "no epoch", "future",
    ],
)  # fmt: skip
def test_what_is_not_one_sound_batch_is_refused_and_leaves_no_trace(tmp_path, batch, code):
    log = open_log(tmp_path / "t-0")
    fill(log, 1)
    refused(log, memoryview(bytearray(batch)), code)
    assert append(log, b"next").base_offset == 1


def _claiming(batch, count):
    return changed(changed(memoryview(bytearray(batch)), 57, ">i", count), 23, ">i", count - 1)


@pytest.mark.parametrize("codec", Codec)
def test_a_batch_cannot_claim_more_records_than_its_bytes_hold(tmp_path, codec):
    """Or seventy bytes would move the end of the log by 2^31."""
    log = open_log(tmp_path / "t-0", LogConfig(max_message_bytes=2**31 - 1))
    one = encode_batch([Record(0, NOW_MS, None, b"x")], codec=codec)
    refused(log, _claiming(one, 2**31 - 1), ErrorCode.invalid_record)
    refused(log, _claiming(one, 2_000_000), ErrorCode.invalid_record)
    # The smallest records that there are, as densely as each codec packs them.
    smallest = encode_batch([Record(place, NOW_MS, None, None) for place in range(20_000)], codec=codec)
    assert log.append(memoryview(smallest), leader_epoch=0, now_ms=NOW_MS).last_offset == 19_999
    if codec is not Codec.NONE:
        refused(log, _claiming(smallest, 64 * 1024 * 1024 // 7 + 1), ErrorCode.invalid_record)


@pytest.mark.parametrize("codec", [codec for codec in Codec if codec])
def test_no_codec_expands_by_more_than_is_assumed(codec):
    zeros = bytes(16 << 20)
    assert len(zeros) / len(compress(codec, zeros)) <= EXPANSION_RATIO_MAX[codec]


def test_size_limits(tmp_path):
    batch = batch_of(bytes(1000))
    log = open_log(tmp_path / "t-0", LogConfig(max_message_bytes=len(batch) - 1))
    refused(log, batch, ErrorCode.message_too_large)
    log.configure(LogConfig(segment_bytes=len(batch) - 1))
    refused(log, batch, ErrorCode.record_list_too_large)
    log.configure(LogConfig(max_message_bytes=len(batch), segment_bytes=len(batch)))
    assert log.append(batch, leader_epoch=0, now_ms=NOW_MS).base_offset == 0


def test_timestamps_before_the_bound_are_refused(tmp_path):
    log = open_log(tmp_path / "t-0", LogConfig(timestamp_before_max_ms=1000))
    refused(log, batch_of(b"x", timestamp=NOW_MS - 1001), ErrorCode.invalid_timestamp)
    assert append(log, b"x", timestamp=NOW_MS - 1000).base_offset == 0
    assert append(log, b"no timestamp", timestamp=-1).base_offset == 1


def test_log_append_time_restamps_header_and_checksum(tmp_path):
    log = open_log(tmp_path / "t-0", LogConfig(timestamp_type="LogAppendTime"))
    result = append(log, b"a", b"b", timestamp=5, now_ms=NOW_MS + 9)
    assert result.append_time_ms == NOW_MS + 9
    ((header, batch),) = read_batches(log)
    assert header.max_timestamp == NOW_MS + 9
    assert header.crc == checksum(batch)
    assert {record.timestamp for record in decode_records(batch, 1000)} == {NOW_MS + 9}


def test_internal_batches_may_be_control_batches_without_a_sequence(tmp_path):
    log = open_log(tmp_path / "t-0")
    append(log, b"x", producer=(9, 1, 0), attributes=0x10)
    assert log.producers.transactions.first_open_offset == 0
    log.append(marker_of(9, 1, commit=True), leader_epoch=0, now_ms=NOW_MS, internal=True)
    assert log.producers.transactions.first_open_offset is None
    with pytest.raises(ApiError) as stale:
        log.append(marker_of(9, 0, commit=True), leader_epoch=0, now_ms=NOW_MS, internal=True)
    assert stale.value.code is ErrorCode.invalid_producer_epoch


def test_replicated_batches_keep_offsets_and_epochs_and_must_continue_the_log(tmp_path):
    leader, follower = open_log(tmp_path / "a-0"), open_log(tmp_path / "b-0")
    append(leader, b"a", b"b", epoch=2, producer=(4, 0, 0))
    append(leader, b"c", epoch=5, producer=(4, 0, 2))
    batches = [memoryview(batch) for _, batch in read_batches(leader)]
    with pytest.raises(ApiError):
        follower.append_replicated(memoryview(bytes(batches[1])[:-1] + b"!"), now_ms=NOW_MS)
    follower.append_replicated(batches[0], now_ms=NOW_MS)
    with pytest.raises(ApiError):
        follower.append_replicated(batches[0], now_ms=NOW_MS)
    follower.append_replicated(batches[1], now_ms=NOW_MS)
    assert read_batches(follower) == read_batches(leader)
    assert follower.epochs.entries() == leader.epochs.entries() == [(2, 0), (5, 2)]
    assert follower.producers.states[4].batches == leader.producers.states[4].batches


@pytest.mark.parametrize("before", [0, 3])
def test_a_gap_too_wide_for_relative_offsets_starts_a_segment(tmp_path, before):
    log = open_log(tmp_path / "t-0", LogConfig(index_interval_bytes=0))
    fill(log, before)
    far = 3 << 31
    for offset in (far, far + 1, far + 2, far + (1 << 31)):
        batch = batch_of(b"x")
        struct.pack_into(">qii", batch, 0, offset, len(batch) - 12, 4)
        log.append_replicated(batch, now_ms=NOW_MS)
    expected = [*range(before), far, far + 1, far + 2, far + (1 << 31)]
    assert offsets_in(log) == expected
    log.close()
    for clean in (True, False):
        log = open_log(tmp_path / "t-0", clean=clean)
        assert offsets_in(log) == expected
        log.abandon()


def test_a_gap_left_by_compaction_is_replicated(tmp_path):
    leader, follower = open_log(tmp_path / "a-0"), open_log(tmp_path / "b-0")
    fill(leader, 3)
    follower.append_replicated(memoryview(read_batches(leader)[2][1]), now_ms=NOW_MS)
    assert (follower.end_offset, read_batches(follower, 0)[0][0].base_offset) == (3, 2)


# Disks that fill up


class FailingDisk:
    """Stands for os.pwrite: writes some bytes, then fails as told."""

    def __init__(self, monkeypatch, written, error):
        self.active = True
        self._real, self._written, self._error = os.pwrite, written, error
        monkeypatch.setattr(os, "pwrite", self)

    def __call__(self, fd, data, position):
        if not self.active:
            return self._real(fd, data, position)
        if self._written:
            self._real(fd, bytes(data)[: self._written], position)
        if self._error is not None:
            raise OSError(self._error, os.strerror(self._error))
        return self._written


@pytest.mark.parametrize(
    ("written", "error"), [(0, errno.ENOSPC), (30, None), (30, errno.EIO), (0, errno.EFBIG), (70, None)]
)
def test_a_failed_write_leaves_the_log_as_it_was_and_the_next_one_works(
    tmp_path, monkeypatch, written, error
):
    log = open_log(tmp_path / "t-0")
    append(log, b"one", producer=(3, 0, 0))
    disk = FailingDisk(monkeypatch, written, error)
    refused(log, batch_of(b"lost", producer=(3, 0, 1)), ErrorCode.kafka_storage_error)
    assert log.active_segment.path.stat().st_size == log.end.position
    assert values_in(log) == [b"one"]
    disk.active = False
    assert append(log, b"two", producer=(3, 0, 1)).base_offset == 1
    assert values_in(log) == [b"one", b"two"]


def test_a_failed_write_that_cannot_be_undone_closes_the_log_for_writing(tmp_path, monkeypatch):
    log = open_log(tmp_path / "t-0")
    append(log, b"one")
    disk = FailingDisk(monkeypatch, 20, None)

    def no_truncate(fd, length):
        raise OSError(errno.EIO, "broken")

    with monkeypatch.context() as patched:
        patched.setattr(os, "ftruncate", no_truncate)
        refused(log, batch_of(b"lost"), ErrorCode.kafka_storage_error)
    disk.active = False
    refused(log, batch_of(b"refused"), ErrorCode.kafka_storage_error)
    assert values_in(log) == [b"one"]
    log.abandon()
    reopened = open_log(tmp_path / "t-0")
    assert values_in(reopened) == [b"one"]
    assert append(reopened, b"two").base_offset == 1


def test_a_segment_that_cannot_be_started_is_a_storage_error_and_passes(tmp_path, monkeypatch):
    log = open_log(tmp_path / "t-0", LogConfig(segment_bytes=200))
    fill(log, 1)
    real = os.open

    def full(path, *args):
        if str(path).endswith(".log"):
            raise OSError(errno.ENOSPC, "no space")
        return real(path, *args)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", full)
        refused(log, batch_of(bytes(100)), ErrorCode.kafka_storage_error)
    fill(log, 1)
    assert (log.end_offset, len(log.segments)) == (2, 2)


def test_nothing_is_written_through_a_closed_log(tmp_path):
    log = open_log(tmp_path / "t-0")
    fill(log, 1)
    log.close()
    with pytest.raises(ApiError) as raised:
        fill(log, 1)
    assert raised.value.code is ErrorCode.kafka_storage_error


def test_the_stamp_leaves_the_rest_of_the_header_alone(tmp_path):
    log = open_log(tmp_path / "t-0")
    fill(log, 4)
    batch = batch_of(b"v", producer=(8, 2, 0))
    before = read_header(bytes(batch))
    log.append(batch, leader_epoch=3, now_ms=NOW_MS)
    assert read_batches(log, 4)[0][0] == before._replace(base_offset=4, leader_epoch=3)
