"""Overflow policies in a cluster: the counts of all leaders together, and followers that move their log start too."""

from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from tests.brokers import ClusterProcesses, NodeProcess
from tests.topics import create_topics
from tests.waiting import eventually

from penstock.client.admin.topic_drops import topic_drops
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.settings import ConnectionSettings

BOUND = 100_000
VALUE = bytes(500)


@pytest.fixture(scope="module")
def cluster(cluster_with: Callable[..., ClusterProcesses]) -> ClusterProcesses:
    return cluster_with()


def send(producer: Producer, topic: str, count: int) -> None:
    errors: list[object] = []
    for _ in range(count):
        producer.produce(
            topic, VALUE, partition=0, on_delivery=lambda error, _: error and errors.append(error)
        )
    assert (producer.flush(60), errors) == (0, [])


def watermarks(cluster: ClusterProcesses, topic: str) -> tuple[int, int]:
    reader = Consumer({"bootstrap.servers": cluster.bootstrap_servers, "group.id": "w", "log_level": 0})
    try:
        first, end = reader.get_watermark_offsets(TopicPartition(topic, 0), 30)
        return first, end
    finally:
        reader.close()


def log_bytes(node: NodeProcess, topic: str) -> int:
    folder: Path = node.data_dir / f"{topic}-0"
    return sum(path.stat().st_size for path in folder.glob("*.log"))


@pytest.mark.parametrize("policy", ["drop-newest", "drop-oldest"])
def test_produced_is_kept_plus_dropped_although_the_leader_changes(
    cluster: ClusterProcesses, policy: str
) -> None:
    topic = policy
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0})
    settings = {
        "penstock.overflow": policy,
        "penstock.overflow.bytes": str(BOUND),
        "min.insync.replicas": "2",
    }
    new = NewTopic(topic, 1, replica_assignment=[[1, 2, 3]], config=settings)
    create_topics(admin, new)
    producer = Producer(
        {
            "bootstrap.servers": cluster.bootstrap_servers,
            "enable.idempotence": True,
            "batch.num.messages": 20,
            "log_level": 0,
        }
    )
    client = Cluster(ConnectionSettings.parse({"bootstrap.servers": cluster.bootstrap_servers}))

    def balanced(count: int) -> bool:
        first, end = watermarks(cluster, topic)
        drops = topic_drops(client, topic)
        return not drops.silent_nodes and end - first + drops.counts.total() == count

    with client:
        send(producer, topic, 1000)
        eventually(lambda: balanced(1000))
        send(producer, topic, 1)  # followers that have it have the log start that came with it
        cluster.nodes[1].stop()
        send(producer, topic, 1000)
        cluster.nodes[1].start()
        eventually(lambda: balanced(2001), what="what two leaders have dropped")
        counts = topic_drops(client, topic).counts
    assert {*counts} == {(policy, "bytes")}
    first, end = watermarks(cluster, topic)
    assert 0 < end - first < 250
    assert (first == 0) is (policy == "drop-newest")
    for node in cluster.nodes.values():
        eventually(lambda node=node: log_bytes(node, topic) <= BOUND, what="followers delete too")
