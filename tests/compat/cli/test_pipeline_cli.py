"""`penstock pipeline list, status, stop and reset` for pipelines of other processes."""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.compat.confluent import publish
from tests.compat.message import Message

from penstock.client.deadletters.writer import replay_query_name
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.offsets import commit_offsets, committed_offsets
from penstock.client.wire.producer import RawProducer
from penstock.client.wire.settings import ConnectionSettings
from penstock.client.wire.transactions import list_transactions
from penstock.protocol.record_batch import Record, encode_batch
from penstock.spark.exactly_once.decisions import MicroBatch
from penstock.spark.exactly_once.two_phase_commit import attempt_id_prefix
from penstock.spark.internal_topics import DocumentStore
from penstock.spark.offsets import GROUP_METADATA
from penstock.spark.pipelines.open_transactions import sink_queries
from penstock.spark.pipelines.runner import LaunchSettings, Runner
from penstock.spark.pipelines.status import (
    ErrorInfo,
    Generation,
    PipelineState,
    PipelineStatus,
    RowCounts,
    RunningAlready,
    StatusReporter,
    add_counts,
    read_generation,
    read_statuses,
    refuse_second_runner,
    write_status,
)


def now_ms() -> int:
    return int(time.time() * 1000)


@pytest.fixture
def connect(bootstrap: str) -> Iterator[Callable[[], Cluster]]:
    made = []

    def connect() -> Cluster:
        made.append(Cluster(ConnectionSettings.parse({"bootstrap.servers": bootstrap})))
        return made[-1]

    yield connect
    for each in made:
        each.close()


@pytest.fixture
def cluster(connect: Callable[[], Cluster]) -> Cluster:
    return connect()


@pytest.fixture
def told(unique: Callable[[str], str], group: str) -> PipelineStatus:
    return PipelineStatus(
        name=unique("pipeline"),
        state=PipelineState.RUNNING,
        host=socket.gethostname(),
        pid=os.getpid(),
        master="local[2]",
        source="orders",
        sink="orders.clean",
        delivery="exactly-once",
        group=group,
        checkpoint="/somewhere/1",
        batch=4,
        batch_ms=340,
        rows_per_s=1203.6,
        since_ms=now_ms(),
        updated_ms=now_ms(),
    )


def test_status_tells_how_it_is_with_the_lag_as_it_is_now(
    penstock: Any, answer: Any, cluster: Cluster, told: PipelineStatus, topic: str, bootstrap: str
) -> None:
    assert told.group is not None
    write_status(DocumentStore(cluster), replace(told, lag=99))
    add_counts(cluster, told.name, MicroBatch("q", 4), RowCounts(rows_in=10, rows_out=7, retried=2, dead=1))
    publish(bootstrap, topic, [Message(value=b"x")] * 5)
    commit_offsets(cluster, told.group, {(topic, 0): 2}, metadata=GROUP_METADATA)
    document = answer("pipeline", "status", told.name)
    assert document["state"] == "running"
    assert document["lag"] == 3
    assert document["rows"] == {"in": 10, "out": 7, "retried": 2, "dead": 1, "skipped": 0}
    text, _ = penstock("pipeline", "status", told.name)
    assert "10 in, 7 out, 2 retried, 1 dead" in text
    assert "4, in 0.34 s" in text
    [row] = [line for line in penstock("pipeline", "list")[0].splitlines() if told.name in line]
    assert row.split()[1:] == ["running", "1204", "3", "10", "7", "2", "1"]
    assert [each["name"] for each in answer("pipeline", "list") if each["name"] == told.name] == [told.name]


def test_who_does_not_tell_any_more_is_lost(
    penstock: Any, answer: Any, cluster: Cluster, told: PipelineStatus
) -> None:
    silent = replace(told, updated_ms=now_ms() - 60_000, error=ErrorInfo(kind="ValueError", message="no"))
    write_status(DocumentStore(cluster), silent)
    assert answer("pipeline", "status", told.name)["state"] == "lost"
    assert "ValueError: no" in penstock("pipeline", "status", told.name)[0]
    assert "is not running: it is lost" in penstock("pipeline", "stop", told.name)[1]


