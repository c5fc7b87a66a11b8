"""The plan of a streaming query, against a real broker."""

import time

import pytest
from tests.compat import confluent
from tests.compat.message import Message
from tests.spark.source.topics import Topics
from tests.waiting import eventually

from penstock.client.wire.offsets import committed_offsets
from penstock.spark.offsets import Position
from penstock.spark.option_reader import OptionError
from penstock.spark.source.discovery import DataLoss
from penstock.spark.source.stream import StreamPlan

NOTHING = Position({})


@pytest.fixture
def plan(topics: Topics):
    made = []

    def make(**options: str) -> StreamPlan:
        clocks = {name: options.pop(name) for name in ("clock", "wall") if name in options}
        parsed = topics.options(**({"startingOffsets": "earliest"} | options))
        made.append(StreamPlan(parsed, **clocks))
        return made[-1]

    yield make
    for each in made:
        each.close()


def next_position(
    plan: StreamPlan, start: Position, most: int | None = None, least: int | None = None
) -> Position:
    return plan.next_end(start, most, least)


def spans(plan: StreamPlan, start: Position, end: Position) -> list[tuple[int, int, int]]:
    return [each.wanted[2:] for each in plan.tasks(start, end)]


def grown(plan: StreamPlan, start: Position) -> Position:
    """Wait: a query looks for new topics and partitions about once a second."""

    def look() -> Position | None:
        end = next_position(plan, start)
        return end if end != start else None

    return eventually(look, what="new partitions")


def test_starting_offsets(topics, plan, unique):
    topic = topics.create(unique("t"))
    now = int(time.time()) * 1000
    topics.fill(topic, [Message(value=b"x", timestamp_ms=now + 1000 * number) for number in range(1, 6)])
    begins = {
        "earliest": {"startingOffsets": "earliest"},
        "latest": {"startingOffsets": "latest"},
        "offset": {"startingOffsets": f'{{"{topic}": {{"0": 2}}}}'},
        "time": {"startingTimestamp": str(now + 3500)},
        "each": {"startingOffsetsByTimestamp": f'{{"{topic}": {{"0": {now + 5000}}}}}'},
        "late": {"startingTimestamp": str(now + 9999), "startingOffsetsByTimestampStrategy": "latest"},
    }
    found = {
        name: plan(subscribe=topic, **how).initial_position().offsets[topic, 0]
        for name, how in begins.items()
    }
    assert found == {"earliest": 0, "latest": 5, "offset": 2, "time": 3, "each": 4, "late": 5}


def test_a_checkpoint_beyond_an_open_transaction_waits_for_its_end(topics, plan, unique):
    """A query that used to read uncommitted records has such a checkpoint. Nothing is lost, so this is not an error."""
    topic = topics.create(unique("t"))
    producer = confluent.producer(topics.bootstrap, transactional_id=unique("x"))
    producer.init_transactions(20)
    producer.begin_transaction()
    producer.produce(topic, value=b"1")
    producer.flush(60)
    topics.count(topic, [2])
    everything = {"subscribe": topic, "kafka.isolation.level": "read_uncommitted"}
    ahead = next_position(plan(**everything), NOTHING)
    assert ahead.offsets == {(topic, 0): 2}
    committed_only = plan(subscribe=topic)
    assert next_position(committed_only, NOTHING).offsets == {(topic, 0): 0}
    assert next_position(committed_only, ahead) == ahead
    producer.commit_transaction(20)
    topics.count(topic, [3])
    eventually(lambda: next_position(committed_only, ahead).offsets == {(topic, 0): 4}, what="the end")


def test_a_timestamp_after_the_last_record_is_refused(topics, plan, unique):
    topic = topics.create(unique("t"))
    with pytest.raises(OptionError, match=r"startingTimestamp.*no record at or after"):
        plan(subscribe=topic, startingTimestamp="5").initial_position()


def test_offsets_must_name_exactly_the_partitions(topics, plan, unique):
    topic = topics.create(unique("t"), 2)
    with pytest.raises(OptionError, match=rf"missing: {topic}\[1\]"):
        plan(subscribe=topic, startingOffsets=f'{{"{topic}": {{"0": 0}}}}').initial_position()
    with pytest.raises(OptionError, match=r"not read: .*\[7\]"):
        plan(subscribe=topic, startingOffsets=f'{{"{topic}": {{"0": 0, "1": 0, "7": 0}}}}').initial_position()
    with pytest.raises(OptionError, match="does not exist yet"):
        plan(subscribe=topic, startingOffsets=f'{{"{topic}": {{"0": 0, "1": 1}}}}').initial_position()


