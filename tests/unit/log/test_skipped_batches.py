"""Batches that are acknowledged and not written: retries, gaps in sequences, snapshots, and early rolls."""

from pathlib import Path

import pytest
from tests.unit.log.helpers import NOW_MS, append, batch_of, fill, open_log

from penstock.log.config import LogConfig
from penstock.log.log import Log, LogAppendInfo
from penstock.protocol.errors import ApiError, ErrorCode

LOSSY = LogConfig(accepts_gaps=True)


def skip(log: Log, sequence: int, *values: bytes, epoch: int = 0) -> LogAppendInfo:
    batch = batch_of(*(values or (b"a", b"b")), producer=(1, epoch, sequence))
    return log.skip(batch, leader_epoch=0, now_ms=NOW_MS)


def test_a_skipped_batch_takes_no_offset_and_its_retry_is_recognised(tmp_path: Path) -> None:
    log = open_log(tmp_path / "t-0", LOSSY)
    append(log, b"first", producer=(1, 0, 0))
    skipped = skip(log, 1)
    assert (skipped.base_offset, skipped.last_offset, skipped.duplicate) == (-1, -1, False)
    assert log.end_offset == 1
    for repeated in (skip(log, 1), append(log, b"a", b"b", producer=(1, 0, 1))):
        assert (repeated.base_offset, repeated.duplicate) == (-1, True)
    assert skip(log, 0, b"first")[:2] == (0, 0), "what is stored keeps its offset"
    assert append(log, b"next", producer=(1, 0, 3)).base_offset == 1


def test_retries_are_recognised_after_a_clean_restart(tmp_path: Path) -> None:
    log = open_log(tmp_path / "t-0", LOSSY)
    append(log, b"first", producer=(1, 0, 2**31 - 2))
    skip(log, 2**31 - 1)  # its second record has sequence 0
    log.close()
    log = open_log(tmp_path / "t-0", LOSSY, clean=True)
    assert append(log, b"a", b"b", producer=(1, 0, 2**31 - 1)).duplicate
    assert append(log, b"first", producer=(1, 0, 2**31 - 2))[:2] == (0, 0)
    assert append(log, b"next", producer=(1, 0, 1)).base_offset == 1


def test_only_where_batches_are_skipped_may_sequences_have_gaps(tmp_path: Path) -> None:
    log = open_log(tmp_path / "t-0")
    append(log, b"first", producer=(1, 0, 0))
    with pytest.raises(ApiError) as refused:
        append(log, b"later", producer=(1, 0, 5))
    assert refused.value.code is ErrorCode.out_of_order_sequence_number
    log.configure(LOSSY)
    assert append(log, b"later", producer=(1, 0, 5)).base_offset == 1
    with pytest.raises(ApiError):
        append(log, b"earlier", producer=(1, 0, 3))
    assert append(log, b"new epoch", producer=(1, 1, 7)).base_offset == 2


def test_what_waits_for_a_retry_is_not_overtaken_where_gaps_are_allowed(tmp_path: Path) -> None:
    log = open_log(tmp_path / "t-0", LOSSY)
    append(log, b"first", producer=(1, 0, 0))
    log.producers.refused(1, 0, 1, ErrorCode.not_enough_replicas)
    with pytest.raises(ApiError) as refused:
        append(log, b"later", producer=(1, 0, 2))
    assert refused.value.code is ErrorCode.not_enough_replicas


def test_a_segment_rolls_early_and_batches_may_be_larger_than_it(tmp_path: Path) -> None:
    log = open_log(tmp_path / "t-0", LogConfig(roll_bytes=1000))
    fill(log, 20, size=100)
    assert len(log.segments) > 2
    assert max(segment.size for segment in log.segments) <= 1000
    append(log, bytes(5000))
    assert log.active_segment.size > 5000