def test_an_unknown_name_is_a_sentence(penstock: Any, cluster: Cluster, told: PipelineStatus) -> None:
    write_status(DocumentStore(cluster), told)
    for verb in ("status", "stop", "reset"):
        _, complaint = penstock("pipeline", verb, told.name + "x", code=1)
        assert complaint == (
            f"error: pipeline {told.name}x does not exist\n       did you mean {told.name}?\n"
        ), verb


def test_stop_reaches_the_running_process_and_waits(
    penstock: Any, cluster: Cluster, connect: Callable[[], Cluster], told: PipelineStatus
) -> None:
    wished = threading.Event()
    herald = StatusReporter(connect(), told, on_stop=lambda _: wished.set())
    herald.start()

    def obey() -> None:
        assert wished.wait(20)
        herald.finish(state=PipelineState.STOPPED)

    obeying = threading.Thread(target=obey)
    obeying.start()
    _, words = penstock("pipeline", "stop", told.name)
    obeying.join()
    assert words == f"{told.name} stopped\n"
    assert read_statuses(DocumentStore(cluster))[told.name].state is PipelineState.STOPPED
    assert "is not running: it is stopped" in penstock("pipeline", "stop", told.name)[1]


def test_stop_does_not_wait_for_ever(
    penstock: Any, connect: Callable[[], Cluster], told: PipelineStatus
) -> None:
    herald = StatusReporter(connect(), told, on_stop=lambda _: None)
    herald.start()
    assert (
        "has not stopped within 0.1 s"
        in penstock("pipeline", "stop", told.name, "--timeout", "0.1", code=1)[1]
    )
    herald.finish(state=PipelineState.STOPPED)


def test_a_second_runner_is_refused_while_the_first_is_heard_of(
    cluster: Cluster, told: PipelineStatus
) -> None:
    store = DocumentStore(cluster)
    elsewhere = replace(told, host="elsewhere", pid=7)
    assert refuse_second_runner(store, told, now_ms=now_ms()) is None
    write_status(store, elsewhere)
    with pytest.raises(RunningAlready, match=r"is already running on elsewhere \(process 7\)"):
        refuse_second_runner(store, told, now_ms=now_ms())
    assert refuse_second_runner(store, told, now_ms=now_ms() + 60_000) == elsewhere
    write_status(store, replace(elsewhere, state=PipelineState.FAILED))
    assert refuse_second_runner(store, told, now_ms=now_ms()) is not None
    # One that was killed on this very machine is gone at once.
    write_status(store, replace(told, pid=2**22 + 1))
    assert refuse_second_runner(store, told, now_ms=now_ms()) is not None


def test_who_is_overtaken_stops_and_says_no_more(
    cluster: Cluster, connect: Callable[[], Cluster], told: PipelineStatus
) -> None:
    overtaken, reasons = threading.Event(), list[str]()
    herald = StatusReporter(connect(), told, on_stop=lambda why: (reasons.append(why), overtaken.set()))
    herald.start()
    write_status(DocumentStore(cluster), replace(told, host="elsewhere", pid=7))
    assert overtaken.wait(20)
    assert "another runner on elsewhere (process 7)" in reasons[0]
    herald.finish(state=PipelineState.STOPPED)
    assert read_statuses(DocumentStore(cluster))[told.name].state is PipelineState.RUNNING


