"""Opening a log after a clean stop, after a crash, and after lost writes."""

import logging
import os
import shutil
from pathlib import Path

import pytest
from tests.unit.log.helpers import (
    NOW_MS,
    append,
    files_in,
    fill,
    flush,
    marker_of,
    offsets_in,
    open_log,
    read_batches,
    values_in,
)

from penstock.log.config import LogConfig
from penstock.log.producer_snapshots import list_snapshot_offsets
from penstock.log.segment_files import FilePool

SMALL = LogConfig(segment_bytes=1000, index_interval_bytes=200)


def crashed(log, target: Path) -> Path:
    """What is on disk now, as a crash would leave it."""
    shutil.copytree(log.directory, target)
    return target


def test_a_torn_tail_is_cut_at_every_byte(tmp_path):
    log = open_log(tmp_path / "t-0")
    fill(log, 3)
    whole = log.end.position
    append(log, b"tail" * 10)
    content = log.active_segment.path.read_bytes()
    folder = tmp_path / "cut-0"
    for size in range(whole, len(content)):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / "00000000000000000000.log").write_bytes(content[:size])
        recovered = open_log(folder)
        assert recovered.end == (3, 0, whole), size
        assert recovered.active_segment.path.stat().st_size == whole
        assert append(recovered, b"next").base_offset == 3
        assert offsets_in(recovered) == [0, 1, 2, 3]
        recovered.abandon()


def test_a_tail_of_zeroes_is_cut(tmp_path):
    log = open_log(tmp_path / "t-0")
    fill(log, 3)
    log.abandon()
    with open(log.active_segment.path, "ab") as file:
        file.write(bytes(5000))
    assert open_log(tmp_path / "t-0").end == log.end


def test_segments_after_the_damage_go_and_the_cut_is_reported(tmp_path, caplog):
    log = open_log(tmp_path / "t-0", SMALL)
    fill(log, 30)
    log.abandon()
    damaged = log.segments[1]
    with open(damaged.path, "r+b") as file:
        file.seek(damaged.size - 5)
        file.write(b"\x99")
    with caplog.at_level(logging.WARNING, "penstock.log"):
        recovered = open_log(tmp_path / "t-0", SMALL)
    assert offsets_in(recovered) == list(range(recovered.end_offset))
    assert recovered.end_offset == damaged.next_base - 1
    assert list(files_in(tmp_path / "t-0", ".log")) == [s.path.name for s in recovered.segments]
    kept = list(files_in(tmp_path / "t-0", "-cut"))
    assert [name[:24] for name in kept] == [s.path.name for s in log.segments[1:]], (
        "readers may have seen them"
    )
    (cut,) = [record for record in caplog.records if record.message == "torn tail cut"]
    assert cut.segments_dropped == [s.path.name for s in log.segments[2:]]
    assert cut.end_offset == recovered.end_offset
    fill(recovered, 10)
    assert offsets_in(recovered) == list(range(recovered.end_offset))


def test_damage_below_the_recovery_point_is_not_ours_to_cut(tmp_path):
    log = open_log(tmp_path / "t-0")
    fill(log, 10)
    log.abandon()
    with open(log.active_segment.path, "r+b") as file:
        file.seek(8)
        file.write(b"\xff\xff")
    reopened = open_log(tmp_path / "t-0", recovery_point=5)
    assert [(item.start_offset, item.end_offset) for item in reopened.damages] == [(0, 1)]
    assert len(values_in(reopened, 1)) == 9
    assert log.active_segment.path.stat().st_size == log.end.position


def test_only_what_is_above_the_recovery_point_is_checked(tmp_path, monkeypatch):
    log = open_log(tmp_path / "t-0", SMALL)
    fill(log, 30)
    log.abandon()
    checked = []
    monkeypatch.setattr(
        "penstock.log.recovery.checksum_holds",
        lambda fd, at, header: checked.append(header.base_offset) or True,
    )
    open_log(tmp_path / "t-0", SMALL, recovery_point=20)
    assert checked == list(range(20, 30))


