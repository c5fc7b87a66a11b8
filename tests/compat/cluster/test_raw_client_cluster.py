"""The raw client on three nodes whose leaders and coordinators are killed."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import pytest
from tests.brokers import ClusterProcesses, external_bootstrap
from tests.compat.raw_client import batch, read, read_committed, records, settings, values
from tests.waiting import eventually

from penstock.client.errors import Fenced, Refused
from penstock.client.wire.cluster import Cluster, CoordinatorType
from penstock.client.wire.fetch import PartitionReader
from penstock.client.wire.metadata import IsolationLevel
from penstock.client.wire.offsets import CommittedOffset, committed_offsets
from penstock.client.wire.producer import (
    PreparedTransaction,
    RawProducer,
    TwoPhaseKind,
    end_prepared_transaction,
)
from penstock.client.wire.topics import NewTopic, create_topics
from penstock.client.wire.transactions import fence_producer, list_transactions
from penstock.protocol.errors import ErrorCode

pytestmark = pytest.mark.skipif(external_bootstrap() is not None, reason="kills its own nodes")

SETTINGS = {
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.num.partitions": "3",
    "transaction.two.phase.commit.enable": "true",
}
NODES = 3
ROUNDS = 3
EACH_ROUND = 120
PROTOCOLS = pytest.mark.parametrize("version", [0, 2], ids=["older protocol", "newer protocol"])

#: Writes what it is told in a transaction, says what it has prepared, and waits to be killed.
WRITER = """
import json, sys, time
from dataclasses import asdict
from tests.compat.raw_client import batch, settings
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.producer import RawProducer
bootstrap, topic, name, version = sys.argv[1:5]
producer = RawProducer(
    Cluster(settings(bootstrap)), transactional_id=name, two_phase=True, transaction_version_max=int(version)
)
producer.init()
for number in range(30):
    producer.send(topic, number % 3, batch(f"{name}-{number}".encode()))
print(json.dumps(asdict(producer.prepare())), flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcesses]:
    """Every test gives it back with all nodes running. What coordinators keep is on all of them from the start."""
    processes = ClusterProcesses(tmp_path_factory.mktemp("cluster"), settings=SETTINGS).start()
    with Cluster(settings(processes.bootstrap_servers)) as made:
        for kind in CoordinatorType:
            made.coordinator_id(kind, "anyone")
    yield processes
    processes.kill()


@pytest.fixture
def cluster(nodes: ClusterProcesses) -> Iterator[Cluster]:
    with Cluster(settings(nodes.bootstrap_servers)) as made:
        yield made


@pytest.fixture
def topic(cluster: Cluster, unique: Callable[[str], str]) -> str:
    name = unique("orders")
    assignment = ((1, 2, 3), (2, 3, 1), (3, 1, 2))
    create_topics(cluster, [NewTopic(name=name, assignment=assignment)])
    return name


def await_in_sync(cluster: Cluster) -> None:
    def is_whole() -> bool:
        parts = [part for topic in cluster.topics().values() for part in topic.partitions]
        return all(len(part.in_sync) == len(part.replicas) and part.leader_id > 0 for part in parts)

    eventually(is_whole, what="everyone in sync")


def await_leader_epoch(bootstrap: str, topic: str, leader_epoch: int) -> None:
    """Wait until this node knows of a leader epoch of partition 0, or of a later one."""

    def knows() -> bool:
        with Cluster(settings(bootstrap)) as cluster:  # a new one: it asks this node before any other
            return cluster.topics([topic])[topic].partitions[0].leader_epoch >= leader_epoch

    eventually(knows, what=f"{bootstrap} knows leader epoch {leader_epoch}")


class Reading:
    """One partition, in a thread of its own with a cluster of its own, until all that was promised is there."""

    def __init__(self, bootstrap: str, topic: str, partition: int, count: int) -> None:
        self._arguments = (bootstrap, topic, partition, count)
        self.found: list[bytes] = []
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        bootstrap, topic, partition, count = self._arguments
        try:
            with Cluster(settings(bootstrap)) as cluster:
                reader = PartitionReader(cluster, topic, cluster.await_topic(topic).id, partition)
                position = 0
                while len(self.found) < count:
                    fetched = reader.fetch(position, wait_ms=500)
                    self.found += values(records(fetched))
                    position = fetched.next_offset
        except BaseException as error:
            self.error = error

    def result(self) -> list[bytes]:
        self._thread.join(60)
        if self.error is not None:
            raise self.error
        assert not self._thread.is_alive(), f"read only {len(self.found)}"
        return self.found


