"""What compaction keeps and drops, as a reader of the log sees it."""

import gc
from pathlib import Path

import pytest
from tests.compacting import (
    DAY_MS,
    NOW_MS,
    append,
    append_marker,
    batches,
    clean,
    open_log,
    pairs,
    records,
    roll,
)

from penstock.log.log import Log
from penstock.protocol.compression import Codec
from penstock.protocol.record_batch import LOG_APPEND_TIME, read_header


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return open_log(tmp_path / "table-0")


def reopened(log: Log) -> Log:
    """After a crash: everything has to be read back from the files."""
    log.abandon()
    return open_log(log.directory)


@pytest.mark.parametrize("codec", Codec)
def test_the_newest_value_of_each_key_stays_at_its_offset(log: Log, codec: Codec) -> None:
    append(log, (b"a", b"1"), (b"b", b"1"), (b"a", b"2"), codec=codec)
    append(log, (b"c", b"1"), (b"b", b"2"), codec=codec)
    roll(log)
    append(log, (b"c", b"active"))
    clean(log)
    kept = [(2, b"a", b"2"), (3, b"c", b"1"), (4, b"b", b"2"), (5, b"c", b"active")]
    assert pairs(log) == kept
    assert {header.codec for header, _ in batches(log)[:-1]} == {codec}
    assert pairs(reopened(log)) == kept


def test_timestamps_headers_and_epochs_of_kept_records_stay(log: Log) -> None:
    append(log, (b"a", b"1"), (b"b", b"1"), (b"c", b"1"), timestamp=1_000)
    append(log, (b"c", b"2"), timestamp=5_000)
    roll(log)
    clean(log)
    assert [record.timestamp for record in records(log)] == [1_000, 1_001, 5_000]
    first, _ = batches(log)[0]
    assert (first.base_offset, first.last_offset, first.leader_epoch) == (0, 2, 1)
    assert first.max_timestamp == 1_001, "of what is left"


def test_append_time_stays_under_log_append_time(tmp_path: Path) -> None:
    log = open_log(tmp_path / "table-0", timestamp_type="LogAppendTime")
    append(log, (b"a", b"1"), (b"b", None), (b"a", b"2"), timestamp=5)
    roll(log)
    clean(log)
    assert [record.timestamp for record in records(log)] == [NOW_MS, NOW_MS]
    assert batches(log)[0][0].attributes & LOG_APPEND_TIME


def test_batches_that_lose_nothing_are_copied_as_they_are(log: Log) -> None:
    append(log, (b"a", b"1"), (b"b", b"1"), codec=Codec.LZ4)
    roll(log)
    append(log, (b"c", b"1"), codec=Codec.ZSTD)
    roll(log)
    before = batches(log)
    assert clean(log) is not None
    assert batches(log) == before


def test_the_active_segment_and_what_is_not_stable_are_not_touched(log: Log) -> None:
    append(log, (b"a", b"1"))
    roll(log)
    append(log, (b"a", b"2"))
    unstable = append(log, (b"a", b"3"))
    roll(log)
    append(log, (b"a", b"4"))
    clean(log, stable_offset=unstable)
    assert [offset for offset, _, _ in pairs(log)] == [0, 1, 2, 3]
    clean(log)
    assert [offset for offset, _, _ in pairs(log)] == [2, 3]


def test_tombstones_may_be_kept_for_ever(tmp_path: Path) -> None:
    log = open_log(tmp_path / "table-0", delete_retention_ms=2**63 - 1)
    append(log, (b"a", b"1"), (b"a", None), timestamp=NOW_MS - 5)
    roll(log)
    assert clean(log) is not None
    marked = batches(log)[0][0]
    assert marked.delete_horizon_ms == 2**63 - 1
    assert [record.timestamp for record in records(log)] == [NOW_MS - 4]


def test_a_tombstone_goes_on_a_later_pass_once_its_horizon_has_passed(log: Log) -> None:
    append(log, (b"a", b"1"), (b"b", b"1"))
    append(log, (b"a", None), (b"c", b"1"), timestamp=2_000)
    roll(log)
    clean(log)
    assert pairs(log) == [(1, b"b", b"1"), (2, b"a", None), (3, b"c", b"1")]
    marked = batches(log)[1][0]
    assert marked.delete_horizon_ms == NOW_MS + DAY_MS
    assert [record.timestamp for record in records(log)][1:] == [2_000, 2_001]

    append(log, (b"d", b"1"))
    roll(log)
    clean(log, now_ms=NOW_MS + DAY_MS - 1)
    assert (2, b"a", None) in pairs(log)

    append(log, (b"e", b"1"))
    roll(log)
    report = clean(log, now_ms=NOW_MS + DAY_MS)
    assert report is not None
    assert report.stats.tombstones_removed == 1
    assert [key for _, key, _ in pairs(log)] == [b"b", b"c", b"d", b"e"]
    assert records(log)[1].timestamp == 2_001, "the horizon stays in the header, the timestamp in the record"


