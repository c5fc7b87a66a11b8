"""The board that pipelines tell of themselves on: what is written there is what anybody reads."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from tests.brokers import BrokerProcess
from tests.compat.confluent import publish
from tests.compat.message import Message
from tests.waiting import eventually

from penstock.client.cluster import Cluster
from penstock.client.letters import retry_topic
from penstock.client.positions import commit
from penstock.client.producing import RawProducer
from penstock.client.settings import ConnectionSettings
from penstock.client.topics import delete_topics
from penstock.protocol.letters import GROUP
from penstock.protocol.records import Record, encode_batch
from penstock.spark.decisions import MicroBatch
from penstock.spark.pipelines.board import TOPIC, Board
from penstock.spark.pipelines.lag import lag_of
from penstock.spark.pipelines.status import (
    FRESH_MS,
    Counts,
    Extent,
    Generation,
    State,
    Status,
    Trouble,
    add_counts,
    forget,
    generation_of,
    statuses,
    stop_wish,
    wish_stop,
    write_generation,
    write_status,
)

TELLING = Status(
    name="to-be-named",
    state=State.RUNNING,
    host="here",
    pid=7,
    master="local[2]",
    queries=("q1", "q2"),
    extent=Extent(done=3, total=9),
    error=Trouble(kind="ValueError", message="no"),
    updated_ms=1_000,
)


@pytest.fixture
def cluster(bootstrap: str) -> Iterator[Cluster]:
    with Cluster(ConnectionSettings.parse({"bootstrap.servers": bootstrap})) as made:
        yield made


@pytest.fixture
def name(unique: Callable[[str], str]) -> str:
    return unique("pipeline")


def test_what_one_writes_another_reads(cluster: Cluster, bootstrap: str, name: str) -> None:
    mine, told = Board(cluster), replace(TELLING, name=name)
    write_status(mine, replace(told, state=State.STARTING))
    with Cluster(ConnectionSettings.parse({"bootstrap.servers": bootstrap})) as another:
        theirs = Board(another)
        assert statuses(theirs)[name].state is State.STARTING
        write_status(mine, told)
        assert statuses(theirs)[name] == told  # it reads on where it was
        assert statuses(Board(another))[name] == told
        forget(mine, name)
        assert name not in statuses(theirs)


def test_a_batch_counts_once(cluster: Cluster, name: str) -> None:
    write_status(Board(cluster), replace(TELLING, name=name))
    one = Counts(rows_in=10, rows_out=8, retried=1, dead=1)
    assert add_counts(cluster, name, MicroBatch("q", 0), one) == one
    assert add_counts(cluster, name, MicroBatch("q", 0), one) == one
    assert add_counts(cluster, name, MicroBatch("other", 0), Counts(skipped=2)) == one + Counts(skipped=2)
    add_counts(cluster, name, MicroBatch("q", 1), one)
    total = Counts(rows_in=20, rows_out=16, retried=2, dead=2, skipped=2)
    assert statuses(Board(cluster))[name].rows == total
    write_generation(Board(cluster), name, Generation(number=2, starting="latest"))
    assert statuses(Board(cluster))[name].rows == Counts()
    assert generation_of(Board(cluster), name) == Generation(number=2, starting="latest")


def test_a_wish_is_seen_once_by_its_id(cluster: Cluster, name: str) -> None:
    board = Board(cluster)
    assert stop_wish(board, name) is None
    wish_stop(board, name, "a")
    assert stop_wish(Board(cluster), name) == "a"
    wish_stop(board, name, "b")
    assert stop_wish(board, name) == "b"


def test_who_is_silent_is_lost_unless_it_is_over() -> None:
    assert TELLING.seen(1_000 + FRESH_MS) is State.RUNNING
    assert TELLING.seen(1_001 + FRESH_MS) is State.LOST
    assert replace(TELLING, state=State.STOPPED).seen(1 << 60) is State.STOPPED


def test_what_a_newer_version_tells_does_not_disturb(cluster: Cluster, name: str) -> None:
    board = Board(cluster)
    board.write(name, TELLING.to_json() | {"name": name, "mood": "fine"})
    assert statuses(board)[name] == replace(TELLING, name=name)
    board.write(name, TELLING.to_json() | {"state": "dreaming"})
    assert name not in statuses(board)


def test_lag_is_what_the_group_has_not_read(cluster: Cluster, topic: str, group: str, bootstrap: str) -> None:
    assert lag_of(cluster, group) is None
    publish(bootstrap, topic, [Message(value=b"x")] * 5)
    commit(cluster, group, {(topic, 0): 2})
    assert lag_of(cluster, group) == 3
    commit(cluster, group, {(topic, 0): 5})
    assert lag_of(cluster, group) == 0


def test_lag_counts_records_that_will_be_read(
    cluster: Cluster, topic: str, group: str, bootstrap: str, unique: Callable[[str], str]
) -> None:
    """No markers, nothing that was aborted or is not committed yet, and no retries of another group."""
    for is_kept in (True, False):
        with RawProducer(cluster, transactional_id=unique("x")) as producer:
            producer.init()
            producer.send(topic, 0, batch_of(2))
            producer.end(commit=is_kept)
    with RawProducer(cluster, transactional_id=unique("open")) as producer:
        producer.init()
        producer.send(topic, 0, batch_of(1))
        producer.flush()
        commit(cluster, group, {(topic, 0): 0})
        assert lag_of(cluster, group) == 2
        commit(cluster, group, {(topic, 0): 1})
        assert lag_of(cluster, group) == 1, "in the middle of a batch"
        commit(cluster, group, {(topic, 0): 2})
        assert lag_of(cluster, group) == 0
        producer.end(commit=True)
    eventually(lambda: lag_of(cluster, group) == 1, what="the record that is committed now")
    retries = retry_topic(topic, 1)
    headers = [((GROUP, group.encode()),), ((GROUP, b"another"),), ()]
    publish(bootstrap, retries, [Message(value=b"x", headers=each) for each in headers])
    commit(cluster, group, {(topic, 0): 9, (retries, 0): 0})
    assert lag_of(cluster, group) == 2


def batch_of(count: int) -> bytes:
    now_ms = int(time.time() * 1000)
    return encode_batch([Record(number, now_ms, None, b"x") for number in range(count)])


def test_a_board_that_was_deleted_begins_anew(fresh_broker: BrokerProcess) -> None:
    settings = {
        "bootstrap.servers": fresh_broker.bootstrap_servers,
        "topic.metadata.propagation.max.ms": "300",
    }
    with Cluster(ConnectionSettings.parse(settings)) as cluster:
        board = Board(cluster)
        assert statuses(board) == {}
        write_status(board, replace(TELLING, name="first"))
        assert list(statuses(board)) == ["first"]
        delete_topics(cluster, [TOPIC])
        assert statuses(board) == {}
        write_status(Board(cluster), replace(TELLING, name="second"))
        assert list(statuses(board)) == ["second"]
