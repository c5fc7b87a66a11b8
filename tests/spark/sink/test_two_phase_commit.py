"""Each safeguard of an exactly-once write, step by step. The broker is real, Spark is not needed."""

import uuid
from collections.abc import Iterable
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest
from tests.spark.sink.readers import await_rest, committed_numbers, is_at_rest
from tests.spark.source.topics import Topics

from penstock.client.errors import Fenced, Unavailable
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.producer import PreparedTransaction, RawProducer, end_prepared_transaction
from penstock.client.wire.transactions import fence_producer, list_transactions
from penstock.spark.exactly_once import two_phase_commit
from penstock.spark.exactly_once.decisions import (
    Decision,
    DecisionLog,
    MicroBatch,
    SinkError,
    last_decided_batch,
    sink_transactional_id,
)
from penstock.spark.exactly_once.two_phase_commit import (
    abort_batch,
    attempt_id_prefix,
    commit_batch,
    finish_earlier_batch,
    resolve_transactions,
    take_over_checkpoint,
)
from penstock.spark.sink.options import SinkOptions
from penstock.spark.sink.records import SinkColumns
from penstock.spark.sink.writers import AttemptIds, write_exactly_once

COLUMNS = {"value": 0}


class Query:
    """One query on one topic: attempts at its batches, and drivers that commit them."""

    def __init__(self, topics: Topics, topic: str, **options: str) -> None:
        self.topics, self.topic = topics, topic
        self.id = str(uuid.uuid4())
        self.cluster = topics.cluster()
        self.options = SinkOptions.parse(topics.given(topic=topic, **options), streaming=True)
        self.columns = SinkColumns(positions=COLUMNS, topic=topic)

    def batch(self, number: int = 0) -> MicroBatch:
        return MicroBatch(self.id, number)

    def attempt(self, numbers: Iterable[int], number: int = 0) -> PreparedTransaction | None:
        """Run one task attempt in its own worker process."""
        rows = pa.record_batch([pa.array([b"%d" % each for each in numbers], pa.binary())], names=["value"])
        batch = self.batch(number)
        name = AttemptIds().take(batch)
        done = write_exactly_once(
            self.cluster, self.options, self.columns, batch, [rows], transactional_id=name
        )
        return done.prepared

    def commit(self, prepared: Iterable[PreparedTransaction | None], number: int = 0, **kwargs: Any) -> bool:
        with DecisionLog(self.cluster, self.id) as decision_log:
            return commit_batch(
                decision_log, self.batch(number), [each for each in prepared if each], **kwargs
            )

    @property
    def partitions(self) -> list[tuple[str, int]]:
        return [(self.topic, 0)]

    def numbers(self) -> list[int]:
        return committed_numbers(self.topics, self.cluster, self.partitions)

    def is_at_rest(self) -> bool:
        return is_at_rest(self.cluster, self.partitions)

    def await_rest(self) -> None:
        await_rest(self.cluster, self.partitions)


@pytest.fixture
def query(broker, unique):
    topics = Topics(broker.bootstrap_servers)
    made = Query(topics, topics.create(unique("t")))
    yield made
    made.cluster.close()


def test_only_decided_transactions_are_committed(query):
    winners = [query.attempt([1, 2]), query.attempt([3])]
    query.attempt([3])  # a speculative attempt
    assert not query.is_at_rest()
    assert query.commit(winners)
    query.await_rest()
    assert query.numbers() == [1, 2, 3]


def test_a_rerun_after_the_decision_commits_the_decided_transactions(query):
    """The driver dies between two commits, and the batch runs again with other tasks."""
    first = [query.attempt([1]), query.attempt([2]), query.attempt([3])]
    ended = []

    def dies_after_one(cluster: Cluster, prepared: PreparedTransaction, *, commit: bool) -> None:
        if ended:
            raise Unavailable("dead")
        ended.append(prepared)
        end_prepared_transaction(cluster, prepared, commit=commit)

    with (
        mock.patch.object(two_phase_commit, "end_prepared_transaction", dies_after_one),
        pytest.raises(Unavailable),
    ):
        query.commit(first)
    assert not query.is_at_rest()
    again = [query.attempt([1, 2, 3])]
    assert again == [None], "the attempt found the decision"
    assert not query.commit(again)
    query.await_rest()
    assert query.numbers() == [1, 2, 3]
    assert not query.commit(again), "the checkpoint was not written, so the batch runs once more"
    assert query.numbers() == [1, 2, 3]


