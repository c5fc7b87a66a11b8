"""The first batches of a producer are lost with a deposed leader: the next leader does not accept those behind them.

If it did, the first ones could never be written any more. Clients repeat all of them, in order, as soon as they know
what has become of the first ones.
"""

import subprocess
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from kio.schema.elect_leaders.v2 import request as elect_leaders
from tests.brokers import ClusterProcesses, external_bootstrap
from tests.chaos.late.producers import java_libs
from tests.chaos.metrics import samples
from tests.chaos.network import ProxyProcess, both_ways, out_of
from tests.chaos.proxy import OUTSIDE
from tests.chaos.view import Observer, PartitionView
from tests.chaos.workload import CLIENT
from tests.compat import confluent
from tests.compat.message import values
from tests.compat.raw_client import send_request
from tests.ports import free_address
from tests.topics import create_topics
from tests.waiting import eventually

pytestmark = pytest.mark.skipif(external_bootstrap() is not None, reason="cuts off a node of its cluster")

PRODUCE = 0
OLD, OTHERS = 1, (2, 3)
#: Partition 0 is the one under test; through the others a producer meets all nodes beforehand.
REPLICAS = [[1, 2, 3], [1, 2, 3], [2, 3, 1], [3, 1, 2]]
#: Longer than any test: nothing is given up or repeated because of the time.
NEVER_MS = 600_000
JAVA_PROGRAM = Path(__file__).with_name("Idempotent.java")


class Cluster(ClusterProcesses):
    """Three nodes behind a proxy, and what they have answered to producers."""

    def __init__(self, folder: Path, proxy: ProxyProcess) -> None:
        super().__init__(folder, settings={"auto.leader.rebalance.enable": "false"}, doors=proxy)
        self.proxy = proxy
        self._observer = Observer(self)
        self._metrics = {n: free_address(f"127.0.0.{100 + n}") for n in self.nodes}
        for n, (host, port) in self._metrics.items():
            self.nodes[n].settings |= {"penstock.http.listen": f"{host}:{port}"}

    @cached_property
    def admin(self) -> AdminClient:
        return AdminClient({**CLIENT, "bootstrap.servers": self.direct_servers})

    def create(self, topic: str) -> str:
        create_topics(self.admin, NewTopic(topic, len(REPLICAS), replica_assignment=REPLICAS))
        for partition, replicas in enumerate(REPLICAS):
            self.await_leader(topic, {replicas[0]}, partition)
        return topic

    def await_leader(self, topic: str, wanted: set[int], partition: int = 0) -> int:
        """In the eyes of all nodes, with all replicas in sync."""

        def leader() -> int:
            views = self._observer.views()
            assert len(views) == len(self.nodes)
            found: set[PartitionView] = {view.partitions[topic, partition] for view in views.values()}
            assert all(view.brokers == set(self.nodes) for view in views.values())
            (agreed,) = found
            return agreed.leader if agreed.is_whole and agreed.leader in wanted else 0

        return eventually(lambda: _or_not_yet(leader), what=f"a leader of {topic} among {wanted}")

    def await_deposed(self, topic: str) -> None:
        """The others have chosen another leader, while OLD is cut off."""
        eventually(lambda: self._observer.leader_of(topic, 0) in OTHERS, what="a new leader")

    def elect_first_replica(self, topic: str) -> None:
        """Asked past the proxy, which holds back what OLD answers."""
        wanted = elect_leaders.TopicPartitions(topic=topic, partitions=(0,))
        request = elect_leaders.ElectLeadersRequest(
            election_type=0, topic_partitions=(wanted,), timeout=timedelta(seconds=30)
        )
        assert send_request(self.nodes[OTHERS[0]].direct_address, request).error_code == 0

    def has_records(self, node: int, topic: str) -> bool:
        folder = self.nodes[node].data_dir / f"{topic}-0"
        return any(path.stat().st_size for path in folder.glob("*.log"))

    def refusals(self, node: int) -> int:
        """Batches that this node has called out of order."""
        wanted = {"api": "produce", "error": "out_of_order_sequence_number"}
        found = samples(self._metrics[node], "penstock_request_errors_total")
        return sum(int(value) for labels, value in found if wanted.items() <= labels.items())


def _or_not_yet(call: Callable[[], int]) -> int:
    try:
        return call()
    except (KeyError, ValueError) as error:
        raise AssertionError(error) from error


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    proxy = ProxyProcess()
    proxy.watch()
    nodes = Cluster(tmp_path_factory.mktemp("deposed"), proxy)
    try:
        yield nodes.start()
    finally:
        nodes.kill()
        proxy.close()


@pytest.fixture
def topic(cluster: Cluster, unique: Callable[[str], str]) -> Iterator[str]:
    yield cluster.create(unique("topic"))
    cluster.proxy.call_off()
    cluster.proxy.heal()


def expect(cluster: Cluster, topic: str, delivered: dict[str, int], wanted: list[str]) -> None:
    """Each once, in order, as the producer was told."""
    assert delivered == {value: offset for offset, value in enumerate(wanted)}
    found = confluent.read(cluster.direct_servers, topic, len(wanted))
    assert values(found) == [value.encode() for value in wanted]