def test_a_tombstone_never_goes_on_its_first_pass(tmp_path: Path) -> None:
    log = open_log(tmp_path / "table-0", delete_retention_ms=0)
    append(log, (b"a", b"1"))
    append(log, (b"a", None))
    roll(log)
    clean(log)
    assert pairs(log) == [(1, b"a", None)]


def test_records_without_a_key_are_dropped_and_counted(log: Log) -> None:
    append(log, (None, b"lost"), (b"a", b"1"), (None, b"lost too"))
    roll(log)
    report = clean(log)
    assert report is not None
    assert report.stats.keyless_removed == 2
    assert pairs(log) == [(1, b"a", b"1")]


def test_a_live_producer_keeps_its_sequence_through_an_empty_batch(log: Log) -> None:
    append(log, (b"a", b"1"), (b"b", b"1"), producer=(9, 3, 0))
    append(log, (b"a", b"2"), (b"b", b"2"))
    append(log, (b"z", b"1"))
    roll(log)
    clean(log)
    shell = batches(log)[0][0]
    assert (shell.record_count, shell.base_offset, shell.last_offset) == (0, 0, 1)
    assert (shell.producer_id, shell.producer_epoch, shell.base_sequence) == (9, 3, 0)
    for snapshot in log.directory.glob("*.snapshot"):
        snapshot.unlink()
    state = reopened(log).producers.states[9]
    assert (state.epoch, state.next_sequence) == (3, 2)


def test_a_forgotten_producer_keeps_nothing(log: Log) -> None:
    append(log, (b"a", b"1"), producer=(9, 3, 0))
    append(log, (b"a", b"2"))
    roll(log)
    log.producers.expire(NOW_MS + 10 * DAY_MS)
    clean(log)
    assert [header.base_offset for header, _ in batches(log)] == [1]


def test_the_last_offset_of_the_pass_is_not_forgotten(log: Log) -> None:
    append(log, (b"a", b"1"))
    append(log, (None, b"dropped"))
    roll(log)
    clean(log)
    last = batches(log)[-1][0]
    assert (last.last_offset, last.record_count) == (1, 0)


def test_aborted_records_go_and_never_replace_what_was_committed(log: Log) -> None:
    append(log, (b"a", b"committed"))
    append(log, (b"a", b"aborted"), (b"b", b"aborted"), producer=(9, 0, 0), transactional=True)
    append_marker(log, 9, 0, commit=False)
    append(log, (b"z", b"1"))
    roll(log)
    report = clean(log)
    assert report is not None
    assert report.stats.aborted_removed == 2
    assert pairs(log) == [(0, b"a", b"committed"), (4, b"z", b"1")]


def test_an_abort_of_nothing_is_not_taken_for_the_end_of_the_next_transaction(log: Log) -> None:
    append(log, (b"b", b"other"), producer=(8, 0, 0), transactional=True)
    append_marker(log, 8, 0, commit=True)
    append_marker(log, 9, 0, commit=False)
    append(log, (b"a", b"committed"), producer=(9, 0, 0), transactional=True)
    append_marker(log, 9, 0, commit=True)
    roll(log)
    clean(log)
    assert pairs(log) == [(0, b"b", b"other"), (3, b"a", b"committed")]


def test_a_transaction_whose_marker_lies_beyond_the_pass_is_known(log: Log) -> None:
    append(log, (b"a", b"committed"))
    append(log, (b"a", b"aborted"), producer=(9, 0, 0), transactional=True)
    roll(log)
    append_marker(log, 9, 0, commit=False)
    clean(log)
    assert pairs(log) == [(0, b"a", b"committed")]


def test_a_marker_beyond_another_open_transaction_is_known(log: Log) -> None:
    append(log, (b"a", b"committed"))
    append(log, (b"a", b"aborted"), producer=(9, 0, 0), transactional=True)
    roll(log)
    still_open = append(log, (b"b", b"open"), producer=(8, 0, 0), transactional=True)
    append_marker(log, 9, 0, commit=False)
    clean(log, stable_offset=still_open)
    assert pairs(log) == [(0, b"a", b"committed"), (2, b"b", b"open")]


def test_files_are_let_go_of_when_a_pass_ends(log: Log) -> None:
    """Not when the garbage collector comes by: it may come while the pool of files is locked."""
    append(log, (b"a", b"1"), producer=(9, 0, 0), transactional=True)
    roll(log)
    append_marker(log, 9, 0, commit=True)
    append(log, (b"b", b"1"))
    gc.disable()
    try:
        clean(log)
        assert [file.pins for file in log.files._open.values()] == [0] * len(log.files)
    finally:
        gc.enable()


def test_what_is_not_decided_is_left_whole(log: Log) -> None:
    append(log, (b"a", b"1"))
    append(log, (b"a", b"open"), (b"a", b"open too"), producer=(9, 0, 0), transactional=True)
    append(log, (b"b", b"1"))
    roll(log)
    clean(log)
    assert [value for _, _, value in pairs(log)] == [b"1", b"open", b"open too", b"1"]