def test_reset_begins_another_generation(
    penstock: Any,
    answer: Any,
    cluster: Cluster,
    told: PipelineStatus,
    new_topic: Callable[..., str],
    bootstrap: str,
) -> None:
    assert told.group is not None
    source, store, base_ms = new_topic(), DocumentStore(cluster), now_ms() - 10_000
    penstock("topic", "create", f"{source}.retry.1")
    publish(bootstrap, source, [Message(value=b"x", timestamp_ms=base_ms + 1_000 * n) for n in range(5)])
    publish(bootstrap, f"{source}.retry.1", [Message(value=b"x")] * 3)
    positions = {(source, 0): 4, (f"{source}.retry.1", 0): 1}
    commit_offsets(cluster, told.group, positions, metadata=GROUP_METADATA)

    write_status(store, told)
    assert penstock("pipeline", "reset", told.name, "--yes", code=1)[1] == (
        f"error: {told.name} is running\n       `penstock pipeline stop {told.name}` stops it\n"
    )
    write_status(store, replace(told, state=PipelineState.STOPPED))
    add_counts(cluster, told.name, MicroBatch("q", 0), RowCounts(rows_in=4))
    assert "needs a confirmation" in penstock("pipeline", "reset", told.name, code=2)[1]

    # Where retries wait is where they are taken up again.
    dry = answer("pipeline", "reset", told.name, "--to", "latest", "--dry-run")
    assert dry == {
        "pipeline": told.name, "generation": 2, "applied": False,
        "partitions": [
            {"topic": source, "partition": 0, "from": 4, "to": 5},
            {"topic": f"{source}.retry.1", "partition": 0, "from": 1, "to": 1},
        ],
    }  # fmt: skip
    assert read_generation(store, told.name) == Generation()

    answer("pipeline", "reset", told.name, "--to", str(base_ms + 2_000), "--yes")
    now = {place: at.offset for place, at in committed_offsets(cluster, told.group).items()}
    assert now == {(source, 0): 2, (f"{source}.retry.1", 0): 1}
    found = read_generation(store, told.name)
    assert found.number == 2
    assert json.loads(found.starting or "") == {source: {"0": 2}, f"{source}.retry.1": {"0": 1}}
    assert answer("pipeline", "status", told.name)["rows"]["in"] == 0

    answer("pipeline", "reset", told.name, "--to", json.dumps({source: {"0": 1}}), "--yes")
    assert json.loads(read_generation(store, told.name).starting or "")[source] == {"0": 1}
    assert read_generation(store, told.name).number == 3


def test_reset_ends_what_the_old_generation_has_left_open(
    penstock: Any, cluster: Cluster, told: PipelineStatus, topic: str, unique: Callable[[str], str]
) -> None:
    assert told.group is not None
    query = unique("query")
    commit_offsets(cluster, told.group, {(topic, 0): 0}, metadata=GROUP_METADATA)
    failed = replace(told, state=PipelineState.FAILED, queries=(query,))
    write_status(DocumentStore(cluster), failed)
    left = sorted(attempt_id_prefix(MicroBatch(name, 0)) + "attempt" for name in sink_queries(failed))
    for name in left:
        with RawProducer(cluster, transactional_id=name) as producer:
            producer.init()
            producer.send(topic, 0, encode_batch([Record(0, now_ms(), None, b"x")]))
            producer.flush()
    assert sorted(list_transactions(cluster, f"penstock-sink-{query}", ("Ongoing",))) == left
    penstock("pipeline", "reset", told.name, "--yes")
    assert not list_transactions(cluster, f"penstock-sink-{query}", ("Ongoing",))


@contextmanager
def left_behind(cluster: Cluster, topic: str, query: str) -> Iterator[str]:
    """As an attempt at batch 0 of a query leaves it when its driver is killed: no time ends it."""
    name = attempt_id_prefix(MicroBatch(query, 0)) + "attempt"
    with RawProducer(cluster, transactional_id=name, two_phase=True) as producer:
        producer.init()
        producer.send(topic, 0, encode_batch([Record(0, now_ms(), None, b"x")]))
        producer.flush()
    yield name
    assert not list_transactions(cluster, name, ("Ongoing",))


