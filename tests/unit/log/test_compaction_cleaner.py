"""The log cleaner: which log is cleaned when, its checkpoints, and failures."""

import errno
import logging
import os
import threading
import tracemalloc
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import UUID

import pytest
from tests.compacting import NOW_MS, PARTITION, append, batches, clean, open_log, pairs, records, roll
from tests.damage import flip_byte
from tests.unit.log.helpers import open_files

from penstock.log.compaction import cleaner as cleaner_module
from penstock.log.compaction.cleaner import CLEANER_OFFSET_CHECKPOINT, CleanableLog, LogCleaner, measure
from penstock.log.compaction.cleaning_pass import CleanedSegmentWriter
from penstock.log.log import Log
from penstock.log.log_manager import LogManager
from penstock.log.segment import LogSegment
from penstock.protocol.compression import Codec


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return open_log(tmp_path / "table-0")


@pytest.fixture
def cleaner(tmp_path: Path) -> LogCleaner:
    return LogCleaner(tmp_path, dedupe_buffer_bytes=1 << 20)


def dirty(log: Log, *, rounds: int = 2) -> None:
    for n in range(rounds):
        append(log, (b"a", b"%d" % n), (b"b", b"%d" % n))
    roll(log)


def cleanable(log: Log) -> CleanableLog:
    return CleanableLog(log, log.end_offset, log.end_offset)


def is_due(log: Log, checkpoint: int | None = None, now_ms: int = NOW_MS) -> bool:
    return measure(cleanable(log), checkpoint, now_ms).is_due(log.config)


def test_a_clean_log_is_left_alone(log: Log, cleaner: LogCleaner) -> None:
    dirty(log)
    assert clean(log, cleaner) is not None
    assert clean(log, cleaner) is None
    append(log, (b"a", b"in the active segment"))
    assert clean(log, cleaner) is None


def test_the_first_dirty_offset_survives_a_restart_in_kafkas_format(
    log: Log, cleaner: LogCleaner, tmp_path: Path
) -> None:
    dirty(log)
    clean(log, cleaner)
    assert (tmp_path / CLEANER_OFFSET_CHECKPOINT).read_text() == "0\n1\ntable 0 4\n"
    assert LogCleaner(tmp_path, dedupe_buffer_bytes=1 << 20).first_dirty_offset(PARTITION) == 4


def test_a_damaged_checkpoint_costs_a_pass_and_nothing_else(log: Log, tmp_path: Path) -> None:
    (tmp_path / CLEANER_OFFSET_CHECKPOINT).write_text("0\n5\nwhat is this\n")
    dirty(log)
    report = clean(log, LogCleaner(tmp_path, dedupe_buffer_bytes=1 << 20))
    assert report is not None
    assert report.first_dirty_offset == 0


@pytest.mark.parametrize("checkpoint", [0, 10_000])
def test_a_checkpoint_outside_the_log_takes_nothing_for_clean(log: Log, checkpoint: int) -> None:
    dirty(log)
    dirty(log)
    log.delete_records_before(1)
    assert measure(cleanable(log), checkpoint, NOW_MS).dirty.first_offset == 1


def test_the_dirtiest_log_comes_first(tmp_path: Path, cleaner: LogCleaner) -> None:
    logs = {}
    for index in range(3):
        log = open_log(tmp_path / f"table-{index}")
        dirty(log, rounds=4)
        logs["table", index] = cleanable(log)
    while cleaner.clean_filthiest_log(logs, now_ms=NOW_MS):
        pass
    for index, rounds in enumerate((1, 9, 3)):
        dirty(logs["table", index].log, rounds=rounds)
    logs = {partition: cleanable(log) for partition, (log, *_) in logs.items()}
    reports = [cleaner.clean_filthiest_log(logs, now_ms=NOW_MS) for _ in range(4)]
    assert [report and report.partition[1] for report in reports] == [1, 2, 0, None]


def test_the_dirty_ratio_decides(tmp_path: Path) -> None:
    log = open_log(tmp_path / "table-0", min_cleanable_dirty_ratio=0.5)
    dirty(log)
    dirty(log)
    dirty(log)
    bases = [segment.base_offset for segment in log.segments]
    assert is_due(log, bases[1]), "two thirds"
    assert not is_due(log, bases[2]), "one third"


def test_a_topic_that_is_not_compacted_is_not_looked_at(tmp_path: Path, cleaner: LogCleaner) -> None:
    log = open_log(tmp_path / "table-0", cleanup_compact=False, cleanup_delete=True)
    dirty(log)
    assert clean(log, cleaner) is None


