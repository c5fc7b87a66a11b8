"""Batches behind a refused batch are refused with the same error, not as out of order."""

import pytest
from tests.unit.log.helpers import append, open_log

from penstock.log.producer_state import REJECTED_PRODUCERS_MAX, ProducerStateManager
from penstock.protocol.errors import ApiError, ErrorCode

NOT_NOW = ErrorCode.not_enough_replicas
OUT_OF_ORDER = ErrorCode.out_of_order_sequence_number


@pytest.fixture
def log(tmp_path):
    return open_log(tmp_path / "t-0")


def code_of(log, producer):
    with pytest.raises(ApiError) as raised:
        append(log, b"x", producer=producer)
    return raised.value.code


def test_the_next_batches_wait_for_the_refused_one(log):
    append(log, b"x", producer=(1, 0, 0))
    log.producers.refused(1, 0, 1, NOT_NOW)
    assert code_of(log, (1, 0, 2)) is NOT_NOW
    assert code_of(log, (1, 0, 3)) is NOT_NOW
    for sequence in (1, 2, 3):
        append(log, b"x", producer=(1, 0, sequence))
    assert log.end_offset == 4


def test_a_batch_refused_again_is_still_the_first(log):
    append(log, b"x", producer=(1, 0, 0))
    for sequence in (1, 2, 1):
        log.producers.refused(1, 0, sequence, NOT_NOW)
    assert code_of(log, (1, 0, 2)) is NOT_NOW
    append(log, b"x", producer=(1, 0, 1))


def test_the_first_of_those_refused_may_be_in_the_log_from_the_leader_before(log):
    for sequence in (0, 1):
        append(log, b"x", producer=(1, 0, sequence))
    for sequence in (1, 2, 3):  # they come again, or for the first time, while replicas are missing
        log.producers.refused(1, 0, sequence, NOT_NOW)
    assert code_of(log, (1, 0, 4)) is NOT_NOW, "2 and 3 come again before it"
    append(log, b"x", producer=(1, 0, 1))
    append(log, b"x", producer=(1, 0, 2))
    assert code_of(log, (1, 0, 4)) is NOT_NOW, "3 is still to come"
    append(log, b"x", producer=(1, 0, 3))
    assert code_of(log, (1, 0, 5)) is OUT_OF_ORDER
    assert log.end_offset == 4


def test_sequences_that_go_round_are_refused_in_their_order(log):
    last = 2**31 - 1
    append(log, b"x", producer=(1, 0, last - 1))
    for sequence in (last, 0, 1):
        log.producers.refused(1, 0, sequence, NOT_NOW)
    assert code_of(log, (1, 0, 2)) is NOT_NOW
    for sequence in (last, 0):
        append(log, b"x", producer=(1, 0, sequence))
    assert code_of(log, (1, 0, 2)) is NOT_NOW
    append(log, b"x", producer=(1, 0, 1))
    append(log, b"x", producer=(1, 0, 2))


def test_the_first_batch_of_all_comes_first(log):
    log.producers.refused(1, 0, 0, NOT_NOW)
    assert code_of(log, (1, 0, 1)) is NOT_NOW
    append(log, b"x", producer=(1, 0, 0))


def test_the_first_batch_of_an_epoch_comes_first(log):
    append(log, b"x", producer=(1, 0, 0))
    log.producers.refused(1, 1, 0, NOT_NOW)
    assert code_of(log, (1, 1, 1)) is NOT_NOW
    append(log, b"x", producer=(1, 1, 0))


def test_earlier_batches_that_a_follower_still_learns_of_settle_nothing(log):
    append(log, b"x", producer=(1, 0, 0))
    log.producers.refused(1, 0, 3, NOT_NOW)
    for sequence in (1, 2):
        append(log, b"x", producer=(1, 0, sequence))
    assert code_of(log, (1, 0, 4)) is NOT_NOW
    append(log, b"x", producer=(1, 0, 3))
    assert code_of(log, (1, 0, 5)) is OUT_OF_ORDER


def test_other_gaps_are_out_of_order_as_ever(log):
    for producer in (1, 2):
        append(log, b"x", producer=(producer, 0, 0))
    log.producers.refused(1, 0, 1, NOT_NOW)
    assert code_of(log, (2, 0, 2)) is OUT_OF_ORDER
    append(log, b"x", producer=(1, 0, 1))
    assert code_of(log, (1, 0, 3)) is OUT_OF_ORDER
    log.producers.refused(1, 0, 5, NOT_NOW)
    assert code_of(log, (1, 0, 6)) is OUT_OF_ORDER


def test_a_refusal_of_an_earlier_epoch_explains_nothing(log):
    append(log, b"x", producer=(1, 0, 0))
    log.producers.refused(1, 0, 1, NOT_NOW)
    assert code_of(log, (1, 1, 2)) is OUT_OF_ORDER


def test_what_is_remembered_is_bounded():
    producers = ProducerStateManager(expiry_ms=1000)
    for producer_id in range(REJECTED_PRODUCERS_MAX + 1):
        producers.refused(producer_id, 0, 0, NOT_NOW)
    assert producers.check(0, 0, 5, 0, False) is None
    with pytest.raises(ApiError):
        producers.check(REJECTED_PRODUCERS_MAX, 0, 5, 0, False)
