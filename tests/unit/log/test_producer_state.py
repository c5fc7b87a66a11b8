"""Idempotence: accepted, duplicate and refused batches, and the snapshot file."""

import os
import struct

import pytest
from crc32c import crc32c
from tests.unit.log.helpers import NOW_MS, append, batch_of, flush, marker_of, open_log

from penstock.log import producer_snapshots
from penstock.log.config import LogConfig
from penstock.log.producer_state import PLANNED_PRODUCER_IDS_FROM, ProducerStateManager, increment_sequence
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.record_batch import TRANSACTIONAL

MAX = 2**31 - 1


@pytest.fixture
def log(tmp_path):
    return open_log(tmp_path / "t-0")


def refused(log, code, *values, **options):
    end = log.end
    with pytest.raises(ApiError) as raised:
        append(log, *values, **options)
    assert (raised.value.code, log.end) == (code, end)


def test_a_repeat_inside_the_window_returns_the_original_offsets(log):
    for number in range(7):
        append(log, b"a", b"b", producer=(1, 0, number * 2))
    for number in range(2, 7):
        repeated = append(log, b"a", b"b", producer=(1, 0, number * 2))
        assert (repeated.base_offset, repeated.last_offset, repeated.duplicate) == (
            number * 2,
            number * 2 + 1,
            True,
        )
    assert log.end_offset == 14
    refused(log, ErrorCode.out_of_order_sequence_number, b"a", b"b", producer=(1, 0, 2))
    assert append(log, b"c", producer=(1, 0, 14)).base_offset == 14


def test_gaps_and_partial_repeats_are_out_of_order(log):
    append(log, b"a", b"b", producer=(1, 0, 0))
    for sequence in (1, 3, 100):
        refused(log, ErrorCode.out_of_order_sequence_number, b"x", producer=(1, 0, sequence))
    refused(log, ErrorCode.out_of_order_sequence_number, b"x", producer=(1, 0, 0))


def test_an_unknown_producer_is_welcome_at_any_sequence(log):
    assert append(log, b"x", producer=(1, 5, 1234)).base_offset == 0
    assert append(log, b"x", producer=(1, 5, 1235)).base_offset == 1


# What a leader before this one took and lost


def test_who_cannot_have_written_before_begins_at_zero(log):
    for attributes in (0, TRANSACTIONAL):
        refused(
            log,
            ErrorCode.out_of_order_sequence_number,
            b"x",
            producer=(1, 5, 12),
            attributes=attributes,
            epoch=1,
        )
    assert append(log, *[b"x"] * 12, producer=(1, 5, 0), epoch=1).base_offset == 0
    assert append(log, b"x", producer=(1, 5, 12), epoch=1).base_offset == 12


def test_a_plan_goes_on_in_the_next_topic(log):
    assert append(log, b"x", producer=(PLANNED_PRODUCER_IDS_FROM + 1, 0, 12), epoch=1).base_offset == 0


def _expire(log):
    append(log, b"y", producer=(2, 0, 0), epoch=1)
    assert log.producers.expire(NOW_MS + 86_400_000) == 1


def _delete_records(log):
    append(log, b"y", epoch=1)
    log.delete_records_before(1)


def _retain(log):
    append(log, b"y", epoch=1)
    log.roll(NOW_MS)
    log.remove_segments(log.segments[:1], NOW_MS, end_offset=log.end_offset)


def _replicate_a_gap(log):
    batch = batch_of(b"y")
    struct.pack_into(">qii", batch, 0, 3, len(batch) - 12, 1)
    log.append_replicated(batch, now_ms=NOW_MS)


def _restart_further_on(log):
    log.truncate_fully_and_start_at(7, NOW_MS)


@pytest.mark.parametrize("forget", [_expire, _delete_records, _retain, _replicate_a_gap, _restart_further_on])
def test_where_a_producer_may_have_been_forgotten_any_sequence_is_welcome(log, forget):
    forget(log)
    assert not append(log, b"x", producer=(1, 5, 12), epoch=1).duplicate