def test_young_records_wait_for_their_lag(tmp_path: Path) -> None:
    log = open_log(tmp_path / "table-0", min_compaction_lag_ms=1_000)
    append(log, (b"a", b"old"), (b"a", b"old too"), timestamp=NOW_MS - 5_000)
    roll(log)
    append(log, (b"a", b"young"), timestamp=NOW_MS - 500)
    roll(log)
    clean(log)
    assert [value for _, _, value in pairs(log)] == [b"old too", b"young"]
    clean(log, now_ms=NOW_MS + 1_000)
    assert [value for _, _, value in pairs(log)] == [b"young"]


def test_records_that_have_waited_too_long_are_due_whatever_the_ratio(tmp_path: Path) -> None:
    log = open_log(tmp_path / "table-0", min_cleanable_dirty_ratio=1.0, max_compaction_lag_ms=10_000)
    append(log, (b"a", b"1"), timestamp=NOW_MS)
    roll(log)
    assert not is_due(log, now_ms=NOW_MS + 10_000)
    assert is_due(log, now_ms=NOW_MS + 10_001)
    assert not is_due(log, checkpoint=1, now_ms=NOW_MS + 10_001)


def test_a_map_that_is_full_covers_what_fits_and_goes_on_later(log: Log, tmp_path: Path) -> None:
    cleaner = LogCleaner(tmp_path, dedupe_buffer_bytes=24 * 8)
    for round_ in range(3):
        append(log, *((b"key-%d" % n, b"%d" % round_) for n in range(20)))
        roll(log)
    offsets = []
    while report := clean(log, cleaner):
        assert report.error is None
        offsets.append(report.next_dirty_offset)
    assert len(offsets) > 3
    assert offsets == sorted(offsets)
    assert offsets[-1] == 60
    assert records(log)[-20:] == records(log, 40)
    assert [value for _, _, value in pairs(log)][-20:] == [b"2"] * 20


@pytest.mark.parametrize("position", [16, 40, 70], ids=["magic", "header", "records"])
def test_damage_is_reported_and_never_rewritten(log: Log, cleaner: LogCleaner, position: int) -> None:
    dirty(log)
    flip_byte(log.segments[0].path, position)
    before = log.segments[0].path.read_bytes()
    report = clean(log, cleaner)
    assert report is not None
    assert report.damage is not None
    assert report.damage.offset == log.segments[0].base_offset
    assert cleaner.uncleanable[PARTITION].reason == report.error
    assert log.segments[0].path.read_bytes() == before
    assert list(log.directory.glob("*.cleaned")) == []


def test_a_log_that_failed_is_tried_again_once_its_settings_change(log: Log, cleaner: LogCleaner) -> None:
    dirty(log)
    flip_byte(log.segments[0].path, 70)
    clean(log, cleaner)
    flip_byte(log.segments[0].path, 70)
    assert clean(log, cleaner) is None
    log.configure(log.config._replace(max_message_bytes=5_000))
    report = clean(log, cleaner)
    assert report is not None
    assert report.error is None
    assert cleaner.uncleanable == {}


def test_a_failed_log_does_not_keep_the_others_waiting(tmp_path: Path, cleaner: LogCleaner) -> None:
    logs = {("table", index): open_log(tmp_path / f"table-{index}") for index in range(2)}
    for log in logs.values():
        dirty(log)
    flip_byte(logs["table", 0].segments[0].path, 70)
    candidates = {partition: cleanable(log) for partition, log in logs.items()}
    reports = [cleaner.clean_filthiest_log(candidates, now_ms=NOW_MS) for _ in range(3)]
    assert sorted((report.partition[1], report.error is None) for report in reports if report) == [
        (0, False),
        (1, True),
    ]


def test_a_full_disk_leaves_the_log_as_it_was_and_is_tried_again(
    log: Log, cleaner: LogCleaner, monkeypatch: pytest.MonkeyPatch
) -> None:
    dirty(log)
    before = batches(log)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(CleanedSegmentWriter, "append", full)
        report = clean(log, cleaner)
    assert report is not None
    assert report.error is not None
    assert "No space" in report.error
    assert batches(log) == before
    assert list(log.directory.glob("*.cleaned")) == []
    assert cleaner.uncleanable == {}
    assert clean(log, cleaner) is not None
    assert len(pairs(log)) == 2