def test_recovered_indexes_are_those_that_appending_made(tmp_path):
    log = open_log(tmp_path / "t-0", SMALL)
    for number in range(60):
        append(log, bytes(number % 7 * 20), timestamp=NOW_MS + number * 17 % 50)
    copy = crashed(log, tmp_path / "copy-0")
    recovered = open_log(copy, SMALL)
    for mine, theirs in zip(log.segments, recovered.segments, strict=True):
        assert mine.offsets.encode() == theirs.offsets.encode()
        assert (mine.max_timestamp, mine.size) == (theirs.max_timestamp, theirs.size)
        mine.finish_indexing()
        theirs.finish_indexing()
        assert mine.times.encode() == theirs.times.encode()


@pytest.mark.parametrize("damage", [b"", b"\0" * 16, b"\xff" * 24, b"abc", None])
def test_a_damaged_or_missing_index_is_rebuilt(tmp_path, damage):
    log = open_log(tmp_path / "t-0", SMALL)
    fill(log, 30)
    log.close()
    for name in [*files_in(log.directory, ".index"), *files_in(log.directory, ".timeindex")]:
        (log.directory / name).unlink()
        if damage is not None:
            (log.directory / name).write_bytes(damage)
    reopened = open_log(tmp_path / "t-0", SMALL, clean=True)
    assert reopened.end == log.end
    for offset in range(30):
        assert read_batches(reopened, offset, 1)[0][0].base_offset == offset
    assert reopened.offset_for_timestamp(NOW_MS).offset == 0


@pytest.fixture
def ten_thousand(tmp_path):
    """A log of so many segments, of which only the last may be read."""
    folder, count = tmp_path / "t-0", 10_000
    folder.mkdir()
    for offset in range(count - 1):
        with open(folder / f"{offset:020d}.log", "wb", buffering=0) as file:
            file.write(b"would be damage if anybody looked")
    last = open_log(folder / "new", start_offset=count - 1)
    fill(last, 1)
    last.close()
    for path in (folder / "new").iterdir():
        os.replace(path, folder / path.name)
    (folder / "new").rmdir()
    return folder


def opened_names(monkeypatch) -> set[str]:
    opened: set[str] = set()
    real_open, real_read_bytes = os.open, Path.read_bytes
    monkeypatch.setattr(os, "open", lambda path, *args: opened.add(Path(path).name) or real_open(path, *args))
    monkeypatch.setattr(Path, "read_bytes", lambda path: opened.add(path.name) or real_read_bytes(path))
    return opened


def test_a_clean_start_reads_no_old_segment(ten_thousand, monkeypatch):
    opened = opened_names(monkeypatch)
    log = open_log(ten_thousand, clean=True)
    assert (log.start_offset, log.end_offset, len(log.segments)) == (0, 10_000, 10_000)
    assert opened == {
        "00000000000000009999.log", "00000000000000009999.index", "00000000000000009999.timeindex",
        "00000000000000010000.snapshot",
    }  # fmt: skip


def test_after_a_crash_no_segment_below_the_recovery_point_is_read(ten_thousand, monkeypatch):
    opened = opened_names(monkeypatch)
    log = open_log(ten_thousand, recovery_point=10_000)
    assert (log.start_offset, log.end_offset, len(log.segments)) == (0, 10_000, 10_000)
    assert opened == {"t-0", "00000000000000009999.log", "00000000000000010000.snapshot"}


def test_empty_segments_are_no_damage(tmp_path):
    log = open_log(tmp_path / "t-0", SMALL)
    fill(log, 10)
    log.close()
    (tmp_path / "t-0" / "00000000000000000010.log").write_bytes(b"")
    for clean in (True, False):
        reopened = open_log(tmp_path / "t-0", SMALL, clean=clean)
        assert offsets_in(reopened) == list(range(10))
        assert reopened.end == (10, 10, 0)
        reopened.abandon()