def test_a_rerun_before_the_decision_aborts_earlier_transactions(query):
    query.attempt([1, 2])
    query.attempt([3])
    assert query.commit([query.attempt([1]), query.attempt([2, 3])])
    query.await_rest()
    assert query.numbers() == [1, 2, 3]


def test_two_drivers_decide_once(query):
    mine, other = [query.attempt([1, 2])], [query.attempt([1]), query.attempt([2])]
    assert query.commit(other)
    assert not query.commit(mine)
    query.await_rest()
    assert query.numbers() == [1, 2]


def test_a_fenced_driver_cannot_decide(query):
    """Another driver decides after this one has looked up the decision and found none."""
    mine, other = query.attempt([1]), query.attempt([1])
    with DecisionLog(query.cluster, query.id) as decision_log:
        assert decision_log.take() is None
        assert query.commit([other])
        with pytest.raises(SinkError, match="another driver has fenced this one"):
            decision_log.decide(Decision(batch=query.batch(), transactions=(mine,)))
        with DecisionLog(query.cluster, query.id) as fresh:
            fresh.take()
            assert fresh.last().names == {other.transactional_id}
    query.await_rest()
    assert query.numbers() == [1]


def test_a_driver_that_is_a_batch_behind_stops(query):
    late = query.attempt([1])
    query.commit([query.attempt([1])])
    query.commit([query.attempt([2], number=1)], number=1)
    with pytest.raises(SinkError, match="another driver has fenced this one"):
        query.commit([late])
    query.await_rest()
    assert query.numbers() == [1, 2]


def test_a_late_attempt_writes_nothing(query):
    query.commit([query.attempt([1])])
    assert query.attempt([1]) is None
    assert query.is_at_rest()


def test_an_attempt_that_paused_before_the_decision_cannot_write_after_it(query):
    """The attempt looked for a decision and found none, then the batch was decided."""
    name = AttemptIds().take(query.batch())
    late = RawProducer(query.cluster, transactional_id=name)
    late.init()
    query.commit([query.attempt([1])])
    late.send(query.topic, 0, _batch())
    with pytest.raises(Fenced):
        late.flush()
    late.close()
    assert query.is_at_rest()
    assert query.numbers() == [1]


def _batch() -> bytearray:
    from penstock.spark.columns import encode

    [encoded] = encode(pa.record_batch([[b"late"]], names=["value"]), timestamp_ms=0)
    return encoded.data


def test_a_failed_attempt_leaves_no_open_transaction(query):
    def sends_and_breaks(producer: RawProducer) -> None:
        producer.flush()
        raise ValueError("a row")

    with (
        mock.patch.object(RawProducer, "prepare", sends_and_breaks),
        pytest.raises(ValueError, match="a row"),
    ):
        query.attempt([1])
    query.await_rest()
    assert query.numbers() == []


def test_a_failed_batch_is_aborted_unless_it_was_decided(query):
    lost = query.attempt([1])
    with DecisionLog(query.cluster, query.id) as decision_log:
        abort_batch(decision_log, query.batch(), [lost])
    query.await_rest()
    kept = query.attempt([1])
    with DecisionLog(query.cluster, query.id) as decision_log:
        decision_log.take()
        decision_log.decide(Decision(batch=query.batch(), transactions=(kept,)))
    with DecisionLog(query.cluster, query.id) as decision_log:
        abort_batch(decision_log, query.batch(), [kept])
    assert not query.is_at_rest()
    query.commit([])
    query.await_rest()
    assert query.numbers() == [1]


def test_the_decision_is_found_after_the_group_has_expired(query):
    """Brokers delete the offsets of a group that has not committed for a week."""
    query.commit([query.attempt([1])])
    name = sink_transactional_id(query.id)
    query.topics.admin.delete_consumer_groups([name])[name].result(60)
    assert last_decided_batch(query.cluster, query.id, stable=True) is None
    again = query.attempt([1])
    assert again is not None, "tasks do not search the log"
    assert not query.commit([again])
    query.await_rest()
    assert query.numbers() == [1]


def test_a_timeout_before_the_decision_is_an_error_and_the_batch_can_be_written_again(tuned_broker, unique):
    topics = Topics(tuned_broker.bootstrap_servers)
    brief = {"kafka.transaction.two.phase.commit.enable": "false", "kafka.transaction.timeout.ms": "2000"}
    query = Query(topics, topics.create(unique("t")), **brief)
    left = query.attempt([1])
    query.await_rest()
    with pytest.raises(SinkError, match="1 of 1 transactions were aborted before they could be committed"):
        query.commit([left])
    query.options = SinkOptions.parse(topics.given(topic=query.topic), streaming=True)
    assert query.commit([query.attempt([1])])
    assert query.numbers() == [1]