def test_a_log_that_restarts_at_zero_checks_sequences_of_all_producers(log):
    _restart_further_on(log)
    log.truncate_fully_and_start_at(0, NOW_MS)
    refused(log, ErrorCode.out_of_order_sequence_number, b"x", producer=(1, 5, 12), epoch=1)


@pytest.mark.parametrize(
    ("age_ms", "policy", "is_refused"),
    [(1000, False, True), (86_400_000, False, False), (1000, True, False)],
)
def test_a_restarted_young_replica_checks_sequences_of_all_producers(tmp_path, age_ms, policy, is_refused):
    log = open_log(tmp_path / "t-0")
    append(log, b"y", producer=(2, 0, 0), epoch=1)
    log.close()
    made = log.directory / "partition.metadata"
    made.write_text("version: 0")
    os.utime(made, ns=((NOW_MS - age_ms) * 1_000_000,) * 2)
    log = open_log(log.directory, LogConfig(cleanup_compact=policy), clean=True)
    assert append(log, b"y", producer=(2, 0, 1), epoch=1).base_offset == 1
    if is_refused:
        refused(log, ErrorCode.out_of_order_sequence_number, b"x", producer=(1, 5, 12), epoch=1)
    else:
        assert append(log, b"x", producer=(1, 5, 12), epoch=1).base_offset == 2


def test_a_new_epoch_starts_at_zero_and_fences_the_old(log):
    append(log, b"x", producer=(1, 0, 0))
    refused(log, ErrorCode.out_of_order_sequence_number, b"x", producer=(1, 1, 1))
    append(log, b"x", producer=(1, 1, 0))
    refused(log, ErrorCode.invalid_producer_epoch, b"x", producer=(1, 0, 1))
    refused(log, ErrorCode.invalid_producer_epoch, b"x", producer=(1, 0, 0))


def test_sequences_wrap(log):
    append(log, b"x", producer=(1, 0, MAX - 1))
    assert append(log, b"a", b"b", b"c", producer=(1, 0, MAX)).base_offset == 1
    assert append(log, b"x", producer=(1, 0, 2)).base_offset == 4
    assert append(log, b"a", b"b", b"c", producer=(1, 0, MAX)).duplicate
    assert [increment_sequence(MAX, 1), increment_sequence(MAX - 1, 1), increment_sequence(-1, 4)] == [
        0,
        MAX,
        -1,
    ]


def test_the_window_survives_a_clean_restart_and_a_crash(tmp_path):
    log = open_log(tmp_path / "t-0")
    for number in range(8):
        append(log, b"x", producer=(1, 3, number))
    log.close()
    for clean in (True, False):
        log = open_log(tmp_path / "t-0", clean=clean)
        for number in range(3, 8):
            repeated = append(log, b"x", producer=(1, 3, number))
            assert (repeated.base_offset, repeated.duplicate) == (number, True)
        refused(log, ErrorCode.out_of_order_sequence_number, b"x", producer=(1, 3, 2))
        log.abandon()


def test_a_repeat_under_log_append_time_tells_the_time_of_the_original(tmp_path):
    log = open_log(tmp_path / "t-0", LogConfig(timestamp_type="LogAppendTime"))
    append(log, b"x", producer=(1, 0, 0), now_ms=NOW_MS)
    assert append(log, b"x", producer=(1, 0, 0), now_ms=NOW_MS + 50).append_time_ms == NOW_MS


def test_idle_producers_are_forgotten_but_not_those_in_a_transaction(tmp_path):
    log = open_log(tmp_path / "t-0", producer_expiry_ms=1000)
    append(log, b"x", producer=(1, 0, 0))
    append(log, b"x", producer=(2, 0, 0), attributes=0x10)
    append(log, b"x", producer=(3, 0, 0), now_ms=NOW_MS + 500)
    assert log.producers.expire(NOW_MS + 999) == 0
    assert log.producers.expire(NOW_MS + 1000) == 1
    assert set(log.producers.states) == {2, 3}
    assert append(log, b"x", producer=(1, 0, 77)).base_offset == 3


