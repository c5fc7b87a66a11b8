"""The transaction shard with large numbers, unknown records and concurrent requests."""

import pytest

from penstock.protocol.errors import ErrorCode
from penstock.transactions.messages import (
    AddPartitionsRequest,
    EndTxnRequest,
    InitProducerIdReply,
    InitProducerIdRequest,
    ListTransactionsFilters,
    MarkersReply,
    TopicPartition,
    TransactionConfig,
    TransactionResult,
)
from penstock.transactions.transaction import ProducerIdAndEpoch, TransactionMetadata, TransactionState
from penstock.transactions.transaction_log import encode_transaction
from penstock.transactions.transaction_shard import TransactionCoordinatorShard

T0 = TopicPartition("t", 0)


def new_shard(settings: TransactionConfig | None = None) -> TransactionCoordinatorShard:
    shard = TransactionCoordinatorShard(settings or TransactionConfig(), transaction_version=lambda: 2)
    shard.loaded(0)
    return shard


def run(shard: TransactionCoordinatorShard, work: TransactionResult) -> list[object]:
    for record in work.records:
        shard.replay(*record)
    return [reply for _, reply in work.replies]


def begin(shard: TransactionCoordinatorShard, transactional_id: str, producer_id: int) -> None:
    request = InitProducerIdRequest(transactional_id, 1_000)
    run(shard, shard.init_producer_id(request, None, now_ms=0, fresh_producer_id=producer_id))
    run(
        shard,
        shard.add_partitions(
            AddPartitionsRequest(transactional_id, producer_id, 0, (T0,), 2), None, now_ms=0
        ),
    )


def test_thousands_that_time_out_at_once_are_stored_in_small_batches() -> None:
    shard = new_shard()
    for producer_id in range(1_201):
        begin(shard, f"x{producer_id}", producer_id)
    sizes = []
    while shard.next_deadline_ms() == 10_000:
        work = shard.tick(10_000)
        sizes.append(len(work.records))
        run(shard, work)
    assert sizes == [500, 500, 201]
    assert {found.state for found in shard.transactions.values()} == {TransactionState.PREPARE_ABORT}


def test_thousands_that_expire_at_once_are_removed_in_small_batches() -> None:
    shard = new_shard(TransactionConfig(id_expiration_ms=1, expired_check_interval_ms=50))
    for producer_id in range(600):
        request = InitProducerIdRequest(f"x{producer_id}", 1_000)
        run(shard, shard.init_producer_id(request, None, now_ms=0, fresh_producer_id=producer_id))
    work = shard.tick(50)
    assert len(work.records) == 500
    run(shard, work)
    assert shard.next_deadline_ms() == 50
    run(shard, shard.tick(50))
    assert not shard.transactions
    assert shard.next_deadline_ms() == 100


def test_a_shard_without_open_transactions_is_left_alone() -> None:
    settings = TransactionConfig(timed_out_check_interval_ms=10, expired_check_interval_ms=1_000)
    shard = new_shard(settings)
    assert shard.next_deadline_ms() == 1_000
    begin(shard, "x", 7)
    assert shard.next_deadline_ms() == 10


def test_a_later_question_takes_the_place_of_one_that_waits() -> None:
    shard = new_shard()
    begin(shard, "x", 7)
    assert run(shard, shard.next_markers(None, "first")) == []
    work = shard.next_markers(None, "second")
    ((token, reply),) = work.replies
    assert token == "first"
    assert isinstance(reply, MarkersReply)
    assert reply.markers == ()
    work = shard.end(EndTxnRequest("x", 7, 0, True, 2), "client", now_ms=1)
    assert [token for token, _ in work.replies] == ["client", "second"]


def test_an_answer_that_was_lost_is_given_again_and_none_is_given_twice() -> None:
    shard = new_shard()
    begin(shard, "x", 7)
    shard.next_markers(None, "lost")
    _, lost = run(shard, shard.end(EndTxnRequest("x", 7, 0, True, 2), "client", now_ms=1))
    (again,) = run(shard, shard.next_markers(None, "again"))
    assert again == lost
    assert isinstance(again, MarkersReply)
    assert run(shard, shard.next_markers(again.position, "waits")) == []