@pytest.mark.parametrize("step", ["fsync", "utime", "rename"])
def test_a_disk_that_fails_while_a_segment_is_finished_loses_nothing(
    log: Log, cleaner: LogCleaner, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    dirty(log)
    before = len(open_files(log.directory))

    def fails(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, step, fails)
        report = clean(log, cleaner)
    assert report is not None
    assert report.error is not None
    assert len(pairs(log)) == 4
    assert len(open_files(log.directory)) <= before + 1, "the log's own descriptor for reading"
    assert [path.name for path in log.directory.iterdir() if path.name.count(".") > 1] == []


def test_a_pass_can_be_cancelled_between_batches(log: Log, cleaner: LogCleaner) -> None:
    for n in range(40):
        append(log, (b"key-%d" % (n % 2), b"x" * 4_000))
    roll(log)
    before = batches(log)
    report = cleaner.clean_filthiest_log(
        {PARTITION: cleanable(log)}, now_ms=NOW_MS, is_cancelled=lambda: True
    )
    assert report is not None
    assert report.error == "asked to stop"
    assert report.next_dirty_offset == report.first_dirty_offset == 0
    assert batches(log) == before
    assert cleaner.uncleanable == {}
    assert not cleaner.busy
    assert clean(log, cleaner) is not None


def test_segments_removed_during_a_pass_do_not_come_back(log: Log, cleaner: LogCleaner) -> None:
    for n in range(30):
        append(log, (b"key-%d" % (n % 3), b"x" * 4_000))
    roll(log)

    def remove_all() -> bool:
        assert cleaner.busy == {PARTITION}
        if len(log.segments) > 1:
            log.remove_segments(log.segments[:-1], NOW_MS, end_offset=log.end_offset)
        return False

    report = cleaner.clean_filthiest_log({PARTITION: cleanable(log)}, now_ms=NOW_MS, is_cancelled=remove_all)
    assert report is not None
    assert report.error is not None
    assert "are gone" in report.error
    assert cleaner.uncleanable == {}
    log.abandon()
    assert pairs(open_log(log.directory)) == []


def test_segments_removed_just_before_the_swap_cancel_the_pass(
    log: Log, cleaner: LogCleaner, monkeypatch: pytest.MonkeyPatch
) -> None:
    dirty(log)
    real = Log.replace_segments

    def too_late(log: Log, old: Sequence[LogSegment], new: Sequence[LogSegment]) -> list[Path]:
        log.remove_segments(old, NOW_MS, end_offset=log.end_offset)
        return real(log, old, new)

    monkeypatch.setattr(Log, "replace_segments", too_late)
    report = clean(log, cleaner)
    assert report is not None
    assert "are gone" in (report.error or "")
    assert cleaner.uncleanable == {}
    assert not [path.name for path in log.directory.iterdir() if path.suffix in (".cleaned", ".swap")]


def test_a_truncated_log_is_dirty_from_there_on(log: Log, cleaner: LogCleaner) -> None:
    dirty(log)
    clean(log, cleaner)
    cleaner.truncated(PARTITION, 2)
    assert cleaner.first_dirty_offset(PARTITION) == 2
    cleaner.truncated(PARTITION, 3)
    assert cleaner.first_dirty_offset(PARTITION) == 2


def test_a_recreated_topic_inherits_nothing(log: Log, cleaner: LogCleaner) -> None:
    dirty(log)
    clean(log, cleaner)
    cleaner.clean_filthiest_log({}, now_ms=NOW_MS)
    assert cleaner.first_dirty_offset(PARTITION) is None


def test_a_topic_recreated_between_two_passes_inherits_nothing(
    log: Log, cleaner: LogCleaner, tmp_path: Path
) -> None:
    dirty(log)
    clean(log, cleaner)
    another = open_log(tmp_path / "another-0")
    dirty(another, rounds=30)
    clean(another, cleaner)
    assert len(pairs(another)) == len({key for _, key, _ in pairs(another)})


def test_a_log_that_loses_segments_while_it_is_measured_is_not_given_up(
    log: Log, cleaner: LogCleaner, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        dirty(log)
    real = cleaner_module.measure

    def lose(*args: object) -> object:
        monkeypatch.setattr(cleaner_module, "measure", real)
        log.remove_segments(log.segments[:1], NOW_MS, end_offset=log.end_offset)
        raise FileNotFoundError

    monkeypatch.setattr(cleaner_module, "measure", lose)
    assert clean(log, cleaner) is None
    assert cleaner.uncleanable == {}
    assert clean(log, cleaner) is not None


def test_a_report_says_what_was_done(log: Log, cleaner: LogCleaner) -> None:
    dirty(log, rounds=5)
    size_bytes = log.segments[0].size
    report = clean(log, cleaner)
    assert report is not None
    stats = report.stats
    assert (report.first_dirty_offset, report.next_dirty_offset) == (0, 10)
    assert (stats.records_read, stats.records_written) == (10, 2)
    assert (stats.bytes_read, stats.bytes_written) == (size_bytes, log.segments[0].size)
    assert report.unlink


def test_memory_does_not_grow_with_the_log(tmp_path: Path) -> None:
    log = open_log(tmp_path / "table-0", segment_bytes=8 << 20, index_interval_bytes=4096)
    for n in range(400):
        codec = Codec.ZSTD if n % 2 else Codec.NONE
        append(log, *((b"key-%d" % (n * 20 + m), os.urandom(1_600)) for m in range(20)), codec=codec)
    roll(log)
    assert log.size_bytes > 12 << 20
    cleaner = LogCleaner(tmp_path, dedupe_buffer_bytes=1 << 20)
    tracemalloc.start()
    try:
        report = clean(log, cleaner)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert report is not None
    assert report.error is None
    # The buffer, a chunk of headers for each of the two readings, and a few copies of one batch.
    assert peak_bytes < 5 << 20


@pytest.mark.parametrize("at_look", [0, 2, 5])
def test_a_partition_that_is_moved_away_ends_the_pass_without_an_error(
    tmp_path: Path, cleaner: LogCleaner, caplog: pytest.LogCaptureFixture, at_look: int
) -> None:
    store = LogManager.open(tmp_path / "data", node_id=1)
    log = store.open_or_create(*PARTITION, UUID(int=7), open_log(tmp_path / "x").config, now_ms=NOW_MS)
    for n in range(30):
        append(log, (b"key-%d" % (n % 3), b"x" * 4_000))
    roll(log)
    looks = iter(range(100))

    def moved_away() -> bool:
        if next(looks) == at_look:
            store.purge([store.delete(*PARTITION)])
        return False

    caplog.set_level(logging.INFO, "penstock.log")
    report = cleaner.clean_filthiest_log({PARTITION: cleanable(log)}, now_ms=NOW_MS, is_cancelled=moved_away)
    assert report is not None
    assert report.error == "the log was closed"
    assert cleaner.uncleanable == {}
    assert cleaner.first_dirty_offset(PARTITION) is None
    assert [record for record in caplog.records if record.levelno > logging.INFO or record.exc_info] == []
    assert cleaner.clean_filthiest_log({}, now_ms=NOW_MS) is None, "it is not asked about again"
    store.close(clean=False)


def test_a_partition_that_is_moved_away_while_it_is_measured_is_not_an_error(
    log: Log, cleaner: LogCleaner, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    dirty(log)

    def lose(*args: object) -> object:
        log.abandon()
        raise FileNotFoundError

    monkeypatch.setattr(cleaner_module, "measure", lose)
    assert clean(log, cleaner) is None
    assert cleaner.uncleanable == {}
    assert not caplog.records


@pytest.mark.parametrize("error", [FileNotFoundError(2, "gone"), OSError(9, "Bad file descriptor")])
def test_a_partition_that_is_moved_away_while_it_is_read_is_not_an_error(
    log: Log,
    cleaner: LogCleaner,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    error: OSError,
) -> None:
    dirty(log)

    def lose(*args: object) -> object:
        log.abandon()
        raise error

    monkeypatch.setattr(log, "replace_segments", lose)
    report = clean(log, cleaner)
    assert report is not None
    assert report.error == "the log was closed"
    assert cleaner.uncleanable == {}
    assert [record for record in caplog.records if record.levelno > logging.INFO or record.exc_info] == []


def test_two_threads_clean_two_logs_at_once(tmp_path: Path, cleaner: LogCleaner) -> None:
    logs = {}
    for index in range(2):
        log = open_log(tmp_path / f"t-{index}")
        dirty(log)
        logs["t", index] = cleanable(log)
    both = threading.Barrier(2)

    def meet() -> bool:
        """Within a pass: the other thread must be within another one."""
        if not met.is_set():
            both.wait(20)
            met.set()
        return False

    met = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        passes = [
            pool.submit(cleaner.clean_filthiest_log, logs, now_ms=NOW_MS, is_cancelled=meet) for _ in range(2)
        ]
        reports = [each.result(20) for each in passes]
    assert sorted(report.partition for report in reports if report is not None) == [("t", 0), ("t", 1)]
    assert all(report is not None and report.error is None for report in reports)
    assert not cleaner.busy
