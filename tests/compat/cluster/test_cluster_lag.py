"""Lag in the metrics of a cluster, for every partition that a group has read."""

from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from tests.brokers import ClusterProcesses, external_bootstrap
from tests.chaos.metrics import samples
from tests.ports import free_address
from tests.topics import create_topics
from tests.waiting import eventually

PARTITIONS = 6


@pytest.mark.skipif(external_bootstrap() is not None, reason="needs a cluster of its own")
def test_the_coordinator_knows_the_lag_of_partitions_without_a_replica_on_its_node(tmp_path: Path) -> None:
    cluster = ClusterProcesses(tmp_path)
    addresses = {n: free_address(f"127.0.0.{100 + n}") for n in cluster.nodes}
    for n, (host, port) in addresses.items():
        cluster.nodes[n].settings |= {"penstock.http.listen": f"{host}:{port}"}
    try:
        servers = cluster.start().bootstrap_servers
        admin = AdminClient({"bootstrap.servers": servers})
        create_topics(admin, NewTopic("orders", PARTITIONS, 1))
        producer = Producer({"bootstrap.servers": servers})
        for number in range(PARTITIONS * 5):
            producer.produce("orders", b"", partition=number % PARTITIONS)
        assert producer.flush(30) == 0
        reader = Consumer({"bootstrap.servers": servers, "group.id": "billing"})
        reader.commit(
            offsets=[TopicPartition("orders", number, 2) for number in range(PARTITIONS)], asynchronous=False
        )
        reader.close()

        def lags() -> dict[int, float]:
            """As the one node tells them that coordinates the group."""
            return {
                int(labels["partition"]): value
                for address in addresses.values()
                for labels, value in samples(address, "penstock_group_lag_messages")
                if labels["group"] == "billing"
            }

        eventually(lambda: lags() == dict.fromkeys(range(PARTITIONS), 3.0), what="the lag of all partitions")
    finally:
        cluster.kill()