def test_librdkafka_repeats_what_the_leader_took_before_it_was_deposed_and_elected_again(
    cluster: Cluster, topic: str
) -> None:
    """It does not turn to another leader before all that it has sent to the one before is answered."""
    proxy, told = cluster.proxy, Told()
    producer = Producer(
        {
            **CLIENT,
            "bootstrap.servers": cluster.bootstrap_servers,
            "enable.idempotence": True,
            "message.timeout.ms": NEVER_MS,
            "request.timeout.ms": NEVER_MS // 4,
            "socket.timeout.ms": NEVER_MS // 2,
        }
    )
    for partition in range(1, len(REPLICAS)):
        producer.produce(topic, b"hello", partition=partition)
    assert producer.flush(30) == 0
    proxy.cut([*both_ways(OLD, OTHERS), *out_of(OLD, [OUTSIDE])])
    producer.produce(topic, b"first", partition=0, on_delivery=told)
    eventually(lambda: cluster.has_records(OLD, topic), what="a leader that takes the first batch")
    proxy.lie_in_wait(PRODUCE)
    producer.produce(topic, b"second", partition=0, on_delivery=told)
    eventually(lambda: proxy.held()["held"] == 1, what="a second batch on its way")
    proxy.call_off()
    cluster.await_deposed(topic)
    proxy.join(both_ways(OLD, OTHERS))
    cluster.await_leader(topic, {*OTHERS})
    assert not cluster.has_records(OLD, topic), "it has not lost the first batch"
    cluster.elect_first_replica(topic)
    cluster.await_leader(topic, {OLD})
    before = cluster.refusals(OLD)
    proxy.let_go()
    eventually(
        lambda: cluster.refusals(OLD) > before or cluster.has_records(OLD, topic), what="the second batch"
    )
    assert not cluster.has_records(OLD, topic), "the second batch is in the place of the first"
    proxy.heal()
    producer.produce(topic, b"third", partition=0, on_delivery=told)
    assert (producer.flush(60), told.errors) == (0, [])
    expect(cluster, topic, told.delivered, ["first", "second", "third"])


class Told:
    """What librdkafka has said about each record."""

    def __init__(self) -> None:
        self.delivered: dict[str, int] = {}
        self.errors: list[str] = []

    def __call__(self, error: object, message: Any) -> None:
        if error is None:
            self.delivered[message.value().decode()] = message.offset()
        else:
            self.errors.append(str(error))


class JavaWriter:
    """Apache Kafka's own client, told what to do line by line."""

    def __init__(self, servers: str) -> None:
        self._process = subprocess.Popen(
            ["java", "-cp", f"{java_libs()}/*", str(JAVA_PROGRAM), servers, str(NEVER_MS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.delivered: dict[str, int] = {}
        self.errors: list[str] = []
        self.leader = -1
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            match line.split():
                case ["delivered", value, offset]:
                    self.delivered[value] = int(offset)
                case ["leader", leader]:
                    self.leader = int(leader)
                case _:
                    self.errors.append(line)

    def send(self, topic: str, partition: int, *records: str) -> None:
        self._tell("send", topic, str(partition), *records)

    def knows(self, topic: str, leader: int) -> bool:
        self._tell("leader", topic, "0")
        return self.leader == leader

    def _tell(self, *words: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(words) + "\n")
        self._process.stdin.flush()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def java(cluster: Cluster) -> Iterator[JavaWriter]:
    if java_libs() is None:
        pytest.skip("needs java, and the jars of Apache Kafka 4: make test-kafka fetches them")
    writer = JavaWriter(cluster.bootstrap_servers)
    yield writer
    writer.close()


@pytest.mark.kafka
@pytest.mark.parametrize("is_answered", [True, False], ids=["refused", "reset"])
def test_java_repeats_what_the_deposed_leader_did_not_take(
    cluster: Cluster, topic: str, java: JavaWriter, is_answered: bool
) -> None:
    """It goes on with the next leader while the first batch is still on its way to the one before."""
    proxy = cluster.proxy
    for partition in range(1, len(REPLICAS)):
        java.send(topic, partition, f"hello-{partition}")
    eventually(lambda: len(java.delivered) == len(REPLICAS) - 1, what="a producer that has met all nodes")
    java.delivered.clear()
    proxy.lie_in_wait(PRODUCE)
    java.send(topic, 0, "first")
    eventually(lambda: proxy.held()["held"] == 1, what="a first batch on its way")
    proxy.call_off()
    proxy.cut(both_ways(OLD, OTHERS))
    cluster.await_deposed(topic)
    proxy.join(both_ways(OLD, OTHERS))
    new = cluster.await_leader(topic, {*OTHERS})
    eventually(lambda: java.knows(topic, new), what="a producer that knows the new leader")
    before = cluster.refusals(new)
    java.send(topic, 0, "second", "third")
    eventually(
        lambda: cluster.refusals(new) > before or java.delivered or java.errors,
        what="an answer of the new leader",
    )
    assert (java.delivered, java.errors) == ({}, [])
    if not is_answered:
        proxy.cut(out_of(OLD, [OUTSIDE]))
    proxy.let_go()
    proxy.heal(reset=True)
    eventually(lambda: len(java.delivered) == 3 or java.errors, what="all records")
    assert java.errors == []
    expect(cluster, topic, java.delivered, ["first", "second", "third"])