def test_a_late_report_of_written_markers_does_not_complete_the_next_transaction() -> None:
    """With the older protocol both are of one producer id and epoch, and the report may be repeated at any time."""
    shard = new_shard()
    begin(shard, "x", 7)
    run(shard, shard.end(EndTxnRequest("x", 7, 0, True, 0), "client", now_ms=1))
    (first,) = run(shard, shard.next_markers(None, "writer"))
    assert isinstance(first, MarkersReply)
    run(shard, shard.markers_written(first.markers[0], (T0,), None, now_ms=2))
    assert shard.transactions["x"].state is TransactionState.COMPLETE_COMMIT
    run(shard, shard.add_partitions(AddPartitionsRequest("x", 7, 0, (T0,), 0), None, now_ms=3))
    shard.next_markers(first.position, "writer")
    _, second = run(shard, shard.end(EndTxnRequest("x", 7, 0, False, 0), "client", now_ms=4))
    run(shard, shard.markers_written(first.markers[0], (T0,), None, now_ms=5))
    assert shard.transactions["x"].state is TransactionState.PREPARE_ABORT
    assert isinstance(second, MarkersReply)
    run(shard, shard.markers_written(second.markers[0], (T0,), None, now_ms=6))
    assert shard.transactions["x"].state is TransactionState.COMPLETE_ABORT


def test_a_prepared_transaction_without_partitions_is_completed() -> None:
    """Kafka stores such when a transaction is aborted that nothing was added to."""
    shard = new_shard()
    prepared = TransactionMetadata(
        transactional_id="x",
        state=TransactionState.PREPARE_ABORT,
        producer=ProducerIdAndEpoch(7, 1),
        timeout_ms=1_000,
        start_timestamp_ms=0,
        update_timestamp_ms=0,
        transaction_version=2,
    )
    shard.replay(*encode_transaction(prepared))
    (reply,) = run(shard, shard.next_markers(None, "writer"))
    assert isinstance(reply, MarkersReply)
    (markers,) = reply.markers
    run(shard, shard.markers_written(markers, (), None, now_ms=1))
    assert shard.transactions["x"].state is TransactionState.COMPLETE_ABORT


def test_records_of_other_kinds_are_counted_and_passed_over() -> None:
    shard = new_shard()
    shard.replay(b"\x00\x63whatever", b"\x00\x00")
    assert shard.unknown_records == 1
    assert not shard.transactions


def test_an_id_that_cannot_be_stored_is_refused() -> None:
    shard = new_shard()
    (reply,) = run(shard, shard.init_producer_id(InitProducerIdRequest("x" * 40_000, 1_000), None, now_ms=0))
    assert reply == InitProducerIdReply(error=ErrorCode.invalid_request)


def test_adding_nothing_begins_nothing() -> None:
    shard = new_shard()
    run(shard, shard.init_producer_id(InitProducerIdRequest("x", 1_000), None, now_ms=0, fresh_producer_id=7))
    work = shard.add_partitions(AddPartitionsRequest("x", 7, 0, (), 2), None, now_ms=0)
    assert work.records == ()
    assert (
        shard.list_transactions(ListTransactionsFilters(states=frozenset({"Ongoing"})), now_ms=0).transactions
        == ()
    )


def test_a_step_that_is_not_in_the_table_cannot_be_taken() -> None:
    at_rest = TransactionMetadata(
        transactional_id="x",
        state=TransactionState.EMPTY,
        producer=ProducerIdAndEpoch(7, 0),
        timeout_ms=1_000,
        update_timestamp_ms=0,
    )
    for state in (TransactionState.EMPTY, TransactionState.COMPLETE_COMMIT, TransactionState.COMPLETE_ABORT):
        with pytest.raises(AssertionError):
            at_rest._replace(state=state).fenced(transaction_version=2, now_ms=1)