def test_topics_by_name_by_pattern_and_by_partition(topics, plan, unique):
    prefix = unique("t")
    one, two = topics.create(f"{prefix}-1", 2), topics.create(f"{prefix}-2")
    assert plan(subscribePattern=f"{prefix}.*").initial_position().offsets.keys() == {
        (one, 0),
        (one, 1),
        (two, 0),
    }
    assert plan(subscribe=f"{one},{two}").initial_position().topics.keys() == {one, two}
    assert plan(assign=f'{{"{one}": [1]}}').initial_position().offsets.keys() == {(one, 1)}
    with pytest.raises(OptionError, match=rf"{one}\[5\]"):
        plan(assign=f'{{"{one}": [1, 5]}}').initial_position()
    with pytest.raises(OptionError, match="do not exist"):
        plan(subscribe=unique("none")).initial_position()


def test_a_batch_is_limited_and_the_next_one_continues(topics, plan, unique):
    topic = topics.create(unique("t"), 2)
    topics.count(topic, range(30))
    topics.count(topic, range(10), partition=1)
    query = plan(subscribe=topic)
    position, seen = query.initial_position(), []
    while (end := next_position(query, position, 10)) != position:
        seen.append(spans(query, position, end))
        position = end
    assert len(seen) == 4
    assert position.offsets == {(topic, 0): 30, (topic, 1): 10}
    assert all(sum(end - start for _, start, end in batch) == 10 for batch in seen)


def test_a_batch_waits_for_enough_offsets_or_for_the_delay(topics, plan, unique):
    topic, now = topics.create(unique("t")), [100.0]
    query = plan(subscribe=topic, maxTriggerDelay="60s", clock=lambda: now[0])
    topics.count(topic, range(3))
    first = next_position(query, query.initial_position(), least=5)
    assert first.offsets == {(topic, 0): 3}, "the first batch does not wait"
    topics.count(topic, range(4))
    assert next_position(query, first, least=5) == first
    now[0] += 61
    late = next_position(query, first, least=5)
    assert late.offsets == {(topic, 0): 7}
    topics.count(topic, range(5))
    assert next_position(query, late, least=5).offsets == {(topic, 0): 12}


def test_records_after_the_target_are_left_for_the_next_run(topics, plan, unique):
    topic = topics.create(unique("t"))
    topics.count(topic, range(5))
    query = plan(subscribe=topic)
    query.set_target()
    topics.count(topic, range(5))
    topics.grow(topic, 2)
    topics.count(topic, range(5), partition=1)
    end = next_position(query, query.initial_position(), most=3, least=4)
    assert end.offsets == {(topic, 0): 3, (topic, 1): 0}
    last = next_position(query, end)
    assert last.offsets == {(topic, 0): 5, (topic, 1): 0}
    assert next_position(query, last) == last


def test_records_that_are_not_due_and_those_after_them_wait(topics, plan, unique):
    topic, other, now = topics.create(unique("t"), 2), topics.create(unique("u")), [float(int(time.time()))]
    due_ms = [int(now[0] * 1000) + wait for wait in (-5_000, 0, 2_000, 1_000, 9_000)]
    topics.fill(topic, [Message(value=b"x", timestamp_ms=each, partition=0) for each in due_ms])
    topics.fill(other, [Message(value=b"x", timestamp_ms=due_ms[-1])])
    query = plan(subscribe=f"{topic},{other}", readWhenDue=topic, wall=lambda: now[0])
    position, seen = query.initial_position(), []
    for wait_s in (0, 1, 1, 8, -9):
        now[0] += wait_s
        position = next_position(query, position)
        seen.append(position.offsets[topic, 0])
    assert seen == [2, 2, 4, 5, 5], "the last time, the clock was set back"
    assert position.offsets[topic, 1] == 0
    assert position.offsets[other, 0] == 1, "other topics do not wait"
    assert query.seen.offsets[topic, 0] == 5, "waiting records are reported as available"


def test_a_bounded_run_reads_only_records_that_are_due_at_its_start(topics, plan, unique):
    topic, now = topics.create(unique("t")), [float(int(time.time()))]
    times = [int(now[0] * 1000) + wait for wait in (0, 1_000)]
    topics.fill(topic, [Message(value=b"x", timestamp_ms=each) for each in times])
    query = plan(subscribe=topic, readWhenDue=topic, wall=lambda: now[0])
    query.set_target()
    now[0] += 5
    end = next_position(query, query.initial_position())
    assert end.offsets == {(topic, 0): 1}
    assert next_position(query, end) == end


def test_the_first_batch_is_the_same_if_it_is_planned_again(topics, plan, unique):
    """Spark asks for the initial position again, and "latest" is another offset by then."""
    topic = topics.create(unique("t"))
    topics.count(topic, range(5))
    query = plan(subscribe=topic, startingOffsets="latest")
    start = query.initial_position()
    topics.count(topic, range(4))
    end = next_position(query, start)
    topics.count(topic, range(7))
    restarted = plan(subscribe=topic, startingOffsets="latest")
    assert restarted.initial_position().offsets == {(topic, 0): 16}
    assert spans(restarted, restarted.initial_position(), end) == spans(query, start, end) == [(0, 5, 9)]


