"""The topic in which pipelines publish their status."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from tests.brokers import BrokerProcess
from tests.compat.confluent import publish
from tests.compat.message import Message
from tests.waiting import eventually

from penstock.client.deadletters.headers import retry_topic
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.offsets import commit_offsets
from penstock.client.wire.producer import RawProducer
from penstock.client.wire.settings import ConnectionSettings
from penstock.client.wire.topics import delete_topics
from penstock.protocol.dead_letter_headers import GROUP_HEADER
from penstock.protocol.record_batch import Record, encode_batch
from penstock.spark.exactly_once.decisions import MicroBatch
from penstock.spark.internal_topics import PIPELINES_TOPIC, DocumentStore
from penstock.spark.pipelines.status import (
    STATUS_AGE_MS_MAX,
    ErrorInfo,
    Generation,
    PipelineState,
    PipelineStatus,
    RowCounts,
    RunProgress,
    add_counts,
    forget_pipeline,
    group_lag,
    read_generation,
    read_statuses,
    read_stop_request,
    request_stop,
    write_generation,
    write_status,
)

TELLING = PipelineStatus(
    name="to-be-named",
    state=PipelineState.RUNNING,
    host="here",
    pid=7,
    master="local[2]",
    queries=("q1", "q2"),
    extent=RunProgress(done=3, total=9),
    error=ErrorInfo(kind="ValueError", message="no"),
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
    mine, told = DocumentStore(cluster), replace(TELLING, name=name)
    write_status(mine, replace(told, state=PipelineState.STARTING))
    with Cluster(ConnectionSettings.parse({"bootstrap.servers": bootstrap})) as another:
        theirs = DocumentStore(another)
        assert read_statuses(theirs)[name].state is PipelineState.STARTING
        write_status(mine, told)
        assert read_statuses(theirs)[name] == told  # it reads on where it was
        assert read_statuses(DocumentStore(another))[name] == told
        forget_pipeline(mine, name)
        assert name not in read_statuses(theirs)


def test_a_batch_counts_once(cluster: Cluster, name: str) -> None:
    write_status(DocumentStore(cluster), replace(TELLING, name=name))
    one = RowCounts(rows_in=10, rows_out=8, retried=1, dead=1)
    assert add_counts(cluster, name, MicroBatch("q", 0), one) == one
    assert add_counts(cluster, name, MicroBatch("q", 0), one) == one
    assert add_counts(cluster, name, MicroBatch("other", 0), RowCounts(skipped=2)) == one + RowCounts(
        skipped=2
    )
    add_counts(cluster, name, MicroBatch("q", 1), one)
    total = RowCounts(rows_in=20, rows_out=16, retried=2, dead=2, skipped=2)
    assert read_statuses(DocumentStore(cluster))[name].rows == total
    write_generation(DocumentStore(cluster), name, Generation(number=2, starting="latest"))
    assert read_statuses(DocumentStore(cluster))[name].rows == RowCounts()
    assert read_generation(DocumentStore(cluster), name) == Generation(number=2, starting="latest")


def test_a_wish_is_seen_once_by_its_id(cluster: Cluster, name: str) -> None:
    store = DocumentStore(cluster)
    assert read_stop_request(store, name) is None
    request_stop(store, name, "a")
    assert read_stop_request(DocumentStore(cluster), name) == "a"
    request_stop(store, name, "b")
    assert read_stop_request(store, name) == "b"


def test_who_is_silent_is_lost_unless_it_is_over() -> None:
    assert TELLING.current_state(1_000 + STATUS_AGE_MS_MAX) is PipelineState.RUNNING
    assert TELLING.current_state(1_001 + STATUS_AGE_MS_MAX) is PipelineState.LOST
    assert replace(TELLING, state=PipelineState.STOPPED).current_state(1 << 60) is PipelineState.STOPPED


def test_what_a_newer_version_tells_does_not_disturb(cluster: Cluster, name: str) -> None:
    store = DocumentStore(cluster)
    store.write(name, TELLING.to_json() | {"name": name, "mood": "fine"})
    assert read_statuses(store)[name] == replace(TELLING, name=name)
    store.write(name, TELLING.to_json() | {"state": "dreaming"})
    assert name not in read_statuses(store)


def test_lag_is_what_the_group_has_not_read(cluster: Cluster, topic: str, group: str, bootstrap: str) -> None:
    assert group_lag(cluster, group) is None
    publish(bootstrap, topic, [Message(value=b"x")] * 5)
    commit_offsets(cluster, group, {(topic, 0): 2})
    assert group_lag(cluster, group) == 3
    commit_offsets(cluster, group, {(topic, 0): 5})
    assert group_lag(cluster, group) == 0


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
        commit_offsets(cluster, group, {(topic, 0): 0})
        assert group_lag(cluster, group) == 2
        commit_offsets(cluster, group, {(topic, 0): 1})
        assert group_lag(cluster, group) == 1, "in the middle of a batch"
        commit_offsets(cluster, group, {(topic, 0): 2})
        assert group_lag(cluster, group) == 0
        producer.end(commit=True)
    eventually(lambda: group_lag(cluster, group) == 1, what="the record that is committed now")
    retries = retry_topic(topic, 1)
    headers = [((GROUP_HEADER, group.encode()),), ((GROUP_HEADER, b"another"),), ()]
    publish(bootstrap, retries, [Message(value=b"x", headers=each) for each in headers])
    commit_offsets(cluster, group, {(topic, 0): 9, (retries, 0): 0})
    assert group_lag(cluster, group) == 2


def batch_of(count: int) -> bytes:
    now_ms = int(time.time() * 1000)
    return encode_batch([Record(number, now_ms, None, b"x") for number in range(count)])


def test_a_deleted_status_topic_is_created_again(fresh_broker: BrokerProcess) -> None:
    settings = {
        "bootstrap.servers": fresh_broker.bootstrap_servers,
        "topic.metadata.propagation.max.ms": "300",
    }
    with Cluster(ConnectionSettings.parse(settings)) as cluster:
        store = DocumentStore(cluster)
        assert read_statuses(store) == {}
        write_status(store, replace(TELLING, name="first"))
        assert list(read_statuses(store)) == ["first"]
        delete_topics(cluster, [PIPELINES_TOPIC])
        assert read_statuses(store) == {}
        write_status(DocumentStore(cluster), replace(TELLING, name="second"))
        assert list(read_statuses(store)) == ["second"]