def test_who_appends_by_plan_is_remembered_for_longer(tmp_path):
    """A plan is repeated after its shard was down, however long that was."""
    log = open_log(tmp_path / "t-0")
    planned = (PLANNED_PRODUCER_IDS_FROM + 1, 0, 0)
    append(log, b"x", producer=planned)
    append(log, b"x", producer=(1, 0, 0))
    log.close()
    later_ms = NOW_MS + 29 * 86_400_000
    log = open_log(tmp_path / "t-0", clean=True, now_ms=later_ms)
    assert append(log, b"x", producer=planned, now_ms=later_ms).duplicate
    assert not append(log, b"x", producer=(1, 0, 0), now_ms=later_ms).duplicate
    assert log.producers.expire(later_ms + 86_400_000) == 2


def test_a_producer_of_old_records_is_not_idle(tmp_path):
    """Idleness is about the producer, not about what the records claim."""
    log = open_log(tmp_path / "t-0", producer_expiry_ms=1000)
    append(log, b"x", producer=(1, 0, 0), timestamp=5)
    assert log.producers.expire(NOW_MS + 10) == 0
    assert append(log, b"x", producer=(1, 0, 0), timestamp=5).duplicate


def test_transactions_open_and_end(log):
    append(log, b"x", producer=(1, 0, 0), attributes=0x10)
    append(log, b"x", producer=(2, 0, 0), attributes=0x10)
    assert log.producers.transactions.first_open_offset == 0
    refused(log, ErrorCode.invalid_txn_state, b"plain", producer=(1, 0, 1))
    log.append(
        marker_of(1, 0, commit=False, coordinator_epoch=6), leader_epoch=0, now_ms=NOW_MS, internal=True
    )
    assert log.producers.transactions.first_open_offset == 1
    assert log.producers.states[1].coordinator_epoch == 6
    assert append(log, b"x", producer=(1, 0, 1), attributes=0x10).base_offset == 3
    log.append(marker_of(2, 1, commit=True), leader_epoch=0, now_ms=NOW_MS, internal=True)
    refused(log, ErrorCode.invalid_producer_epoch, b"x", producer=(2, 0, 1), attributes=0x10)
    assert append(log, b"x", producer=(2, 1, 0), attributes=0x10).base_offset == 5


# The snapshot file


def test_the_snapshot_is_in_kafkas_format(tmp_path):
    log = open_log(tmp_path / "t-0")
    append(log, b"a", b"b", producer=(77, 2, 10), attributes=0x10)
    log.close()
    data = (tmp_path / "t-0" / "00000000000000000002.snapshot").read_bytes()
    version, crc, count = struct.unpack_from(">hIi", data)
    assert (version, count, len(data)) == (1, 1, 10 + 46)
    assert crc == crc32c(data[6:])
    row = struct.unpack_from(">qhiqiqiq", data, 10)
    assert row == (77, 2, 11, 1, 1, NOW_MS, -1, 0)


def test_the_last_row_of_a_producer_is_its_newest_batch(tmp_path):
    log = open_log(tmp_path / "t-0")
    for number in range(9):
        append(log, b"x", producer=(1, 0, number))
    rows = producer_snapshots.take_snapshot(log.producers, log.end_offset).rows
    assert [row[2] for row in rows] == [4, 5, 6, 7, 8]