def control_offsets(log: Log) -> list[int]:
    return [header.base_offset for header, _ in batches(log) if header.is_control and header.record_count]


@pytest.mark.parametrize("commit", [True, False])
def test_a_marker_stays_while_its_transaction_has_data_and_for_a_while_after(log: Log, commit: bool) -> None:
    append(log, (b"a", b"1"), producer=(9, 0, 0), transactional=True)
    append_marker(log, 9, 0, commit=commit)
    append(log, (b"a", b"2"), producer=(9, 0, 1), transactional=True)
    newest_marker = append_marker(log, 9, 0, commit=True)
    for now_ms, markers in (
        (NOW_MS, [1, newest_marker]),  # its data was there when the pass began
        (NOW_MS + 1, [1, newest_marker]),  # no data left: its time starts
        (NOW_MS + DAY_MS, [1, newest_marker]),
        (NOW_MS + DAY_MS + 1, [newest_marker]),
    ):
        append(log, (b"z", b"more"))
        roll(log)
        clean(log, now_ms=now_ms)
        assert control_offsets(log) == markers
    assert pairs(log)[0] == (2, b"a", b"2")


def test_a_user_key_that_looks_like_a_marker_ends_no_marker(log: Log) -> None:
    append(log, (b"a", b"1"), producer=(9, 0, 0), transactional=True)
    marker = append_marker(log, 9, 0, commit=True)
    append(log, (b"\x00\x00\x00\x01", b"a user's key"))
    append(log, (b"a", b"2"))
    for now_ms in (NOW_MS, NOW_MS + 1):
        append(log, (b"z", b"more"))
        roll(log)
        clean(log, now_ms=now_ms)
    assert control_offsets(log) == [marker]


def test_small_segments_become_one_and_keep_their_age(tmp_path: Path) -> None:
    log = open_log(tmp_path / "table-0", segment_bytes=4_000)
    for n in range(12):
        append(log, (b"key-%d" % (n % 4), b"v" * 200), timestamp=NOW_MS + n)
        roll(log)
    newest_closed = log.segments[-2].path.stat().st_mtime_ns // 1_000_000
    clean(log)
    assert [segment.base_offset for segment in log.segments] == [0, 12]
    assert log.segments[0].path.stat().st_mtime_ns // 1_000_000 == newest_closed
    assert log.segments[0].max_timestamp == NOW_MS + 11
    assert [offset for offset, _, _ in pairs(log)] == [8, 9, 10, 11]


def test_a_batch_that_grows_when_it_is_rewritten_still_finds_room(tmp_path: Path) -> None:
    log = open_log(tmp_path / "table-0", segment_bytes=400)
    for _ in range(3):
        append(log, *((b"%d" % n, None) for n in range(20)))
    roll(log)
    clean(log)
    again = reopened(log)
    assert [record.key for record in records(again)] == [b"%d" % n for n in range(20)]


def test_reading_from_any_offset_works_across_the_gaps(log: Log) -> None:
    for n in range(40):
        append(
            log, (b"key-%d" % (n % 3), b"x" * 50), (b"other", b"y"), codec=Codec.ZSTD if n % 2 else Codec.NONE
        )
        if n % 7 == 6:
            roll(log)
    roll(log)
    clean(log)
    everything = records(log)
    for offset in range(log.end_offset):
        assert records(log, offset) == [record for record in everything if record.offset >= offset]


@pytest.mark.parametrize("segments", [1, 2])
def test_a_read_up_to_an_earlier_high_watermark_shows_nothing_beyond_it(log: Log, segments: int) -> None:
    """Compaction may overtake a reader: what was below its high watermark is superseded by what is not."""
    highs = []
    for n in range(6):
        append(log, (b"key", b"%d" % n))
        highs.append(log.end)
        if n % (6 // segments) == 6 // segments - 1:
            roll(log)
    clean(log)
    for high in highs[:-1]:
        for offset in range(high.offset):
            assert log.read(offset, 1 << 16, high) == (b"", offset)
    for offset in range(6):
        assert [record.offset for record in records(log, offset)] == [5]


def test_a_lookup_by_timestamp_finds_what_is_left(log: Log) -> None:
    for n in range(20):
        append(log, (b"key-%d" % (n % 5), b"x"), timestamp=NOW_MS + 10 * n)
    roll(log)
    clean(log)
    match = log.offset_for_timestamp(NOW_MS + 1)
    assert match is not None
    assert (match.offset, match.timestamp) == (15, NOW_MS + 150)


def test_the_codec_of_a_rewritten_batch_is_readable_by_java_clients(log: Log) -> None:
    append(log, *((b"%d" % (n % 9), b"v" * 20) for n in range(30)), codec=Codec.LZ4)
    roll(log)
    clean(log)
    (header, batch), *_ = batches(log)
    assert read_header(batch).codec is Codec.LZ4
    assert header.record_count == 9
    assert batch[61 + 4] & 0x20, "independent blocks"