def test_what_a_killed_pipeline_holds_back_is_shown_and_released(
    penstock: Any,
    answer: Any,
    cluster: Cluster,
    told: PipelineStatus,
    topic: str,
    unique: Callable[[str], str],
) -> None:
    query = unique("query")
    assert told.group is not None
    commit_offsets(cluster, told.group, {(topic, 0): 0}, metadata=GROUP_METADATA)
    gone = replace(told, queries=(query,), sink=topic, updated_ms=now_ms() - 60_000)
    write_status(DocumentStore(cluster), gone)
    owner, command = f"pipeline {told.name}", f"penstock pipeline release {told.name}"
    with left_behind(cluster, topic, query) as name:
        (row,) = answer("pipeline", "status", told.name)["open_transactions"]
        assert (row["transactional_id"], row["owner"]) == (name, owner)
        assert row["partitions"] == [{"topic": topic, "partition": 0}]
        assert abs(row["since_ms"] - now_ms()) < 600_000
        assert command in penstock("pipeline", "status", told.name)[0]
        assert f"left transactions open in {topic}; `{command}`" in penstock("pipeline", "list")[1]
        shown = {each["transactional_id"]: each for each in answer("transaction", "list", "--open")}
        assert shown[name]["owner"] == owner
        (described,) = answer("topic", "describe", topic)
        assert [each["owner"] for each in described["held_back_by"]] == [owner]
        assert command in penstock("topic", "describe", topic)[0]
        assert command in penstock("transaction", "abort", name, "--yes", code=1)[1], "it may be decided"

        assert [
            each["transactional_id"]
            for each in answer("pipeline", "release", told.name, "--dry-run")["transactions"]
        ] == [name]
        assert "needs a confirmation" in penstock("pipeline", "release", told.name, code=2)[1]
        assert answer("pipeline", "release", told.name, "--yes")["released"]
    assert answer("topic", "describe", topic)[0]["held_back_by"] == []
    assert "has no open transactions" in penstock("pipeline", "release", told.name)[1]
    write_status(DocumentStore(cluster), replace(told, queries=(query,)))
    assert "is running" in penstock("pipeline", "release", told.name, "--yes", code=1)[1]


def test_what_a_query_of_no_pipeline_holds_back_is_released_by_its_id(
    penstock: Any, answer: Any, cluster: Cluster, topic: str, unique: Callable[[str], str]
) -> None:
    query = unique("query")
    with left_behind(cluster, topic, query):
        (described,) = answer("topic", "describe", topic)
        assert [each["owner"] for each in described["held_back_by"]] == [f"query {query}"]
        penstock("pipeline", "release", query, "--yes")
    assert "does not exist" in penstock("pipeline", "release", query, "--yes", code=1)[1]


def test_a_restart_ends_what_the_run_before_has_left_open(
    cluster: Cluster,
    told: PipelineStatus,
    topic: str,
    bootstrap: str,
    unique: Callable[[str], str],
    tmp_path: Path,
) -> None:
    """Before Spark is there, and while the pipeline is not known to run."""

    class Nothing:
        name = unique("job")

        def run(self, context: Any) -> None:
            seen.append(list_transactions(cluster, f"penstock-sink-{self.name}/", ("Ongoing",)))

    seen: list[Any] = []
    write_status(DocumentStore(cluster), replace(told, name=Nothing.name, group=None, updated_ms=1))
    launch = LaunchSettings(bootstrap=bootstrap, checkpoints=str(tmp_path))
    notes: list[str] = []
    with left_behind(cluster, topic, Nothing.name):
        made = Runner(Nothing(), launch, listener=lambda _: None, note=notes.append, spark=object())
        assert made.run().state is PipelineState.FINISHED
    assert seen == [{}]
    assert notes == ["ended 1 open transactions of the previous run"]


def test_a_pipeline_that_waits_for_the_transaction_of_another_says_so(
    penstock: Any,
    answer: Any,
    cluster: Cluster,
    told: PipelineStatus,
    topic: str,
    unique: Callable[[str], str],
) -> None:
    assert told.group is not None
    commit_offsets(cluster, told.group, {(topic, 0): 0}, metadata=GROUP_METADATA)
    write_status(DocumentStore(cluster), told)
    query = unique("query")
    with left_behind(cluster, topic, query):
        (row,) = answer("pipeline", "status", told.name)["held_back_by"]
        assert row["owner"] == f"query {query}"
        penstock("pipeline", "release", query, "--yes")