def test_new_partitions_are_read_from_the_beginning(topics, plan, unique):
    topic = topics.create(unique("t"))
    query = plan(subscribe=topic, startingOffsets="latest")
    start = query.initial_position()
    topics.grow(topic, 3)
    topics.count(topic, range(4), partition=2)
    end = grown(query, start)
    assert end.offsets == {(topic, 0): 0, (topic, 1): 0, (topic, 2): 4}
    assert spans(query, start, end) == [(2, 0, 4)]


def test_new_topics_of_a_pattern_are_read_from_the_beginning(topics, plan, unique):
    prefix = unique("t")
    topics.create(f"{prefix}-1")
    query = plan(subscribePattern=f"{prefix}-.*", startingOffsets="latest")
    start = query.initial_position()
    new = topics.create(f"{prefix}-2")
    topics.count(new, range(4))
    end = grown(query, start)
    assert end.offsets == {(f"{prefix}-1", 0): 0, (new, 0): 4}


@pytest.mark.parametrize("is_recreated", [False, True])
def test_a_deleted_or_recreated_topic_is_reported(topics, plan, unique, is_recreated):
    topic = topics.create(unique("t"))
    topics.count(topic, range(5))
    query = plan(subscribe=topic)
    end = next_position(query, query.initial_position())
    topics.delete(topic)
    if is_recreated:
        topics.create(topic)
        topics.count(topic, range(9))
    words = "created again" if is_recreated else "was deleted"
    with pytest.raises(DataLoss, match=rf"{topic}\[0\] from offset 5 on .*{words}"):
        next_position(plan(subscribe=topic), end)
    with pytest.raises(DataLoss, match=rf"{topic}\[0\] offsets 0 to 4 .*{words}"):
        plan(subscribe=topic).tasks(query.initial_position() if is_recreated else NOTHING, end)


def test_a_query_continues_with_a_recreated_topic_if_losses_are_allowed(topics, plan, unique):
    topic = topics.create(unique("t"))
    topics.count(topic, range(5))
    query = plan(subscribe=topic, failOnDataLoss="false")
    old = next_position(query, query.initial_position())
    topics.delete(topic)
    without = next_position(plan(subscribe=topic, failOnDataLoss="false"), old)
    assert without == NOTHING
    topics.create(topic)
    topics.count(topic, range(3))
    query = plan(subscribe=topic, failOnDataLoss="false")
    new = next_position(query, old)
    assert spans(query, old, new) == [(0, 0, 3)]
    assert query.tasks(NOTHING, old) == []
    assert next_position(query, new) == new


def test_lost_offsets_are_reported(topics, plan, unique):
    topic = topics.create(unique("t"))
    topics.count(topic, range(10))
    query = plan(subscribe=topic)
    start = query.initial_position()
    topics.trim(topic, 4)
    end = next_position(query, start)
    with pytest.raises(
        DataLoss, match=rf"{topic}\[0\] offsets 0 to 3 \(the log begins at 4\).*failOnDataLoss"
    ):
        query.tasks(start, end)
    careless = plan(subscribe=topic, failOnDataLoss="false")
    assert spans(careless, start, end) == [(0, 4, 10)]
    assert next_position(careless, start, most=2).offsets == {(topic, 0): 6}, (
        "deleted records do not count towards the limit"
    )


def test_a_truncated_log_is_reported(topics, plan, unique):
    topic = topics.create(unique("t"))
    topics.count(topic, range(3))
    query = plan(subscribe=topic)
    ids = query.initial_position().ids
    ahead = Position.of({(topic, 0): 8}, ids)
    with pytest.raises(DataLoss, match=rf"{topic}\[0\] offsets 3 to 7 .*now ends at 3"):
        next_position(query, ahead)
    careless = plan(subscribe=topic, failOnDataLoss="false")
    assert next_position(careless, ahead).offsets == {(topic, 0): 3}


def test_the_group_shows_the_end_of_the_last_finished_batch(topics, plan, unique, group):
    topic = topics.create(unique("t"))
    topics.count(topic, range(6))
    query = plan(subscribe=topic, **{"kafka.group.id": group})
    position = query.initial_position()
    with topics.cluster() as cluster:
        seen = []
        for _ in range(4):
            position = next_position(query, position, 3)
            seen.append(committed_offsets(cluster, group)[topic, 0].offset)
    assert seen == [0, 3, 6, 6]


def test_a_group_with_members_does_not_stop_the_query(topics, plan, unique, group, caplog):
    topic = topics.create(unique("t"))
    topics.count(topic, range(6))
    consumer = confluent.consumer(topics.bootstrap, group)
    consumer.subscribe([topic])
    try:
        eventually(lambda: consumer.poll(0.1) is not None, what="a member")
        query = plan(subscribe=topic, **{"kafka.group.id": group})
        assert next_position(query, query.initial_position()).offsets == {(topic, 0): 6}
    finally:
        consumer.close()
    assert f"group {group}: the progress of the query could not be committed" in caplog.text
