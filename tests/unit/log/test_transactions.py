"""Transactions in one log: markers, open transactions, and the index of aborted ones."""

import gc
import struct
from pathlib import Path

import pytest
from tests.compacting import compacted_config
from tests.unit.log.helpers import NOW_MS, append, files_in, flush, marker_of, open_log

from penstock.log.compaction.cleaner import CleanableLog, LogCleaner
from penstock.log.config import LogConfig
from penstock.log.log import Log
from penstock.log.producer_state import ProducerStateManager
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.record_batch import TRANSACTIONAL, EndMarker

DAY_MS = 86_400_000


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return open_log(tmp_path / "t-0")


def begin(log: Log, producer_id: int, *, epoch: int = 0, sequence: int = 0) -> int:
    return append(log, b"x", producer=(producer_id, epoch, sequence), attributes=TRANSACTIONAL).base_offset


def end(log: Log, producer_id: int, *, commit: bool, epoch: int = 0) -> int:
    marker = marker_of(producer_id, epoch, commit=commit)
    return log.append(marker, leader_epoch=0, now_ms=NOW_MS, internal=True).base_offset


def refusal(producers: ProducerStateManager, marker: EndMarker, version: int) -> ErrorCode:
    with pytest.raises(ApiError) as refused:
        producers.check_marker(marker, version)
    return refused.value.code


# Markers


def test_markers_of_older_epochs_are_refused(log: Log) -> None:
    begin(log, 1, epoch=5)
    end(log, 1, commit=True, epoch=5)  # by a coordinator of epoch 3
    producers = log.producers
    assert refusal(producers, EndMarker(1, 4, 3, committed=True), 0) is ErrorCode.invalid_producer_epoch
    fenced = refusal(producers, EndMarker(1, 5, 2, committed=True), 0)
    assert fenced is ErrorCode.transaction_coordinator_fenced
    assert producers.check_marker(EndMarker(1, 5, 3, committed=True), 0)
    assert producers.check_marker(EndMarker(9, 0, 0, committed=False), 2), "of an unknown producer: it fences"


def test_a_late_marker_never_ends_the_next_transaction(log: Log) -> None:
    """With an epoch for each transaction: data of epoch 0 is ended by a marker of epoch 1."""
    marker = EndMarker(1, 1, 3, committed=True)
    begin(log, 1, epoch=0)
    assert log.producers.check_marker(marker, 2)
    end(log, 1, commit=True, epoch=1)
    assert not log.producers.check_marker(marker, 2), "it is there already"
    begin(log, 1, epoch=1)
    assert refusal(log.producers, marker, 2) is ErrorCode.invalid_producer_epoch
    assert log.producers.check_marker(marker, 1), "the older protocol cannot tell"


def test_a_marker_fits_whatever_the_topic_allows(tmp_path: Path) -> None:
    log = open_log(tmp_path / "t-0", LogConfig(max_message_bytes=10))
    assert end(log, 1, commit=False) == 0


# Verification


def test_a_guard_is_void_once_a_marker_has_come(log: Log) -> None:
    producers = log.producers
    assert producers.needs_verification(1, 0)
    guard = producers.begin_verification(1, 0)
    end(log, 1, commit=False)
    with pytest.raises(ApiError) as refused:
        append(log, b"late", producer=(1, 0, 0), attributes=TRANSACTIONAL, guard=guard)
    assert refused.value.code is ErrorCode.invalid_txn_state
    assert log.end_offset == 1


def test_all_who_verify_together_may_append(log: Log) -> None:
    first, second = (log.producers.begin_verification(1, 0) for _ in range(2))
    batch = {"producer": (1, 0, 0), "attributes": TRANSACTIONAL}
    assert append(log, b"a", guard=first, **batch).base_offset == 0
    assert not log.producers.needs_verification(1, 0)
    assert append(log, b"b", guard=second, **batch | {"producer": (1, 0, 1)}).base_offset == 1


def test_an_open_transaction_of_another_epoch_does_not_vouch(log: Log) -> None:
    begin(log, 1, epoch=3)
    assert not log.producers.needs_verification(1, 3)
    assert log.producers.needs_verification(1, 4)
    with pytest.raises(ApiError) as refused:
        log.producers.begin_verification(1, 2)
    assert refused.value.code is ErrorCode.invalid_producer_epoch


def test_unused_guards_are_forgotten(log: Log) -> None:
    guard = log.producers.begin_verification(1, 0)
    number = id(guard)
    assert id(log.producers.begin_verification(1, 0)) == number
    del guard
    gc.collect()
    stale = log.producers.begin_verification(1, 0)
    assert log.producers.transactions.is_valid(stale)
    log.truncate_fully_and_start_at(7, NOW_MS)
    assert not log.producers.transactions.is_valid(stale), "what was verified may have been cut away"


# The last stable offset


def test_an_ended_transaction_holds_back_until_its_marker_is_committed(log: Log) -> None:
    begin(log, 1)
    begin(log, 2)
    end(log, 1, commit=True)
    unstable = log.producers.transactions.first_unstable_offset
    assert (unstable(2), unstable(3)) == (0, 1)
    end(log, 2, commit=False)
    assert (unstable(3), unstable(4)) == (1, None)


# The index of aborted transactions


def aborted_twice(log: Log) -> None:
    """Offsets 0 and 1 are aborted at 3 and 2: another lies within the first."""
    begin(log, 1)
    begin(log, 2)
    end(log, 2, commit=False)
    end(log, 1, commit=False)


def test_the_index_is_in_kafkas_format(tmp_path: Path) -> None:
    log = open_log(tmp_path / "t-0")
    aborted_twice(log)
    log.close()
    data = (tmp_path / "t-0" / "00000000000000000000.txnindex").read_bytes()
    assert list(struct.iter_unpack(">hqqqq", data)) == [(0, 2, 1, 2, 0), (0, 1, 0, 3, 4)]


