"""Damage and torn tails: damage below the recovery point keeps every byte, and the rest of the log is served."""

import logging
import os
import shutil
import threading
from pathlib import Path
from uuid import UUID

import pytest
from tests.damage import flip_byte
from tests.unit.log.helpers import (
    NOW_MS,
    append,
    batch_of,
    fill,
    flush,
    open_log,
    read_batches,
    values_in,
)

from penstock.log import damage_file, data_directory, offline_repair
from penstock.log.checkpoints import SYNCED_OFFSETS_FILE, SyncedOffsets
from penstock.log.compaction.cleaning_pass import CleanedSegmentWriter
from penstock.log.config import LogConfig
from penstock.log.log import Log
from penstock.log.log_manager import LogManager, LogToOpen
from penstock.log.reader import DamagedRead, damaged_records
from penstock.log.recovery import CrashEvidence
from penstock.log.segment import LogSlice
from penstock.log.validation import read_intact, read_validated
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.record_batch import BATCH_HEADER_BYTES, Record, encode_batch

SMALL = LogConfig(segment_bytes=1000, index_interval_bytes=200)
TOPIC_ID = UUID(int=7)

#: Where in a batch a byte is flipped: offset, length, epoch, magic, checksum, delta, a record.
PLACES = (7, 11, 13, 16, 20, 26, BATCH_HEADER_BYTES + 5)


def sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.glob("*.log")}


def served(log: Log) -> tuple[list[int], list[int]]:
    """Offsets that can be read one by one, and those that are refused as corrupt."""
    whole, refused = [], []
    for offset in range(log.start_offset, log.end_offset):
        try:
            piece = log.read(offset, 1, log.end)
        except ApiError as error:
            refused.append(offset if error.code is ErrorCode.corrupt_message else -1)
        else:
            assert piece.next_offset == offset + 1, "each batch holds one record"
            whole.append(offset)
    return whole, refused


def ranges(log: Log) -> list[tuple[int, int]]:
    return [(item.start_offset, item.end_offset) for item in log.damages]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("batch", [0, 1, 3, "last"])
def test_a_flipped_byte_in_an_old_segment_costs_one_batch(tmp_path, place, batch):
    log = open_log(tmp_path / "t-0", SMALL)
    fill(log, 30)
    flush(log)
    log.abandon()
    old, size = log.segments[1], log.segments[0].size // (log.segments[1].base_offset)
    if batch == "last":
        batch = log.segments[2].base_offset - old.base_offset - 1
    flip_byte(old.path, batch * size + place)
    before = sizes(tmp_path / "t-0")
    reopened = open_log(tmp_path / "t-0", SMALL)
    lost = old.base_offset + batch
    assert served(reopened) == ([n for n in range(30) if n != lost], [lost])
    assert sizes(tmp_path / "t-0") == before
    assert append(reopened, b"next").base_offset == 30
    assert values_in(reopened, 29)[-1] == b"next"


@pytest.mark.parametrize("place", PLACES)
def test_the_open_segment_is_kept_up_to_its_last_sync(tmp_path, place):
    log = open_log(tmp_path / "t-0")
    fill(log, 10)
    flush(log)
    log.abandon()
    size = log.end.position // 10
    # That the last batch names another leader epoch is shown by nothing that follows it.
    for batch in (0, 4, 9)[: 2 if place == 13 else 3]:
        shutil.rmtree(tmp_path / "copy-0", ignore_errors=True)
        shutil.copytree(tmp_path / "t-0", tmp_path / "copy-0")
        flip_byte(tmp_path / "copy-0" / "00000000000000000000.log", batch * size + place)
        reopened = open_log(tmp_path / "copy-0", crash=CrashEvidence(durable_offset=10))
        assert served(reopened) == ([n for n in range(10) if n != batch], [batch])
        assert sizes(tmp_path / "copy-0") == sizes(tmp_path / "t-0")
        assert append(reopened, b"next").base_offset == 10
        assert values_in(reopened, 10) == [b"next"]
        reopened.close()
        again = open_log(tmp_path / "copy-0", clean=True, recovery_point=11)
        assert served(again) == ([n for n in range(11) if n != batch], [batch]), "a clean start reads nothing"
        again.abandon()


