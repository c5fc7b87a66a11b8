"""At-most-once delivery, step by step. The broker is real, Spark is not needed."""

import logging
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
from tests.compat import confluent
from tests.spark.source.topics import Topics
from tests.waiting import eventually

from penstock.client.errors import Unavailable
from penstock.client.retry import Deadline
from penstock.client.wire.offsets import committed_offsets
from penstock.client.wire.producer import RawProducer
from penstock.client.wire.topics import InsufficientContract
from penstock.spark.at_most_once import offset_claims as claims_module
from penstock.spark.at_most_once.offset_claims import ClaimError, OffsetClaims, count_skipped
from penstock.spark.at_most_once.task_claims import (
    TaskAttempt,
    TaskClaim,
    claim_task,
    current_attempt,
    new_task_claim,
    record_skipped,
    refuse_speculation,
)
from penstock.spark.offsets import COMMIT_REPEAT_MS, OffsetRange, Position
from penstock.spark.source.discovery import DataLoss
from penstock.spark.source.stream import StreamPlan

Driver = Callable[..., StreamPlan]


@pytest.fixture
def driver(topics: Topics, group: str) -> Iterator[Driver]:
    made = []

    def make(topic: str, **options: str) -> StreamPlan:
        given = {"startingOffsets": "earliest", "contract": "at-most-once", "kafka.group.id": group}
        made.append(StreamPlan(topics.options(subscribe=topic, **given | options)))
        return made[-1]

    yield make
    for each in made:
        each.close()


def spans(plan: StreamPlan, start: Position, end: Position) -> list[tuple[int, int, int]]:
    return [each.wanted[2:] for each in plan.tasks(start, end)]


def next_spans(plan: StreamPlan, start: Position) -> list[tuple[int, int, int]]:
    return spans(plan, start, plan.next_end(start, None, None))


def lost(topics: Topics, group: str) -> int:
    with topics.cluster() as cluster:
        return count_skipped(cluster, group)


def claimed(topics: Topics, group: str) -> dict:
    with topics.cluster() as cluster:
        return {tp: each.offset for tp, each in committed_offsets(cluster, group).items()}


# Drivers


def test_batches_are_claimed_before_they_are_read(topics, driver, unique, group):
    topic = topics.create(unique("t"), 2)
    topics.count(topic, range(6))
    topics.count(topic, range(3), partition=1)
    plan = driver(topic)
    start = plan.initial_position()
    first = plan.next_end(start, 4, None)
    assert claimed(topics, group) == {}, "nothing is claimed before it is planned"
    assert sum(end - start for _, start, end in spans(plan, start, first)) == 4
    assert claimed(topics, group) == first.offsets
    second = plan.next_end(first, None, None)
    assert claimed(topics, group) == first.offsets
    assert sum(end - start for _, start, end in spans(plan, first, second)) == 5
    assert claimed(topics, group) == second.offsets
    assert plan.next_end(second, None, None) == second
    assert lost(topics, group) == 0


def first_batch(driver, topic):
    """Of five records: the plan, and where the batch starts and ends."""
    plan = driver(topic)
    start = plan.initial_position()
    end = plan.next_end(start, None, None)
    assert spans(plan, start, end) == [(0, 0, 5)]
    return plan, start, end


def test_a_batch_that_is_planned_again_gets_nothing_and_is_counted(topics, driver, unique, group, caplog):
    topic = topics.create(unique("t"))
    topics.count(topic, range(5))
    _, start, end = first_batch(driver, topic)
    topics.count(topic, range(2))
    for _ in range(2):
        again = driver(topic)
        assert again.tasks(start, end) == []
        assert "5 offsets were claimed before: they may have been lost" in caplog.text
        assert lost(topics, group) == 5, "a batch can be planned any number of times"
    assert next_spans(again, end) == [(0, 5, 7)]


def test_a_driver_that_dies_while_it_claims_has_claimed_nothing(topics, driver, unique, group):
    topic = topics.create(unique("t"))
    topics.count(topic, range(5))
    plan = driver(topic)
    start = plan.initial_position()
    end = plan.next_end(start, None, None)
    with mock.patch.object(RawProducer, "end", side_effect=Unavailable("dead")), pytest.raises(Unavailable):
        plan.tasks(start, end)
    again = driver(topic)
    assert again.initial_position().offsets == {(topic, 0): 0}, "a new driver does not wait for an open claim"
    assert spans(again, start, end) == [(0, 0, 5)]
    assert lost(topics, group) == 0