def test_a_log_without_aborted_transactions_has_no_index(tmp_path: Path) -> None:
    log = open_log(tmp_path / "t-0")
    begin(log, 1)
    end(log, 1, commit=True)
    end(log, 2, commit=False)
    log.close()
    assert not list(files_in(tmp_path / "t-0", ".txnindex"))
    assert not open_log(tmp_path / "t-0", clean=True).has_aborted


def test_markers_may_lie_segments_away_from_their_data(log: Log) -> None:
    begin(log, 1)
    for _ in range(3):
        log.roll(NOW_MS)
        append(log, b"between")
    end(log, 1, commit=False)
    assert log.aborted_in(0, 1) == ((1, 0),)
    assert log.aborted_in(2, 3) == ((1, 0),), "a reader that begins within it must know too"
    assert log.aborted_in(5, 6) == ()


def test_nothing_is_loaded_by_who_may_not_wait(tmp_path: Path) -> None:
    log = open_log(tmp_path / "t-0")
    aborted_twice(log)
    log.roll(NOW_MS)
    log.close()
    log = open_log(tmp_path / "t-0", clean=True)
    with pytest.raises(BlockingIOError):
        log.aborted_in(0, 4, nowait=True)
    assert log.aborted_in(0, 4) == ((2, 1), (1, 0))
    assert log.aborted_in(0, 4, nowait=True) == ((2, 1), (1, 0))


@pytest.mark.parametrize("has_snapshots", [True, False])
@pytest.mark.parametrize("damage", ["cut", "emptied of sense", "gone"])
def test_a_damaged_index_is_rebuilt(tmp_path: Path, damage: str, has_snapshots: bool) -> None:
    log = open_log(tmp_path / "t-0")
    begin(log, 7)
    log.roll(NOW_MS)
    aborted_twice(log)
    end(log, 7, commit=False)
    expected = log.aborted_in(0, log.end_offset)
    log.roll(NOW_MS)
    log.close()
    log = open_log(tmp_path / "t-0", clean=True)
    path = tmp_path / "t-0" / "00000000000000000001.txnindex"
    match damage:
        case "cut":
            path.write_bytes(path.read_bytes()[:-1])
        case "emptied of sense":
            path.write_bytes(bytes(len(path.read_bytes())))
        case "gone":
            path.unlink()
    for snapshot in () if has_snapshots else (tmp_path / "t-0").glob("*.snapshot"):
        snapshot.unlink()
    assert log.aborted_in(0, log.end_offset) == expected == ((2, 2), (1, 1), (7, 0))


def test_truncation_takes_back_what_was_aborted(tmp_path: Path) -> None:
    log = open_log(tmp_path / "t-0")
    aborted_twice(log)
    log.roll(NOW_MS)
    flush(log)
    log.truncate_to(3, NOW_MS)
    assert log.producers.transactions.first_open_offset == 0
    assert log.aborted_in(0, 3) == ((2, 1),)
    end(log, 1, commit=True)
    assert log.aborted_in(0, 4) == ((2, 1),)
    log.truncate_to(2, NOW_MS)
    end(log, 2, commit=True)
    log.roll(NOW_MS)
    flush(log)
    assert not list(files_in(tmp_path / "t-0", ".txnindex")), "nor may an older one stay"


def test_what_was_rolled_right_at_the_recovery_point_is_indexed_again(tmp_path: Path) -> None:
    log = open_log(tmp_path / "t-0")
    aborted_twice(log)
    flush(log)
    recovery_point = log.recovery_point
    log.roll(NOW_MS)
    log.abandon()
    log = open_log(tmp_path / "t-0", recovery_point=recovery_point)
    assert log.aborted_in(0, 4) == ((2, 1), (1, 0))


def test_the_index_goes_with_its_segment(tmp_path: Path) -> None:
    log = open_log(tmp_path / "t-0")
    aborted_twice(log)
    log.roll(NOW_MS)
    append(log, b"x")
    flush(log)
    assert list(files_in(tmp_path / "t-0", ".txnindex"))
    for path in log.remove_segments(log.segments[:1], NOW_MS, end_offset=log.end_offset):
        path.unlink()
    assert not [name for name in files_in(tmp_path / "t-0") if ".txnindex" in name]


# Compaction


def clean(log: Log, cleaner: LogCleaner, later_ms: int) -> None:
    cleanable = CleanableLog(log, log.end_offset, log.end_offset)
    report = cleaner.clean_filthiest_log({("t", 0): cleanable}, now_ms=NOW_MS + later_ms)
    assert report is not None
    assert report.error is None


def test_compaction_keeps_the_index_as_long_as_the_marker(tmp_path: Path) -> None:
    """A reader that knows of an aborted transaction and never sees its marker would skip the producer's next one."""
    cleaner = LogCleaner(tmp_path, dedupe_buffer_bytes=1 << 16)
    log = open_log(tmp_path / "t-0", compacted_config())
    begin(log, 1)
    end(log, 1, commit=False, epoch=1)
    for sequence, later_ms in enumerate((0, 0, 2 * DAY_MS)):
        assert log.aborted_in(0, 2) == ((1, 0),)
        append(log, b"x", producer=(5, 0, sequence))
        log.roll(NOW_MS)
        clean(log, cleaner, later_ms)
    assert log.aborted_in(0, 2) == ()
    log.close()
    assert not list(files_in(tmp_path / "t-0", ".txnindex"))
    log = open_log(tmp_path / "t-0", compacted_config(), clean=True)
    assert log.producers.states[1].epoch == 1, "the marker's shell still fences"