def test_beyond_the_last_sync_a_machine_that_went_down_explains_anything(tmp_path):
    log = open_log(tmp_path / "t-0")
    fill(log, 10)
    log.abandon()
    flip_byte(log.active_segment.path, log.end.position // 10 * 6 + 70)
    reopened = open_log(tmp_path / "t-0", crash=CrashEvidence(durable_offset=5))
    assert (served(reopened), reopened.end_offset) == (([0, 1, 2, 3, 4, 5], []), 6)
    (kept,) = (tmp_path / "t-0").glob("*-cut")
    assert kept.stat().st_size == log.end.position // 10 * 4, "whole batches followed"


def test_a_process_that_was_killed_explains_only_an_unfinished_last_write(tmp_path):
    log = open_log(tmp_path / "t-0")
    fill(log, 10)
    log.abandon()
    size = log.end.position // 10
    flip_byte(log.active_segment.path, size * 6 + 70)
    os.truncate(log.active_segment.path, size * 10 - 7)
    reopened = open_log(tmp_path / "t-0", crash=CrashEvidence(durable_offset=5, same_boot=True))
    assert served(reopened) == ([0, 1, 2, 3, 4, 5, 7, 8], [6])
    assert reopened.end_offset == 9
    assert not list((tmp_path / "t-0").glob("*-cut"))


def test_several_damaged_places_are_told_apart(tmp_path):
    log = open_log(tmp_path / "t-0", SMALL)
    fill(log, 30)
    flush(log)
    log.abandon()
    size = log.segments[0].size // log.segments[1].base_offset
    for offset in (2, 3, 5, 11, 29):
        segment = log.segments[max(n for n, s in enumerate(log.segments) if s.base_offset <= offset)]
        flip_byte(segment.path, (offset - segment.base_offset) * size + 70)
    reopened = open_log(tmp_path / "t-0", SMALL, crash=CrashEvidence(durable_offset=30))
    assert ranges(reopened) == [(2, 4), (5, 6), (11, 12), (29, 30)]
    assert served(reopened)[1] == [2, 3, 5, 11, 29]


@pytest.mark.parametrize("durable_offset", [0, 2])
def test_an_offset_that_has_become_lower_does_not_discredit_the_batch_before_it(tmp_path, durable_offset):
    log = open_log(tmp_path / "t-0")
    fill(log, 2)
    flush(log)
    log.abandon()
    with log.segments[0].path.open("r+b") as file:
        file.seek(log.segments[0].size // 2 + 7)
        file.write(b"\0")
    reopened = open_log(tmp_path / "t-0", crash=CrashEvidence(durable_offset=durable_offset))
    assert served(reopened) == ([0], [1] if durable_offset else [])


@pytest.mark.parametrize("slot", [1, -1], ids=["closed", "open"])
def test_an_offset_that_has_changed_right_after_a_damaged_batch_is_damage_too(tmp_path, slot):
    """No checksum covers it, and a higher one would call all that follows a torn tail."""
    log = open_log(tmp_path / "t-0", SMALL)
    fill(log, 30)
    while log.end_offset - log.segments[-1].base_offset < 4:
        fill(log, 1)
    flush(log)
    end, segment = log.end_offset, log.segments[slot]
    size = log.segments[0].size // log.segments[1].base_offset
    log.abandon()
    flip_byte(segment.path, size + 70)
    flip_byte(segment.path, 2 * size + 6)
    before = sizes(tmp_path / "t-0")
    reopened = open_log(tmp_path / "t-0", SMALL, crash=CrashEvidence(durable_offset=end, same_boot=True))
    lost = [segment.base_offset + 1, segment.base_offset + 2]
    assert served(reopened) == ([n for n in range(end) if n not in lost], lost)
    assert sizes(tmp_path / "t-0") == before


def test_it_is_said_loudly_and_only_once(tmp_path, caplog):
    log = open_log(tmp_path / "t-0")
    fill(log, 10)
    log.close()
    flip_byte(log.active_segment.path, 70)
    with caplog.at_level(logging.WARNING, "penstock.log"):
        reopened = open_log(tmp_path / "t-0", crash=CrashEvidence(durable_offset=10))
        served(reopened)
    (said,) = [record for record in caplog.records if record.levelname == "CRITICAL"]
    assert "offsets 0 to 0" in said.damage


def test_a_record_that_looks_like_a_batch_is_not_taken_for_one(tmp_path):
    log = open_log(tmp_path / "t-0")
    decoy = bytes(encode_batch([Record(1, NOW_MS, None, b"decoy")]))
    log.append(batch_of(b"head", decoy), leader_epoch=0, now_ms=NOW_MS)
    append(log, b"after")
    flush(log)
    log.abandon()
    flip_byte(log.active_segment.path, BATCH_HEADER_BYTES + 3)
    reopened = open_log(tmp_path / "t-0", crash=CrashEvidence(durable_offset=3))
    assert ranges(reopened) == [(0, 2)]
    assert values_in(reopened, 2) == [b"after"]


def test_files_that_have_gone_at_the_end_leave_a_range_that_is_refused(tmp_path):
    log = open_log(tmp_path / "t-0", SMALL)
    fill(log, 30)
    flush(log)
    log.abandon()
    gone = log.segments[-2:]
    for segment in gone:
        segment.path.unlink()
    reopened = open_log(tmp_path / "t-0", SMALL, crash=CrashEvidence(durable_offset=30))
    assert reopened.end_offset == gone[0].base_offset
    reopened.mark_lost_until(30, NOW_MS)
    assert served(reopened)[1] == list(range(gone[0].base_offset, 30))
    assert append(reopened, b"next").base_offset == 30
    reopened.close()
    again = open_log(tmp_path / "t-0", SMALL, clean=True, recovery_point=31)
    assert served(again) == ([*range(gone[0].base_offset), 30], list(range(gone[0].base_offset, 30)))


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("is_alone", [True, False], ids=["the log alone", "all files of it"])
def test_a_segment_that_has_gone_from_between_others_is_refused(tmp_path, clean, is_alone, caplog):
    log = open_log(tmp_path / "t-0", SMALL)
    fill(log, 30)
    log.close()
    gone = log.segments[1:3]
    for segment in gone:
        for path in [segment.path] if is_alone else list(tmp_path.glob(f"t-0/{segment.path.stem}.*[xg]")):
            path.unlink()
    lost = [*range(gone[0].base_offset, gone[-1].next_base)]
    options = {"clean": clean, "recovery_point": 30}
    for _ in range(2):
        reopened = open_log(tmp_path / "t-0", SMALL, **options)
        assert served(reopened) == ([n for n in range(30) if n not in lost], lost)
        assert reopened.end_offset == 30
        reopened.close()
    assert [record.levelname for record in caplog.records] == ["CRITICAL"], "it is said once"
    damage_file.save(
        tmp_path / "t-0", [item._replace(accepted=True) for item in damage_file.load(tmp_path / "t-0")]
    )
    assert len(values_in(open_log(tmp_path / "t-0", SMALL, **options))) == 30 - len(lost)


@pytest.mark.parametrize("kept", [0, 2])
def test_a_closed_segment_that_was_cut_between_batches_is_damaged(tmp_path, kept):
    log = open_log(tmp_path / "t-0", SMALL)
    fill(log, 30)
    flush(log)
    log.abandon()
    cut, size = log.segments[1], log.segments[0].size // log.segments[1].base_offset
    os.truncate(cut.path, kept * size)
    lost = [*range(cut.base_offset + kept, cut.next_base)]
    for _ in range(2):
        reopened = open_log(tmp_path / "t-0", SMALL, crash=CrashEvidence(durable_offset=30))
        assert served(reopened) == ([n for n in range(30) if n not in lost], lost)
        reopened.abandon()
    assert append(open_log(tmp_path / "t-0", SMALL), b"next").base_offset == 30


def test_segments_that_have_gone_from_the_beginning_are_refused(tmp_path):
    log = open_log(tmp_path / "t-0", SMALL)
    fill(log, 30)
    log.close()
    for segment in log.segments[:2]:
        segment.path.unlink()
    first = log.segments[2].base_offset
    options = {"clean": True, "recovery_point": 30}
    for _ in range(2):
        reopened = open_log(tmp_path / "t-0", SMALL, **options)
        assert served(reopened) == ([*range(first, 30)], [*range(first)])
        assert (reopened.start_offset, reopened.lost_first_segments) == (0, True)
        reopened.close()
    damage_file.save(
        tmp_path / "t-0", [item._replace(accepted=True) for item in damage_file.load(tmp_path / "t-0")]
    )
    assert open_log(tmp_path / "t-0", SMALL, **options).start_offset == first


def test_producers_saved_within_a_segment_tell_of_no_segment_that_has_gone(tmp_path):
    """A clean stop saves them where the log ends, and the next start goes on in the same segment."""
    open_log(tmp_path / "t-0", SMALL).close()
    for stop in (4, 20, 21):
        log = open_log(tmp_path / "t-0", SMALL, clean=True)
        fill(log, stop - log.end_offset)
        log.close()
    assert open_log(tmp_path / "t-0", SMALL, clean=True).damages == ()


@pytest.mark.parametrize("stop", [Log.abandon, Log.close])
def test_segments_taken_away_on_purpose_are_not_missed(tmp_path, stop):
    log = open_log(tmp_path / "t-0", SMALL)
    fill(log, 30)
    flush(log)
    first = log.segments[2].base_offset
    log.delete_records_before(first)
    log.remove_segments(log.segments[:2], NOW_MS, end_offset=30)
    log.truncate_to(log.segments[-1].base_offset - 1, NOW_MS)
    fill(log, 20)
    stop(log)
    reopened = open_log(tmp_path / "t-0", SMALL)
    assert (reopened.damages, reopened.start_offset, reopened.lost_first_segments) == ((), first, False)


@pytest.mark.parametrize("stop", [Log.abandon, Log.close])
def test_records_taken_away_by_compaction_are_not_missed_once_the_topic_is_not_compacted(tmp_path, stop):
    compacted = SMALL._replace(cleanup_compact=True, cleanup_delete=False)
    log = open_log(tmp_path / "t-0", compacted)
    fill(log, 5)
    log.close()
    log = open_log(tmp_path / "t-0", compacted, clean=True)  # which saved producers within the first segment
    fill(log, 25)
    flush(log)
    writer = CleanedSegmentWriter(log.directory, 0, compacted)
    writer.append(*read_batches(log)[0])
    log.replace_segments(log.segments[:3], [writer.finish(modified_ms=NOW_MS)])
    stop(log)
    assert open_log(tmp_path / "t-0", SMALL).damages == ()


def test_an_accepted_loss_is_passed_over_by_readers(tmp_path):
    log = open_log(tmp_path / "t-0", SMALL)
    fill(log, 30)
    flush(log)
    log.abandon()
    size = log.segments[0].size // log.segments[1].base_offset
    flip_byte(log.segments[0].path, size * 2 + 70)
    last = log.segments[1].next_base - 1
    flip_byte(log.segments[1].path, (last - log.segments[1].base_offset) * size + 70)
    open_log(tmp_path / "t-0", SMALL).abandon()
    damage_file.save(
        tmp_path / "t-0", [item._replace(accepted=True) for item in damage_file.load(tmp_path / "t-0")]
    )
    reopened = open_log(tmp_path / "t-0", SMALL)
    assert reopened.damages == ()
    assert len(values_in(reopened)) == 28
    assert len(values_in(reopened, max_bytes=1)) == 28
    assert values_in(reopened, 2) == values_in(reopened, 3)
    assert values_in(reopened, last) == values_in(reopened, last + 1)


def test_retention_and_truncation_take_damage_along(tmp_path):
    log = open_log(tmp_path / "t-0", SMALL)
    fill(log, 30)
    flush(log)
    log.abandon()
    size = log.segments[0].size // log.segments[1].base_offset
    for segment in (log.segments[0], log.segments[2]):
        flip_byte(segment.path, size + 70)
    reopened = open_log(tmp_path / "t-0", SMALL)
    first, second = ranges(reopened)
    reopened.delete_records_before(first[1])
    assert ranges(reopened) == [second]
    reopened.truncate_to(second[1] + 1, NOW_MS)
    assert ranges(reopened) == [second]
    append(reopened, b"x")
    assert served(reopened)[1] == [second[0]]
    reopened.truncate_to(second[0], NOW_MS)
    assert (ranges(reopened), reopened.end_offset) == ([], second[0])
    assert append(reopened, b"y").base_offset == second[0]
    assert values_in(reopened, second[0]) == [b"y"]
    reopened.abandon()
    assert ranges(open_log(tmp_path / "t-0", SMALL, start_offset=first[1])) == []


@pytest.mark.parametrize("is_active", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_what_a_reader_meets_is_surveyed_and_the_rest_is_served(tmp_path, place, is_active):
    """Below the recovery point nothing is read at a start, so this is how such damage comes to light."""
    log = open_log(tmp_path / "t-0", SMALL)
    fill(log, 30)
    flush(log)
    segment = log.segments[-1 if is_active else 1]
    size = log.segments[0].size // log.segments[1].base_offset
    flip_byte(segment.path, size + place)
    lost = segment.base_offset + 1
    assert [item[:2] for item in log.scan_for_damage(lost)] == ([] if place == 13 else [(lost, lost + 1)])
    expected = [] if place == 13 else [lost]
    assert served(log) == ([n for n in range(30) if n not in expected], expected)
    assert append(log, b"next").base_offset == 30
    log.close()
    again = open_log(tmp_path / "t-0", SMALL, clean=True, recovery_point=31)
    assert served(again)[1] == expected


def test_a_log_is_truncated_where_its_end_is_damaged(tmp_path):
    log = open_log(tmp_path / "t-0")
    fill(log, 10)
    flush(log)
    log.abandon()
    size = log.end.position // 10
    flip_byte(log.active_segment.path, log.end.position - 3)
    reopened = open_log(tmp_path / "t-0", crash=CrashEvidence(durable_offset=10))
    reopened.close()
    assert open_log(tmp_path / "t-0", clean=True, recovery_point=10).end_offset == 10
    reopened = open_log(tmp_path / "t-0", crash=CrashEvidence(durable_offset=10))
    assert (ranges(reopened), reopened.end_offset) == ([(9, 10)], 10)
    reopened.truncate_to(9, NOW_MS)
    assert (ranges(reopened), reopened.end) == ([], (9, 0, 9 * size))
    assert append(reopened, b"y").base_offset == 9
    assert values_in(reopened, 8)[-1] == b"y"


# The notes of syncs


def opened_store(folder: Path) -> tuple[LogManager, Log]:
    store = LogManager.open(folder, node_id=1)
    return store, store.open_or_create("t", 0, TOPIC_ID, LogConfig(), now_ms=NOW_MS)


def test_a_store_knows_the_last_sync_without_a_checkpoint(tmp_path):
    store, log = opened_store(tmp_path)
    fill(log, 10)
    flush(log)
    fill(log, 1)
    store.close(clean=False)
    flip_byte(log.active_segment.path, log.end.position // 11 * 4 + 70)
    store, log = opened_store(tmp_path)
    assert served(log) == ([0, 1, 2, 3, 5, 6, 7, 8, 9, 10], [4])
    store.close()


def test_in_the_same_boot_nothing_whole_is_cut(tmp_path):
    store, log = opened_store(tmp_path)
    data_directory.note_run(tmp_path, data_directory.BrokerRun(data_directory.current_boot_id(), 1))
    fill(log, 10)
    store.close(clean=False)
    flip_byte(log.active_segment.path, log.end.position // 10 * 4 + 70)
    store, log = opened_store(tmp_path)
    assert served(log)[1] == ([4] if data_directory.current_boot_id() else [])
    store.close()


def test_a_truncation_takes_the_note_back_first(tmp_path):
    store, log = opened_store(tmp_path)
    fill(log, 10)
    flush(log)
    store.truncate("t", 0, 4, now_ms=NOW_MS)
    assert SyncedOffsets(tmp_path).offset((TOPIC_ID, 0)) == 4
    fill(log, 3)
    store.close(clean=False)
    os.truncate(log.active_segment.path, log.end.position - 5)
    store, log = opened_store(tmp_path)
    assert (log.end_offset, log.damages) == (6, ())
    store.close()


def test_a_flush_under_way_cannot_note_what_a_truncation_takes_back(tmp_path, monkeypatch):
    store, log = opened_store(tmp_path)
    fill(log, 10)
    flush_job = log.flush_begin()
    begun, going = threading.Event(), threading.Event()
    real = os.fdatasync

    def slow(fd: int) -> None:
        if threading.current_thread() is flushing:
            begun.set()
            going.wait(60)
        real(fd)

    monkeypatch.setattr("penstock.log.flush.os.fdatasync", slow)
    flushing = threading.Thread(target=flush_job.run)
    flushing.start()
    begun.wait(60)
    cutting = threading.Thread(target=store.truncate, args=("t", 0, 4), kwargs={"now_ms": NOW_MS})
    cutting.start()
    going.set()
    flushing.join()
    cutting.join()
    log.flush_done(flush_job)
    assert SyncedOffsets(tmp_path).offset((TOPIC_ID, 0)) <= 4
    store.close(clean=False)


def test_what_is_not_on_disk_is_never_noted(tmp_path):
    store, log = opened_store(tmp_path)
    fill(log, 10)
    assert SyncedOffsets(tmp_path).offset((TOPIC_ID, 0)) == 0
    flush_job = log.flush_begin()
    fill(log, 5)
    flush_job.run()
    assert SyncedOffsets(tmp_path).offset((TOPIC_ID, 0)) == 10
    store.close(clean=False)


def test_notes_of_a_deleted_partition_go_and_their_place_is_used_again(tmp_path):
    store, log = opened_store(tmp_path)
    fill(log, 10)
    flush(log)
    store.delete("t", 0)
    assert not store.has_held("t", 0, TOPIC_ID)
    other = UUID(int=8)
    store.open_or_create_these({("u", 3): LogToOpen(other, LogConfig())}, now_ms=NOW_MS)
    store.close()
    notes = SyncedOffsets(tmp_path)
    assert (TOPIC_ID, 0) not in notes
    assert (other, 3) in notes
    assert (tmp_path / SYNCED_OFFSETS_FILE).stat().st_size == 32


def test_a_damaged_note_is_dropped_and_the_others_hold(tmp_path):
    notes = SyncedOffsets(tmp_path)
    for index in range(3):
        notes.slot((TOPIC_ID, index)).note(10 + index)
    notes.close()
    flip_byte(tmp_path / SYNCED_OFFSETS_FILE, 32 + 25)
    notes = SyncedOffsets(tmp_path)
    assert [notes.offset((TOPIC_ID, index)) for index in range(3)] == [10, 0, 12]


def test_a_folder_that_has_gone_is_missed_only_if_it_had_records(tmp_path):
    store, log = opened_store(tmp_path)
    assert not store.has_held("t", 0, TOPIC_ID)
    fill(log, 3)
    flush(log)
    store.close(clean=False)
    shutil.rmtree(tmp_path / "t-0")
    store = LogManager.open(tmp_path, node_id=1)
    assert store.has_held("t", 0, TOPIC_ID)
    assert not store.has_held("t", 0, UUID(int=8)), "another topic of that name"
    store.close()


def test_what_an_operator_has_verified_is_refused_from_the_next_start_on(tmp_path):
    """Below the recovery point no start looks: an old segment, and the last batch of the log."""
    store = LogManager.open(tmp_path, node_id=1)
    log = store.open_or_create("t", 0, TOPIC_ID, SMALL, now_ms=NOW_MS)
    fill(log, 30)
    store.close()
    old, last = log.segments[1], log.segments[-1]
    flip_byte(old.path, old.size - 3)
    flip_byte(last.path, last.size - 3)
    lost = [old.next_base - 1, 29]
    found = list(offline_repair.verify(tmp_path))
    assert [item.damage[:2] for item in found] == [(offset, offset + 1) for offset in lost]
    assert offline_repair.record_damage(tmp_path, found) == []
    assert list(offline_repair.verify(tmp_path)) == []
    store = LogManager.open(tmp_path, node_id=1)
    log = store.open_or_create("t", 0, TOPIC_ID, SMALL, now_ms=NOW_MS)
    assert served(log) == ([n for n in range(30) if n not in lost], lost)
    assert append(log, b"next").base_offset == 30


def test_what_the_next_start_checks_itself_is_not_noted(tmp_path):
    """It could be a torn tail, and only the start knows how far the log was synced."""
    store = LogManager.open(tmp_path, node_id=1)
    log = store.open_or_create("t", 0, TOPIC_ID, SMALL, now_ms=NOW_MS)
    fill(log, 30)
    flush(log)
    store.close(clean=False)
    with log.segments[-1].path.open("ab") as file:
        file.write(b"half a batch")
    found = list(offline_repair.verify(tmp_path))
    assert len(found) == 1
    assert offline_repair.record_damage(tmp_path, found) == found
    assert offline_repair.list_damage(tmp_path) == []


@pytest.mark.parametrize("place", [7, 16, 20, 26, BATCH_HEADER_BYTES + 5])
def test_a_verified_read_ends_before_damage_and_leads_the_scan_to_it(tmp_path, place):
    log = open_log(tmp_path / "t-0", SMALL)
    fill(log, 30)
    old = log.segments[1]
    first, count = old.base_offset, log.segments[2].base_offset - old.base_offset
    assert count > 3
    flip_byte(old.path, 2 * (old.size // count) + place)
    piece = read_intact(log, first, 1 << 20, log.end)
    assert (piece.next_offset, len(piece.data)) == (first + 2, 2 * (old.size // count))
    for read in (read_intact, read_validated):
        with pytest.raises(DamagedRead) as met:
            read(log, piece.next_offset, 1 << 20, log.end)
        assert first <= met.value.offset < first + count
    log.scan_for_damage(met.value.offset)
    assert ranges(log) == [(first + 2, first + 3)]
    with pytest.raises(ApiError, match="is damaged at offsets") as known:
        read_intact(log, first + 2, 1 << 20, log.end)
    assert not isinstance(known.value, DamagedRead)
    assert read_intact(log, first + 3, 1 << 20, log.end).next_offset == first + count


@pytest.mark.parametrize(
    ("base_offset", "place"),
    [(10, 10), (2, 5), (1 << 60, 11)],
    ids=["after a gap", "before the offset", "beyond the slice"],
)
def test_damage_is_looked_for_in_the_segment_that_was_read(base_offset, place):
    """Compaction may have removed what was at the offset, and the base offset may be damaged, too."""
    piece = LogSlice(base_offset.to_bytes(8, "big") + bytes(92), 12)
    assert damaged_records(5, piece, "it is").offset == place