def test_one_row_for_each_producer_is_read_too():
    """As Kafka writes them."""
    states = producer_snapshots.decode_snapshot(
        producer_snapshots.encode_snapshot(
            [(1, 4, 9, 100, 2, NOW_MS, 7, -1), (2, 0, -1, -1, 0, NOW_MS, 3, -1)]
        )
    )
    assert states[1].batches == [(7, 9, 98, 100, NOW_MS)]
    assert (states[1].epoch, states[1].next_sequence, states[1].coordinator_epoch) == (4, 10, 7)
    assert (states[2].batches, states[2].next_sequence, states[2].coordinator_epoch) == ([], 0, 3)


@pytest.mark.parametrize("position", range(56))
def test_a_damaged_snapshot_is_refused(position):
    data = bytearray(producer_snapshots.encode_snapshot([(1, 4, 9, 100, 2, NOW_MS, 7, -1)]))
    data[position] ^= 0x10
    with pytest.raises(producer_snapshots.CorruptProducerSnapshot):
        producer_snapshots.decode_snapshot(bytes(data))


def test_expired_producers_are_not_restored():
    producers = ProducerStateManager(expiry_ms=1000)
    states = producer_snapshots.decode_snapshot(
        producer_snapshots.encode_snapshot(
            [(1, 0, 0, 0, 0, NOW_MS - 1000, -1, -1), (2, 0, 0, 1, 0, NOW_MS - 999, -1, -1)]
        )
    )
    producers.restore(states.items(), NOW_MS)
    assert set(producers.states) == {2}


def test_the_batch_that_the_log_starts_within_is_still_known_after_a_crash(tmp_path):
    log = open_log(tmp_path / "t-0")
    append(log, b"a", b"b", b"c", producer=(5, 0, 0))
    log.delete_records_before(2)
    log.abandon()
    log = open_log(tmp_path / "t-0", start_offset=2)
    assert append(log, b"a", b"b", b"c", producer=(5, 0, 0)).duplicate


@pytest.mark.parametrize("flushed", [True, False])
def test_producers_outlive_their_batches(tmp_path, flushed):
    """Retention takes the records, not what is known of who wrote them."""
    log = open_log(tmp_path / "t-0", LogConfig(segment_bytes=300, retention_bytes=0))
    append(log, bytes(150), producer=(5, 0, 0))
    append(log, bytes(150), producer=(5, 0, 1))
    gone = log.expired_segments(NOW_MS)
    for path in log.remove_segments(gone, NOW_MS, end_offset=log.end_offset):
        path.unlink()
    if flushed:
        flush(log)
        assert not log.needs_flush
    log.abandon()
    log = open_log(tmp_path / "t-0", recovery_point=2 if flushed else 0)
    assert append(log, bytes(150), producer=(5, 0, 1)).duplicate
    refused(log, ErrorCode.out_of_order_sequence_number, b"x", producer=(5, 0, 3))


def test_a_damaged_snapshot_is_made_up_for_by_an_older_one(tmp_path):
    log = open_log(tmp_path / "t-0", LogConfig(segment_bytes=300))
    for sequence in range(6):
        append(log, bytes(150), producer=(5, 0, sequence))
    log.close()
    for offset, damage in ((6, b"\xff" * 100), (5, b""), (4, b"\0" * 40)):
        (tmp_path / "t-0" / f"{offset:020d}.snapshot").write_bytes(damage)
    log = open_log(tmp_path / "t-0", clean=True)
    assert append(log, bytes(150), producer=(5, 0, 1)).duplicate
    assert not append(log, bytes(150), producer=(5, 0, 6)).duplicate


def test_a_clock_that_goes_back_expires_no_producer(log):
    append(log, b"x", producer=(5, 0, 0))
    assert log.producers.expire(NOW_MS - 10 * 86_400_000) == 0
    append(log, b"x", producer=(5, 0, 1), now_ms=NOW_MS - 10)
    assert append(log, b"x", producer=(5, 0, 0)).duplicate


def test_a_batch_without_a_producer_leaves_no_state(log):
    log.append(batch_of(b"x"), leader_epoch=0, now_ms=NOW_MS)
    assert len(log.producers) == 0