@pytest.mark.parametrize("source", ["orders", "orders.dlq"])
def test_reset_of_a_job_ends_what_it_has_left_open(
    penstock: Any,
    cluster: Cluster,
    told: PipelineStatus,
    topic: str,
    unique: Callable[[str], str],
    source: str,
) -> None:
    name, source = unique("replay"), f"{unique('x')}-{source}"
    told = replace(told, name=name, group=None, state=PipelineState.FAILED, source=f"{source} -> somewhere")
    write_status(DocumentStore(cluster), told)
    query = replay_query_name(source) if source.endswith(".dlq") else name
    left = attempt_id_prefix(MicroBatch(query, 3)) + "attempt"
    with RawProducer(cluster, transactional_id=left) as producer:
        producer.init()
        producer.send(topic, 0, encode_batch([Record(0, now_ms(), None, b"x")]))
        producer.flush()
    penstock("pipeline", "reset", name, "--dry-run")
    assert list(list_transactions(cluster, f"penstock-sink-{query}", ("Ongoing",))) == [left]
    assert "continues when it runs again" in "".join(penstock("pipeline", "reset", name, "--yes"))
    assert not list_transactions(cluster, f"penstock-sink-{query}", ("Ongoing",))


def test_reset_takes_the_words_of_group_reset(
    penstock: Any, answer: Any, cluster: Cluster, told: PipelineStatus, topic: str, bootstrap: str, group: str
) -> None:
    """A pipeline and a group that stand at the same place are moved to the same place by the same words."""
    assert told.group is not None
    base_ms = now_ms()
    publish(bootstrap, topic, [Message(value=b"x", timestamp_ms=base_ms + 1_000 * n) for n in range(5)])
    write_status(DocumentStore(cluster), replace(told, state=PipelineState.STOPPED))
    plain = group + "-plain"
    ways = (
        ("--to-earliest", 0), ("--to-latest", 5), ("--to-offset=2", 2), (f"--to-timestamp={base_ms + 2_000}", 2),
        ("--shift-by=-1", 2), ("--to=earliest", 0), ("--to=latest", 5), (f"--to={base_ms + 3_000}", 3),
        ("--to=" + json.dumps({topic: {"0": 4}}), 4), ("--to=" + json.dumps({topic: {"0": -1}}), 5),
    )  # fmt: skip
    for way, offset in ways:
        commit_offsets(cluster, plain, {(topic, 0): 3})
        commit_offsets(cluster, told.group, {(topic, 0): 3}, metadata=GROUP_METADATA)
        for command in (("group", "reset", plain), ("pipeline", "reset", told.name)):
            moved = answer(*command, way, "--topic", topic, "--yes")
            assert [(each["from"], each["to"]) for each in moved["partitions"]] == [(3, offset)], (
                command,
                way,
            )
    for command in (("group", "reset", plain), ("pipeline", "reset", told.name)):
        assert "only one target" in penstock(*command, "--to", "latest", "--to-earliest", "--yes", code=2)[1]
        assert "not a time" in penstock(*command, "--to", "soon", "--yes", code=2)[1]
        penstock(*command, "--topic", "nowhere", "--to-earliest", "--yes", code=1)


@pytest.mark.parametrize(
    ("where", "complaint"),
    [
        ("soon", "'soon' is not a time"),
        ('{"orders": 5}', "must look like"),
        ('{"nowhere": {"0": 5}}', "does not read nowhere[0]"),
    ],
)
def test_reset_to_nowhere_is_wrong_usage(
    penstock: Any, cluster: Cluster, told: PipelineStatus, topic: str, where: str, complaint: str
) -> None:
    assert told.group is not None
    write_status(DocumentStore(cluster), replace(told, state=PipelineState.STOPPED))
    commit_offsets(cluster, told.group, {(topic, 0): 0}, metadata=GROUP_METADATA)
    assert complaint in penstock("pipeline", "reset", told.name, "--to", where, "--yes", code=2)[1]


def test_the_group_of_a_query_is_not_moved_behind_its_back(
    penstock: Any, cluster: Cluster, topic: str, group: str
) -> None:
    for name, hint in [
        (f"penstock-pipeline-{group}", f"penstock pipeline reset {group}"),
        (group, "checkpoint"),
    ]:
        commit_offsets(cluster, name, {(topic, 0): 0}, metadata=GROUP_METADATA)
        _, complaint = penstock("group", "reset", name, "--to-latest", "--yes", code=1)
        assert "a reset would not move the query" in complaint
        assert hint in complaint
    commit_offsets(cluster, group + "-plain", {(topic, 0): 0})
    penstock("group", "reset", group + "-plain", "--to-latest", "--yes")
