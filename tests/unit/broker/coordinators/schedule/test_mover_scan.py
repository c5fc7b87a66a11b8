"""The mover finds held records in a log: with their batch, committed only, and after compaction."""

from pathlib import Path

import pytest
from tests import compacting
from tests.compacting import NOW_MS, append, append_marker, batches, pairs, roll

from penstock.broker.coordinators.schedule.mover import ScanResult, scan_held_records
from penstock.log.compaction.cleaner import CleanableLog, LogCleaner
from penstock.log.log import Log
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.record_batch import TRANSACTIONAL, Record, encode_batch, open_batch, read_header
from penstock.scheduling.intake import (
    ScheduleLimits,
    SplitBatch,
    is_held_batch,
    split_batch,
    stamp_append_time,
)

LIMITS = ScheduleLimits(now_ms=NOW_MS, delay_ms_max=10**9, record_bytes_max=10**6)
LATER = (("penstock-deliver-after", b"5000"),)


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return compacting.open_log(tmp_path / "table-0", schedule=True)


def parted(
    *records: tuple[bytes, bytes, bool], producer: tuple[int, int, int], attributes: int = 0
) -> SplitBatch:
    """Key, value, and whether it is held."""
    batch = encode_batch(
        [
            Record(n, NOW_MS, key, value, LATER if held else ())
            for n, (key, value, held) in enumerate(records)
        ],
        producer_id=producer[0],
        producer_epoch=producer[1],
        base_sequence=producer[2],
        attributes=attributes,
    )
    found = split_batch(*open_batch(batch, 1 << 20), LIMITS)
    assert found is not None
    stamp_append_time(found.control, NOW_MS)
    return found


def hold(
    log: Log,
    *records: tuple[bytes, bytes, bool],
    producer: tuple[int, int, int] = (-1, -1, -1),
    attributes: int = 0,
) -> int:
    """Returns the offset of the control batch."""
    found = parted(*records, producer=producer, attributes=attributes)
    appended = log.append(memoryview(found.rest), leader_epoch=1, now_ms=NOW_MS, control=found.control)
    return appended.base_offset - 1


def scanned(log: Log, offset: int = 0) -> ScanResult:
    return scan_held_records(log, offset, log.end)


def found_keys(log: Log, offset: int = 0) -> list[tuple[int, list[bytes]]]:
    """Where records are held, and their keys."""
    return [
        (
            piece.at.offset,
            [
                _key(piece.held.block.record(n, start))
                for n, start in enumerate(piece.held.block.starts()[:-1])
            ],
        )
        for piece in scanned(log, offset).found
    ]


def _key(record: object) -> bytes:
    return record.key_value[1 : 1 + record.key_value[0] // 2]  # type: ignore[attr-defined]


def clean(log: Log, taken_offset: int) -> None:
    cleaner = LogCleaner(log.directory.parent, dedupe_buffer_bytes=1 << 20)
    logs = {("table", 0): CleanableLog(log, log.end_offset, log.end_offset, taken_offset)}
    assert cleaner.clean_filthiest_log(logs, now_ms=NOW_MS) is not None


def test_what_is_held_is_found_with_its_rest(log: Log) -> None:
    append(log, (b"x", b"1"))
    first = hold(log, (b"a", b"1", True), (b"b", b"1", False))
    second = hold(log, (b"c", b"1", True), producer=(7, 0, 0))
    append(log, (b"y", b"1"))
    assert found_keys(log) == [(first, [b"a"]), (second, [b"c"])]
    assert scanned(log).next_offset == log.end_offset
    assert scanned(log).found[0].after.offset == second
    assert found_keys(log, second) == [(second, [b"c"])]


def test_what_lost_its_rest_in_a_crash_does_not_count(log: Log) -> None:
    found = parted((b"a", b"1", True), producer=(7, 0, 0))
    log.append(memoryview(found.control), leader_epoch=1, now_ms=NOW_MS, internal=True)
    assert scanned(log).next_offset == 0, "its rest may follow"
    again = hold(log, (b"a", b"1", True), producer=(7, 0, 0))
    assert found_keys(log) == [(again, [b"a"])]


def test_a_repeat_is_not_held_twice(log: Log) -> None:
    offset = hold(log, (b"a", b"1", True), (b"b", b"1", False), producer=(7, 0, 0))
    end = log.end_offset
    hold(log, (b"a", b"1", True), (b"b", b"1", False), producer=(7, 0, 0))
    assert log.end_offset == end
    assert found_keys(log) == [(offset, [b"a"])]


@pytest.mark.parametrize("commit", [True, False])
def test_of_transactions_those_count_that_were_committed(log: Log, commit: bool) -> None:
    append(log, (b"x", b"1"))
    offset = hold(log, (b"a", b"1", True), producer=(7, 0, 0), attributes=TRANSACTIONAL)
    other = hold(log, (b"b", b"1", True), producer=(8, 0, 0))
    append_marker(log, 7, 0, commit=commit)
    later = hold(log, (b"c", b"1", True), producer=(7, 0, 1), attributes=TRANSACTIONAL)
    append_marker(log, 7, 0, commit=not commit)
    expected = {offset: [b"a"]} if commit else {later: [b"c"]}
    assert dict(found_keys(log)) == {other: [b"b"], **expected}


def test_compaction_keeps_what_is_not_taken_over(log: Log) -> None:
    offset = hold(log, (b"k", b"held", True), (b"k", b"old", False))
    append(log, (b"k", b"new"))
    roll(log)
    clean(log, taken_offset=0)
    assert [value for _, _, value in pairs(log)] == [b"new"]
    assert found_keys(log) == [(offset, [b"k"])], "although nothing is left of its rest"
    clean_again_after_more(log, taken_offset=log.end_offset)
    assert found_keys(log) == []
    assert not any(is_held_batch(header, batch) for header, batch in batches(log)), "taken over, and gone"


def clean_again_after_more(log: Log, taken_offset: int) -> None:
    append(log, (b"other", b"1"))
    roll(log)
    clean(log, taken_offset)


def test_batches_larger_than_a_read_are_found(log: Log) -> None:
    offset = hold(log, (b"k", b"v" * 300_000, True), (b"l", b"w" * 300_000, False))
    assert found_keys(log) == [(offset, [b"k"])]
    assert read_header(batches(log)[0][1]).is_control


def test_damaged_records_are_not_moved(log: Log) -> None:
    hold(log, (b"k", b"held", True), (b"l", b"now", False))
    (path,) = log.directory.glob("*.log")
    stored = path.read_bytes()
    path.write_bytes(stored.replace(b"held", b"hold"))
    with pytest.raises(ApiError, match="damaged") as raised:
        scanned(log)
    assert raised.value.code is ErrorCode.corrupt_message
    path.write_bytes(stored)
    assert found_keys(log) == [(0, [b"k"])]