def test_files_of_others_are_left_alone(tmp_path):
    log = open_log(tmp_path / "t-0", SMALL)
    fill(log, 10)
    log.close()
    strangers = ["1.log", "notes.txt", "0000000000000000000x.log", "9" * 20 + ".log", ".hidden"]
    for name in strangers:
        (tmp_path / "t-0" / name).write_text("not ours")
    assert offsets_in(open_log(tmp_path / "t-0", SMALL)) == list(range(10))
    assert all((tmp_path / "t-0" / name).exists() for name in strangers)


def test_a_log_that_lost_all_its_files_says_so(tmp_path, caplog):
    log = open_log(tmp_path / "t-0")
    fill(log, 10)
    log.close()
    log.active_segment.path.unlink()
    with caplog.at_level(logging.WARNING, "penstock.log"):
        assert open_log(tmp_path / "t-0", recovery_point=10).end_offset == 0
    assert "log ends below its recovery point" in caplog.messages


def test_a_clean_log_that_does_not_add_up_is_recovered(tmp_path):
    log = open_log(tmp_path / "t-0")
    fill(log, 5)
    log.close()
    with open(log.active_segment.path, "ab") as file:
        file.write(b"garbage")
    reopened = open_log(tmp_path / "t-0", clean=True, recovery_point=5)
    assert reopened.end == log.end


def test_epochs_survive_a_crash_and_a_lost_checkpoint(tmp_path):
    log = open_log(tmp_path / "t-0", SMALL)
    for epoch in (0, 0, 3, 3, 7):
        append(log, bytes(200), epoch=epoch)
    flush(log)
    expected = [(0, 0), (3, 2), (7, 4)]
    assert (log.directory / "leader-epoch-checkpoint").read_text() == "0\n3\n0 0\n3 2\n7 4\n"
    lost = crashed(log, tmp_path / "lost-0")
    (lost / "leader-epoch-checkpoint").unlink()
    assert open_log(lost, SMALL).epochs.entries() == expected
    (lost / "leader-epoch-checkpoint").unlink(missing_ok=True)
    assert open_log(lost, SMALL, recovery_point=5).epochs.entries() == expected
    broken = crashed(log, tmp_path / "broken-0")
    (broken / "leader-epoch-checkpoint").write_text("0\n9\n0 0\n")
    assert open_log(broken, SMALL, recovery_point=5).epochs.entries() == expected
    ahead = crashed(log, tmp_path / "ahead-0")
    (ahead / "leader-epoch-checkpoint").write_text("0\n4\n0 0\n3 2\n7 4\n9 77\n")
    assert open_log(ahead, SMALL).epochs.entries() == expected


def producers_of(log):
    return {
        pid: (s.epoch, s.next_sequence, s.batches, s.txn_first_offset, s.coordinator_epoch)
        for pid, s in log.producers.states.items()
    }


def test_producers_survive_clean_close_crash_and_lost_snapshots(tmp_path):
    log = open_log(tmp_path / "t-0", SMALL)
    for number in range(12):
        append(log, bytes(150), producer=(1, 0, number))
        append(log, bytes(150), producer=(2, 4, number), attributes=0x10)
    log.append(marker_of(2, 4, commit=True), leader_epoch=0, now_ms=NOW_MS, internal=True)
    append(log, bytes(10), producer=(3, 0, 0), attributes=0x10)
    flush(log)
    expected = producers_of(log)
    unclean = crashed(log, tmp_path / "unclean-0")
    assert producers_of(open_log(unclean, SMALL)) == expected
    bare = crashed(log, tmp_path / "bare-0")
    for name in files_in(bare, ".snapshot"):
        (bare / name).unlink()
    assert producers_of(open_log(bare, SMALL)) == expected
    broken = crashed(log, tmp_path / "broken-0")
    newest = list(files_in(broken, ".snapshot"))[-1]
    (broken / newest).write_bytes((broken / newest).read_bytes()[:-1] + b"?")
    assert producers_of(open_log(broken, SMALL)) == expected
    log.close()
    assert producers_of(open_log(tmp_path / "t-0", SMALL, clean=True)) == expected