def test_an_abort_after_the_decision_is_reported_as_data_loss(query):
    """Brokers without two-phase commit abort transactions that have timed out."""
    left = query.attempt([1])
    with (
        mock.patch.object(two_phase_commit, "end_prepared_transaction", side_effect=Unavailable("dead")),
        pytest.raises(Unavailable),
    ):
        query.commit([left])
    fence_producer(query.cluster, left.transactional_id)
    query.await_rest()
    with pytest.raises(SinkError, match=rf"rows for {query.topic}\[0\] are lost.*failOnDataLoss=false"):
        query.commit([])
    assert not query.commit([], fails_on_loss=False)
    assert query.commit([query.attempt([2], number=1)], number=1)
    assert query.numbers() == [2]


def test_resolve_transactions_of_a_stopped_query(query):
    with (
        mock.patch.object(two_phase_commit, "end_prepared_transaction", side_effect=Unavailable("dead")),
        pytest.raises(Unavailable),
    ):
        query.commit([query.attempt([1]), query.attempt([2])])
    query.attempt([3], number=1)
    resolve_transactions(query.cluster, query.id)
    query.await_rest()
    assert query.numbers() == [1, 2]


def test_a_query_with_a_deleted_checkpoint_does_not_block_readers(query, unique):
    """The query died with prepared transactions, and another query starts with the same checkpoint."""
    checkpoint = unique("checkpoint")
    take_over_checkpoint(query.cluster, checkpoint, query.id)
    query.commit([query.attempt([1])])
    query.attempt([2], number=1)
    take_over_checkpoint(query.cluster, checkpoint, query.id)
    assert not query.is_at_rest(), "the driver may still decide to commit its prepared transactions"
    other = Query(query.topics, query.topic)
    take_over_checkpoint(query.cluster, checkpoint, other.id)
    query.await_rest()
    assert other.commit([other.attempt([1])])
    late = query.attempt([2], number=1)
    query.commit([late], number=1)
    assert query.numbers() == [1, 1, 2], "the old query can still continue"
    other.cluster.close()


def test_a_process_reuses_its_ids_two_batches_later(query):
    names = AttemptIds()
    taken = [names.take(query.batch(number)) for number in (0, 1, 2, 3, 3, 4)]
    assert taken[0] == taken[2] == taken[5] != taken[1] == taken[3]
    assert taken[4] not in taken[:4], "another attempt at the same batch has another id"
    assert names.take(query.batch(2)) not in taken, "transactions of an older batch may still be open"
    assert all(name.startswith(attempt_id_prefix(query.batch(n % 2))) for n, name in enumerate(taken[:4]))
    assert not set(taken) & {AttemptIds().take(query.batch(number)) for number in range(4)}


def test_ids_do_not_accumulate(query):
    worker = AttemptIds()
    rows = pa.record_batch([pa.array([b"1"], pa.binary())], names=["value"])
    for number in range(6):
        batch = query.batch(number)
        done = write_exactly_once(
            query.cluster, query.options, query.columns, batch, [rows], transactional_id=worker.take(batch)
        )
        assert query.commit([done.prepared], number)
    assert query.numbers() == [1] * 6
    assert len(list_transactions(query.cluster, sink_transactional_id(query.id))) == 3


def test_a_write_with_a_later_number_finishes_the_earlier_batch_first(query):
    """The driver dies between the decision and the commit, and the next write has a later number."""
    with (
        mock.patch.object(two_phase_commit, "end_prepared_transaction", side_effect=Unavailable("dead")),
        pytest.raises(Unavailable),
    ):
        query.commit([query.attempt([1]), query.attempt([2])])
    assert not query.is_at_rest()
    finish_earlier_batch(query.cluster, query.batch(2))
    query.await_rest()
    finish_earlier_batch(query.cluster, query.batch(2))
    assert query.commit([query.attempt([3], number=2)], number=2, skips_older=True)
    late = query.attempt([4], number=1)
    assert late is None
    assert not query.commit([late], number=1, skips_older=True), (
        "a batch that is older than the last one is skipped"
    )
    query.await_rest()
    assert query.numbers() == [1, 2, 3]


def test_queries_with_a_common_prefix_are_independent(query, unique):
    query.id = unique("app")
    other = Query(query.topics, query.topic)
    other.id = f"{query.id}-0-x"
    kept = other.attempt([1])
    assert query.commit([query.attempt([2])])
    assert other.commit([kept])
    query.await_rest()
    assert query.numbers() == [1, 2]
    other.cluster.close()