def test_a_query_without_its_checkpoint_continues_after_its_claims(topics, driver, unique, group):
    topic = topics.create(unique("t"))
    topics.count(topic, range(5))
    plan = driver(topic)
    first = plan.next_end(plan.initial_position(), 3, None)
    assert spans(plan, plan.initial_position(), first) == [(0, 0, 3)]
    assert next_spans(plan, first) == [(0, 3, 5)]
    topics.count(topic, range(4))
    restarted = driver(topic)
    assert restarted.initial_position().offsets == {(topic, 0): 5}
    assert next_spans(restarted, restarted.initial_position()) == [(0, 5, 9)]
    assert lost(topics, group) == 2, "the first batch was finished when the second was claimed"


def test_a_recreated_topic_is_read_from_its_beginning(topics, driver, unique, group):
    topic = topics.create(unique("t"))
    topics.count(topic, range(5))
    plan = driver(topic)
    assert next_spans(plan, plan.initial_position()) == [(0, 0, 5)]
    topics.delete(topic)
    topics.create(topic)
    topics.count(topic, range(3))
    restarted = driver(topic)
    assert next_spans(restarted, restarted.initial_position()) == [(0, 0, 3)]
    assert claimed(topics, group) == {(topic, 0): 3}


def test_the_older_of_two_drivers_stops(topics, driver, unique, group):
    topic = topics.create(unique("t"))
    topics.count(topic, range(5))
    older, newer = driver(topic), driver(topic)
    start = older.initial_position()
    end = older.next_end(start, None, None)
    left = older._claims.without_claimed([OffsetRange(topic, end.ids[topic], 0, 0, 5)])
    assert next_spans(newer, newer.initial_position()) == [(0, 0, 5)]
    with pytest.raises(ClaimError, match=f"group {group}: another driver has fenced this one"):
        older._claims.claim(left)
    with pytest.raises(ClaimError, match="another driver"):
        older.tasks(start, end)
    topics.count(topic, range(1))
    assert next_spans(newer, newer.next_end(end, None, None)) == []
    assert next_spans(newer, end) == [(0, 5, 6)]


def test_an_idle_driver_notices_that_it_was_fenced(topics, driver, unique, group):
    topic = topics.create(unique("t"))
    topics.count(topic, range(5))
    now = [0.0]
    older = OffsetClaims(
        topics.cluster(), group, deadline=lambda timeout_ms: Deadline(timeout_ms, clock=lambda: now[0])
    )
    older.refresh()
    older.claim(older.without_claimed([OffsetRange(topic, None, 0, 0, 5)]))
    newer = driver(topic)
    newer.next_end(newer.initial_position(), None, None)
    older.refresh()
    now[0] += COMMIT_REPEAT_MS / 1000
    with pytest.raises(ClaimError, match="another driver"):
        older.refresh()


def test_claims_are_refreshed_before_brokers_expire_them(topics, group, unique, caplog):
    topic, gone = topics.create(unique("t")), topics.create(unique("gone"))
    now, committed = [0.0], []
    cluster = topics.cluster()
    claims = OffsetClaims(
        cluster, group, deadline=lambda timeout_ms: Deadline(timeout_ms, clock=lambda: now[0])
    )
    claims.refresh()
    claims.claim(claims.without_claimed([OffsetRange(each, None, 0, 0, 5) for each in (topic, gone)]))
    topics.delete(gone)
    before = committed_offsets(cluster, group, [(topic, 0)])
    real = RawProducer.commit_offsets

    def commits(self, group, offsets):
        committed.append(offsets)
        real(self, group, offsets)

    with mock.patch.object(RawProducer, "commit_offsets", commits):
        for wait_s in (0, COMMIT_REPEAT_MS / 1000, 1):
            now[0] += wait_s
            claims.refresh()
    assert committed == [before]
    assert committed_offsets(cluster, group, [(topic, 0)]) == before
    now[0] += COMMIT_REPEAT_MS / 1000
    with mock.patch.object(claims_module, "committed_offsets", side_effect=Unavailable("no broker answers")):
        claims.refresh()
    assert "the claims could not be committed again: no broker answers" in caplog.text
    assert claims.claim(claims.without_claimed([OffsetRange(topic, None, 0, 0, 6)])), "the query continues"
    claims.close()
    cluster.close()


def test_a_group_with_members_is_refused(topics, driver, unique, group):
    topic = topics.create(unique("t"))
    topics.count(topic, range(3))
    consumer = confluent.consumer(topics.bootstrap, group)
    consumer.subscribe([topic])
    try:
        eventually(lambda: consumer.poll(0.1) is not None, what="a member")
        plan = driver(topic)
        with pytest.raises(ClaimError, match=f"group {group} has members"):
            next_spans(plan, plan.initial_position())
    finally:
        consumer.close()


