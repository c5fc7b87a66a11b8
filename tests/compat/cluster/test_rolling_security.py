"""From PLAINTEXT to SASL_SSL without downtime, for clients and between nodes: the recipe in docs/security.md."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from tests.brokers import CLIENTS, NODES, ClusterProcesses, NodeProcess
from tests.certificates import Authority
from tests.topics import create_topics
from tests.waiting import eventually

TOPIC, PARTITIONS = "orders", 3
SECURE, SECURE_NODES = "SECURE", "SECURENODES"
MODULE = "org.apache.kafka.common.security.scram.ScramLoginModule"
SCRAM = "SCRAM-SHA-512"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ClusterProcesses]:
    processes = ClusterProcesses(tmp_path).start()
    yield processes
    processes.kill()


class Clients:
    """An idempotent producer without a pause and a consumer of a group, which a new pair can continue."""

    def __init__(self, settings: dict[str, Any], first: int) -> None:
        self._producer = Producer(settings | {"enable.idempotence": True})
        self._consumer = Consumer(
            settings | {"group.id": "billing", "auto.offset.reset": "earliest", "enable.auto.commit": False}
        )
        self._consumer.subscribe([TOPIC])
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=work) for work in (self._produce, self._consume)]
        self.next = first
        self.acknowledged: set[int] = set()
        self.failed: list[str] = []
        self.seen: Counter[int] = Counter()

    def __enter__(self) -> "Clients":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _produce(self) -> None:
        while not self._stop.is_set():
            self._producer.produce(TOPIC, str(self.next).encode(), on_delivery=self._delivered)
            self.next += 1
            self._producer.poll(0.005)
        if self._producer.flush(60):
            self.failed.append("records without an answer")

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self.failed.append(str(error))
        else:
            self.acknowledged.add(int(message.value()))

    def _consume(self) -> None:
        while not self._stop.is_set():
            for message in self._consumer.consume(500, 0.2):
                if message.error() is None:
                    self.seen[int(message.value())] += 1
        self._consumer.commit(asynchronous=False)
        self._consumer.close()


def test_a_running_cluster_becomes_secure(cluster: ClusterProcesses, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "certificates")
    nodes = list(cluster.nodes.values())
    plain = {"bootstrap.servers": cluster.bootstrap_servers}
    admin = AdminClient(plain)
    create_topics(admin, NewTopic(TOPIC, PARTITIONS, 3))
    for node in nodes:  # they are used from the first roll on
        node.add_listener(SECURE)
        node.add_listener(SECURE_NODES)
    later = {node.node_id: (node.address_at(SECURE), node.address_at(SECURE_NODES)) for node in nodes}
    secure = {
        "bootstrap.servers": ",".join(clients for clients, _ in later.values()),
        "security.protocol": "SASL_SSL",
        "ssl.ca.location": str(authority.certificate),
        "sasl.mechanism": SCRAM,
        "sasl.username": "app",
        "sasl.password": "of-app",
    }
    first_roll = {
        "listener.security.protocol.map": (
            f"{CLIENTS}:PLAINTEXT,{NODES}:PLAINTEXT,{SECURE}:SASL_SSL,{SECURE_NODES}:SASL_SSL"
        ),
        "ssl.keystore.location": str(authority.issue("node", hosts=tuple(node.host for node in nodes))),
        "ssl.truststore.location": str(authority.certificate),
        "sasl.enabled.mechanisms": SCRAM,
        "sasl.mechanism.inter.broker.protocol": SCRAM,
        f"listener.name.{SECURE_NODES.lower()}.{SCRAM.lower()}.sasl.jaas.config": (
            f'{MODULE} required username="broker" password="of-broker";'
        ),
        "penstock.initial.scram.credentials": f"{SCRAM}=[name=app,password=of-app]",
        "penstock.inter.broker.listeners": SECURE_NODES,
    }
    voters = ",".join(f"{number}@{address}" for number, (_, address) in later.items())
    second_roll = {
        "inter.broker.listener.name": SECURE_NODES,
        "penstock.inter.broker.listeners": NODES,
        "controller.quorum.voters": voters,
    }

    def add_listeners(node: NodeProcess) -> None:
        node.settings |= first_roll

    def change_listener(node: NodeProcess) -> None:
        node.settings |= second_roll

    def remove_listeners(node: NodeProcess) -> None:
        node.remove_listener(CLIENTS)
        node.remove_listener(NODES)
        node.settings["listener.security.protocol.map"] = f"{SECURE}:SASL_SSL,{SECURE_NODES}:SASL_SSL"
        del node.settings["penstock.inter.broker.listeners"]

    with Clients(plain, 0) as before:
        for node in nodes:
            roll(node, add_listeners, before, admin)
        roll(nodes[0], change_listener, before, admin)
    admin = AdminClient(secure)
    with Clients(secure, before.next) as after:
        for node in nodes[1:]:
            roll(node, change_listener, after, admin)
        for node in nodes:
            roll(node, remove_listeners, after, admin)
        eventually(lambda: set(after.seen) | set(before.seen) >= after.acknowledged, what="all were consumed")
    assert before.failed == after.failed == []
    acknowledged = before.acknowledged | after.acknowledged
    assert acknowledged == set(range(after.next))
    assert stored(secure) == Counter(acknowledged), "each record is there once"
    assert acknowledged - set(before.seen) - set(after.seen) <= set(range(before.next, after.next))
    for node in nodes:
        written = "".join(node.output)
        assert "of-broker" not in written
        assert "of-app" not in written


def roll(
    node: NodeProcess, change: Callable[[NodeProcess], None], clients: Clients, admin: AdminClient
) -> None:
    assert node.stop() == 0, f"node {node.node_id} did not stop cleanly"
    change(node)
    node.start()
    eventually(lambda: all_in_sync(admin), what=f"all in sync after node {node.node_id}")
    produced, consumed = len(clients.acknowledged), len(clients.seen)
    eventually(lambda: len(clients.acknowledged) > produced, what="more acknowledged writes")
    eventually(lambda: len(clients.seen) > consumed, what="more records consumed")


def all_in_sync(admin: AdminClient) -> bool:
    partitions = admin.list_topics(TOPIC, timeout=10).topics[TOPIC].partitions.values()
    return len(partitions) == PARTITIONS and all(
        len(each.isrs) == 3 and each.leader >= 0 for each in partitions
    )


def stored(settings: dict[str, Any]) -> Counter[int]:
    consumer = Consumer(
        settings | {"group.id": "none", "enable.partition.eof": True, "enable.auto.commit": False}
    )
    consumer.assign([TopicPartition(TOPIC, partition, 0) for partition in range(PARTITIONS)])
    found: Counter[int] = Counter()
    ended: set[int] = set()
    while len(ended) < PARTITIONS:
        for message in consumer.consume(1000, 1.0):
            if message.error() is None:
                found[int(message.value())] += 1
            else:
                assert message.error().code() == KafkaError._PARTITION_EOF, message.error()
                ended.add(message.partition())
    consumer.close()
    return found