def test_snapshots_kept_are_those_at_segment_bases_and_the_newest(tmp_path):
    log = open_log(tmp_path / "t-0", SMALL)
    for _ in range(3):
        fill(log, 9)
        log.close()
        log = open_log(tmp_path / "t-0", SMALL, clean=True)
    kept = set(list_snapshot_offsets(log.directory))
    assert kept == {segment.base_offset for segment in log.segments[1:]} | {log.end_offset}


def test_a_start_offset_beyond_the_end_starts_over_there(tmp_path):
    log = open_log(tmp_path / "t-0")
    fill(log, 3)
    log.abandon()
    reopened = open_log(tmp_path / "t-0", start_offset=10)
    assert (reopened.start_offset, reopened.end_offset) == (10, 10)
    assert append(reopened, b"x").base_offset == 10
    assert list(files_in(tmp_path / "t-0", ".log")) == ["00000000000000000010.log"]


def test_leftovers_and_orphaned_indexes_are_removed(tmp_path):
    log = open_log(tmp_path / "t-0")
    fill(log, 3)
    log.close()
    stray = [
        "00000000000000000000.log.deleted",
        "00000000000000000077.index",
        "00000000000000000077.timeindex",
    ]
    for name in stray:
        (tmp_path / "t-0" / name).write_bytes(b"x")
    (tmp_path / "t-0" / "notes.txt").write_text("not ours")
    open_log(tmp_path / "t-0", clean=True)
    left = set(files_in(tmp_path / "t-0"))
    assert not left & set(stray)
    assert "notes.txt" in left


# Truncation


def test_truncation_drops_whole_batches_and_what_was_learnt_from_them(tmp_path):
    log = open_log(tmp_path / "t-0", SMALL)
    for number in range(30):
        append(
            log,
            bytes(100),
            b"second",
            epoch=number // 10,
            producer=(5, 0, number * 2),
            timestamp=NOW_MS + number,
        )
    flush(log)
    log.truncate_to(25, NOW_MS)
    assert (log.end_offset, offsets_in(log)) == (24, list(range(24)))
    assert log.epochs.entries() == [(0, 0), (1, 20)]
    assert log.producers.states[5].next_sequence == 24
    assert log.synced == log.end
    assert log.active_segment.max_timestamp == NOW_MS + 11
    assert append(log, b"again", producer=(5, 0, 24), epoch=4).base_offset == 24
    assert values_in(log, 24) == [b"again"]
    flush(log)
    log.close()
    reopened = open_log(tmp_path / "t-0", SMALL, clean=True)
    assert (reopened.end_offset, reopened.epochs.latest) == (25, 4)
    assert offsets_in(reopened) == list(range(25))


def test_truncating_everything_starts_at_the_offset(tmp_path):
    log = open_log(tmp_path / "t-0", SMALL)
    fill(log, 30)
    log.truncate_fully_and_start_at(100, NOW_MS)
    assert (log.start_offset, log.end_offset, len(log.segments)) == (100, 100, 1)
    assert append(log, b"x", epoch=1).base_offset == 100
    flush(log)
    assert list(files_in(log.directory, ".log")) == ["00000000000000000100.log"]
    assert log.epochs.entries() == [(1, 100)]


def test_truncating_beyond_the_end_changes_nothing(tmp_path):
    log = open_log(tmp_path / "t-0")
    fill(log, 3)
    before = log.end
    log.truncate_to(3, NOW_MS)
    assert log.end == before


def test_a_flush_begun_before_a_truncation_makes_nothing_durable(tmp_path):
    log = open_log(tmp_path / "t-0", SMALL)
    fill(log, 30)
    flush_job = log.flush_begin()
    log.truncate_to(3, NOW_MS)
    flush_job.run()
    log.flush_done(flush_job)
    fill(log, 40)
    assert log.synced.offset == 0
    assert not list(files_in(log.directory, ".snapshot"))
    flush(log)
    assert log.synced == log.end


def test_files_are_opened_through_the_pool_given(tmp_path):
    files = FilePool(descriptors_max=3)
    log = open_log(tmp_path / "t-0", SMALL, files=files)
    fill(log, 60)
    flush(log)
    assert offsets_in(log) == list(range(60))
    assert len(log.segments) > 3
    assert len(files) == 3