def test_a_topic_with_a_stronger_contract_is_refused(topics, driver, unique, group):
    """Also if there is a checkpoint, so that Spark does not ask for the initial position."""
    topic = topics.create(unique("payments"), **{"penstock.delivery.contract": "at-least-once"})
    topics.count(topic, range(5))
    words = f"the stream of group {group}: topic {topic} requires at-least-once"
    plan = driver(topic)
    with pytest.raises(InsufficientContract, match=words):
        plan.initial_position()
    start = driver(topic, contract="at-least-once").initial_position()
    with pytest.raises(InsufficientContract, match=words):
        next_spans(plan, start)
    assert claimed(topics, group) == {}


def test_deleted_records_that_were_claimed_are_not_a_loss(topics, driver, unique):
    topic = topics.create(unique("t"))
    topics.count(topic, range(5))
    plan, start, end = first_batch(driver, topic)
    topics.count(topic, range(5))
    later = plan.next_end(end, None, None)
    topics.trim(topic, 7)
    assert driver(topic).tasks(start, end) == []
    with pytest.raises(DataLoss, match=r"offsets 5 to 6"):
        driver(topic).tasks(end, later)


def test_a_query_that_reads_all_topics_skips_internal_topics(topics, driver, unique, group):
    prefix = unique("t")
    topics.count(topics.create(prefix), range(3))
    plan = driver(prefix)
    assert next_spans(plan, plan.initial_position()) == [(0, 0, 3)]
    options = {"subscribePattern": ".*", "startingOffsets": "earliest"}
    every = StreamPlan(topics.options(**options)).initial_position()
    assert prefix in every.topics
    assert not [name for name in every.topics if name.startswith("penstock-")]


# Tasks


@pytest.fixture
def cluster(topics: Topics):
    with topics.cluster() as made:
        yield made


@pytest.fixture
def task_claim(cluster, group) -> TaskClaim:
    return new_task_claim(cluster)._replace(group=group, number=3)


def test_only_the_first_attempt_gets_records(cluster, task_claim):
    assert claim_task(cluster, task_claim, TaskAttempt(7, 2, 0))
    assert not claim_task(cluster, task_claim, TaskAttempt(7, 2, 1)), "a second attempt at the task"
    assert not claim_task(cluster, task_claim, TaskAttempt(7, 2, 0)), "an attempt of a repeated stage"
    assert claim_task(cluster, task_claim._replace(number=4), TaskAttempt(7, 3, 0)), "another task"
    assert claim_task(cluster, task_claim._replace(batch="other"), TaskAttempt(7, 2, 1)), "another batch"


@pytest.mark.parametrize("second", [TaskAttempt(8, 2, 0), TaskAttempt(7, 5, 0)])
def test_reading_a_batch_twice_is_an_error_that_names_its_causes(cluster, task_claim, second):
    """Another stage means two actions. Another task of the same stage means that one stream was used twice."""
    assert claim_task(cluster, task_claim, TaskAttempt(7, 2, 0))
    with pytest.raises(ClaimError, match=r"read a second time.*Two actions in foreachBatch.*localCheckpoint"):
        claim_task(cluster, task_claim, second)
    assert not claim_task(cluster, task_claim, TaskAttempt(7, 2, 1))


def test_an_attempt_that_fails_after_its_claim_blocks_later_attempts(cluster, task_claim):
    real = RawProducer.flush

    def flushes_and_breaks(self):
        real(self)
        raise Unavailable("no answer")

    with mock.patch.object(RawProducer, "flush", flushes_and_breaks), pytest.raises(Unavailable):
        claim_task(cluster, task_claim, TaskAttempt(7, 2, 0))
    assert not claim_task(cluster, task_claim, TaskAttempt(7, 2, 1))


def test_a_deleted_claim_is_an_error(cluster, task_claim):
    with pytest.raises(ClaimError, match="records were deleted from that topic"):
        claim_task(cluster, task_claim._replace(base=task_claim.base + 1000), TaskAttempt(7, 2, 0))


def test_offsets_that_attempts_did_not_get_are_counted(cluster, task_claim, group, caplog):
    wanted = OffsetRange("t", None, 0, 10, 14)
    assert count_skipped(cluster, group) == 0
    with caplog.at_level(logging.WARNING):
        for attempt in (1, 2):
            record_skipped(cluster, task_claim, wanted, TaskAttempt(7, 2, attempt))
    assert "t[0] offsets 10 to 13 were delivered to another attempt at this task; attempt 1" in caplog.text
    record_skipped(cluster, task_claim, wanted._replace(partition=1), TaskAttempt(7, 3, 1))
    assert count_skipped(cluster, group) == 8


def test_speculation_is_refused():
    refuse_speculation(None)
    refuse_speculation("false")
    with pytest.raises(ClaimError, match=r"needs spark.speculation=false"):
        refuse_speculation("true")
    with pytest.raises(ClaimError, match="does not say which task"):
        current_attempt()