def test_leaders_die_while_one_writes_and_others_read(
    nodes: ClusterProcesses, cluster: Cluster, topic: str
) -> None:
    sent: dict[int, list[bytes]] = {index: [] for index in range(3)}
    total = ROUNDS * EACH_ROUND
    readers = [Reading(nodes.bootstrap_servers, topic, index, total // 3) for index in range(3)]
    with RawProducer(cluster) as producer:
        producer.init()
        for turn in range(ROUNDS):
            await_in_sync(cluster)
            victim = nodes.nodes[cluster.topics([topic])[topic].partitions[turn % 3].leader_id]
            for number in range(turn * EACH_ROUND, (turn + 1) * EACH_ROUND):
                sent[number % 3].append(b"%d" % number)
                producer.send(topic, number % 3, batch(b"%d" % number))
                if number % EACH_ROUND == EACH_ROUND // 2:
                    victim.kill()
            producer.flush()
            victim.start()
    assert {index: reader.result() for index, reader in enumerate(readers)} == sent
    assert {index: values(read(cluster, topic, index)) for index in sent} == sent


def test_leaders_stand_still_and_come_back_late(nodes: ClusterProcesses, topic: str) -> None:
    """What was sent to one that sleeps arrives when another leads, and must not count twice."""
    impatient = settings(nodes.bootstrap_servers, **{"request.timeout.ms": "1500", "client.id": "impatient"})
    sent: list[bytes] = []
    reading = Reading(nodes.bootstrap_servers, topic, 0, 3 * EACH_ROUND)
    with Cluster(impatient) as cluster, RawProducer(cluster) as producer:
        producer.init()
        for turn in range(3):
            await_in_sync(cluster)
            led = cluster.topics([topic])[topic].partitions[0]
            sleeper = nodes.nodes[led.leader_id]
            for number in range(EACH_ROUND):
                sent.append(b"%d-%d" % (turn, number))
                producer.send(topic, 0, batch(sent[-1]))
                if number == EACH_ROUND // 2:
                    sleeper.freeze()
            producer.flush()
            sleeper.thaw()
            # Until it learns of the new leader, it may serve its old metadata and its old high watermark.
            await_leader_epoch(sleeper.bootstrap_servers, topic, led.leader_epoch + 1)
        await_in_sync(cluster)
        assert values(read(cluster, topic)) == sent
    assert reading.result() == sent


@PROTOCOLS
def test_nodes_die_while_transactions_are_written(
    nodes: ClusterProcesses,
    cluster: Cluster,
    topic: str,
    group: str,
    unique: Callable[[str], str],
    version: int,
) -> None:
    """Some are committed and some aborted: of those all is there once, of these nothing. Positions go with them."""
    kept: dict[int, list[bytes]] = {index: [] for index in range(3)}
    producer = RawProducer(cluster, transactional_id=unique("tx"), transaction_version_max=version)
    producer.init()
    assert producer.transaction_version == version
    position = 0
    for turn in range(4):
        await_in_sync(cluster)
        victim = nodes.nodes[turn % NODES + 1]
        commits = turn != 1
        for number in range(turn * 30, turn * 30 + 30):
            producer.send(topic, number % 3, batch(b"%d" % number))
            if number % 30 == 5 + turn * 6:
                victim.kill()
        producer.commit_offsets(group, {(topic, 0): turn + 1})
        producer.end(commits)
        if commits:
            position = turn + 1
            for number in range(turn * 30, turn * 30 + 30):
                kept[number % 3].append(b"%d" % number)
        assert committed_offsets(cluster, group, [(topic, 0)]) == {
            (topic, 0): CommittedOffset(offset=position)
        }
        victim.start()
    producer.close()
    await_in_sync(cluster)
    found = {i: read_committed(cluster, topic, i) for i in kept}
    assert found == kept


def prepare(nodes: ClusterProcesses, topic: str, name: str, version: int) -> PreparedTransaction:
    """By a process that is killed as soon as it has said so."""
    command = [sys.executable, "-c", WRITER, nodes.bootstrap_servers, topic, name, str(version)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        told: dict[str, Any] = json.loads(process.stdout.readline())
        process.kill()
    told["partitions"] = tuple((place[0], place[1]) for place in told["partitions"])
    return PreparedTransaction(**{**told, "groups": tuple(told["groups"])})


@PROTOCOLS
def test_what_a_dead_process_has_prepared_is_ended_by_another(
    nodes: ClusterProcesses, cluster: Cluster, topic: str, unique: Callable[[str], str], version: int
) -> None:
    await_in_sync(cluster)
    winner, loser = (prepare(nodes, topic, unique(name), version) for name in ("winner", "loser"))
    assert sorted(winner.partitions) == [(topic, index) for index in range(3)]
    assert read(cluster, topic, isolation=IsolationLevel.READ_COMMITTED) == [], "it is not decided"
    coordinator = nodes.nodes[cluster.coordinator_id(CoordinatorType.TRANSACTION, winner.transactional_id)]
    coordinator.kill()
    for _ in range(2):
        end_prepared_transaction(cluster, winner, commit=True)
        end_prepared_transaction(cluster, loser, commit=False)
    coordinator.start()
    await_in_sync(cluster)
    for _ in range(2):
        end_prepared_transaction(cluster, winner, commit=True)
        end_prepared_transaction(cluster, loser, commit=False)
    with pytest.raises(Refused) as caught:
        end_prepared_transaction(cluster, winner, commit=False)
    assert caught.value.code is ErrorCode.invalid_txn_state
    with pytest.raises(Refused) as caught:
        end_prepared_transaction(cluster, loser, commit=True)
    assert caught.value.code is ErrorCode.invalid_txn_state
    found = {i: read_committed(cluster, topic, i) for i in range(3)}
    name = winner.transactional_id
    assert found == {i: [f"{name}-{n}".encode() for n in range(30) if n % 3 == i] for i in range(3)}


def test_what_a_dead_process_has_left_open_is_aborted_by_its_name(
    nodes: ClusterProcesses, cluster: Cluster, topic: str, unique: Callable[[str], str]
) -> None:
    await_in_sync(cluster)
    prefix = unique("left")
    left = [prepare(nodes, topic, f"{prefix}-{version}", version) for version in (0, 2)]
    for name, state in list_transactions(cluster, prefix).items():
        assert state == "Ongoing"
        fence_producer(cluster, name)
    assert list_transactions(cluster, prefix) == {each.transactional_id: "Empty" for each in left}
    for each in left:
        with pytest.raises(Fenced):
            end_prepared_transaction(cluster, each, commit=True)
    assert read_committed(cluster, topic) == []


def test_a_successor_decides_about_what_it_finds_prepared(
    nodes: ClusterProcesses, cluster: Cluster, topic: str, unique: Callable[[str], str]
) -> None:
    """KIP-939: the id is taken over with the open transaction, and the producer that wrote it is fenced."""
    await_in_sync(cluster)
    prepared = prepare(nodes, topic, unique("kept"), 2)
    with RawProducer(cluster, transactional_id=prepared.transactional_id, two_phase=True) as successor:
        begun = successor.init(keep_prepared=True)
        assert successor.two_phase_kind is TwoPhaseKind.UNTIL_ENDED
        assert begun.ongoing == (prepared.producer_id, prepared.epoch)
        with pytest.raises(Fenced):
            end_prepared_transaction(cluster, prepared, commit=False)
        successor.end(commit=True)
        successor.send(topic, 0, batch(b"next"))
        successor.end(commit=True)
    found = read_committed(cluster, topic)
    assert found == [f"{prepared.transactional_id}-{n}".encode() for n in range(0, 30, 3)] + [b"next"]
    assert PreparedTransaction(**asdict(prepared)) == prepared
