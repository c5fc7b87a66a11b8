"""EndTxn and Produce that arrive when their transaction is over: nothing is torn, and nothing hangs.

A proxy holds the request until its client has given it up and gone on over a new connection. With producers of the
newer protocol each transaction has its own epoch; with those of the older one all have the same, and what tells a late
request from a present one is the connection that it comes by.
"""

from collections.abc import Callable, Iterator

import pytest
from confluent_kafka import Consumer, KafkaError, TopicPartition
from tests.brokers import ClusterProcesses, external_bootstrap
from tests.chaos.copier import leftovers
from tests.chaos.late.producers import (
    ConfluentProducer,
    Fenced,
    JavaProducer,
    RawProducer,
    TransactionalProducer,
    java_libs,
)
from tests.chaos.network import ProxyProcess
from tests.chaos.readers import CONSUMER
from tests.chaos.view import Observer
from tests.chaos.workload import create_topics
from tests.waiting import eventually

pytestmark = pytest.mark.skipif(external_bootstrap() is not None, reason="needs a proxy before its nodes")

PRODUCE, END_TXN = 0, 26
PARTITIONS = 2
MANY = 20  # more often than any client tries
SETTINGS = {
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "100",
    "transaction.state.log.num.partitions": "1",
}

Connecting = Callable[..., TransactionalProducer]


@pytest.fixture(scope="module")
def proxy() -> Iterator[ProxyProcess]:
    process = ProxyProcess()
    process.watch()
    yield process
    process.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, proxy: ProxyProcess) -> Iterator[ClusterProcesses]:
    folder = tmp_path_factory.mktemp("late")
    nodes = ClusterProcesses(folder, count=1, settings=SETTINGS, doors=proxy)
    yield nodes.start()
    nodes.kill()


@pytest.fixture
def topic(cluster: ClusterProcesses, unique: Callable[[str], str]) -> str:
    name = unique("late")
    create_topics(cluster.direct_servers, 1, {name: PARTITIONS})
    return name


@pytest.fixture(params=["older protocol", "newer protocol", pytest.param("java", marks=pytest.mark.kafka)])
def connecting(request: pytest.FixtureRequest, cluster: ClusterProcesses, topic: str) -> Iterator[Connecting]:
    """`connecting(**settings)`: one more producer of the same transactional id, which fences those before."""
    made: list[TransactionalProducer] = []

    def connect(**settings: int) -> TransactionalProducer:
        servers, name = cluster.bootstrap_servers, f"producer-{topic}"
        host, _, port = servers.partition(":")
        match request.param:
            case "older protocol":
                made.append(ConfluentProducer(servers, topic, name, **settings))
            case "newer protocol":
                made.append(RawProducer((host, int(port)), topic, name, **settings))
            case "java":
                if java_libs() is None:
                    pytest.skip("needs java, and the jars of Apache Kafka 4: make test-kafka fetches them")
                made.append(JavaProducer(servers, topic, name, **settings))
        return made[-1]

    yield connect
    for producer in made:
        producer.close()


class Outcome:
    """What readers get to see, past the proxy."""

    def __init__(self, cluster: ClusterProcesses, topic: str) -> None:
        self._servers = cluster.direct_servers
        self._observer = Observer(cluster)
        self._topic = topic

    def committed(self) -> list[str]:
        settings = {
            "bootstrap.servers": self._servers,
            "enable.partition.eof": True,
            "group.id": "reading",
            "isolation.level": "read_committed",
        }
        consumer = Consumer({**CONSUMER, **settings})
        consumer.assign([TopicPartition(self._topic, number, 0) for number in range(PARTITIONS)])
        found, ends = [], 0
        while ends < PARTITIONS:
            for message in consumer.consume(100, 0.1):
                error = message.error()
                if error is None:
                    found.append((message.value() or b"").decode())
                else:
                    assert error.code() == KafkaError._PARTITION_EOF, error
                    ends += 1
        consumer.close()
        return sorted(found)

    def left(self) -> list[str]:
        places = [(self._topic, number) for number in range(PARTITIONS)]
        return leftovers.open_transactions(self._observer) + leftovers.held_back(self._servers, places)

    def settle(self) -> list[str]:
        """What is committed when nothing is open any more."""
        eventually(lambda: not self.left(), what="the end of all transactions")
        return self.committed()


@pytest.fixture
def outcome(cluster: ClusterProcesses, topic: str) -> Outcome:
    return Outcome(cluster, topic)


def let_go(proxy: ProxyProcess) -> None:
    """Returns when the node has answered all that was held, or does not want to hear of it."""
    before = proxy.held()["over"]
    count = proxy.let_go()
    assert count > 0, "nothing was held"
    eventually(lambda: proxy.held()["over"] - before >= count, what="answers to what was held")


@pytest.mark.parametrize("commits", [True, False])
def test_a_late_end_does_not_end_the_next_transaction(
    proxy: ProxyProcess, connecting: Connecting, outcome: Outcome, commits: bool
) -> None:
    producer = connecting()
    producer.begin()
    producer.send("first", 0)
    proxy.lie_in_wait(END_TXN)
    producer.end(commits=commits)
    assert proxy.held()["held"] == 1, "it was sent twice"
    first = ["first"] if commits else []
    producer.begin()
    producer.send("early", 0)
    producer.send("early-too", 1)
    let_go(proxy)
    assert outcome.committed() == first, "the second is still open"
    producer.send("late", 0)
    producer.end(commits=not commits)
    second = [] if commits else ["early", "early-too", "late"]
    assert outcome.settle() == sorted(first + second)
    producer.begin()
    producer.send("third", 1)
    producer.end(commits=True)
    assert outcome.settle() == sorted([*first, *second, "third"])


@pytest.mark.parametrize("aborted_by", ["its successor", "its coordinator"])
def test_a_late_batch_of_an_aborted_transaction_is_refused(
    proxy: ProxyProcess, connecting: Connecting, outcome: Outcome, aborted_by: str
) -> None:
    producer = connecting(timeout_ms=2000)
    producer.begin()
    producer.send("early", 0)
    for _ in range(MANY):
        proxy.lie_in_wait(PRODUCE)
    producer.send_later("late", 1)
    eventually(lambda: proxy.held()["held"], what="a held batch")
    if aborted_by == "its successor":
        connecting()
    assert outcome.settle() == []
    proxy.call_off()
    let_go(proxy)
    assert outcome.settle() == []
    with pytest.raises(Fenced):
        producer.end(commits=True)
    assert outcome.settle() == []
