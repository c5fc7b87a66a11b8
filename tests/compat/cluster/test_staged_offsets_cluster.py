"""Offsets in a transaction on three nodes: pending offsets survive the death of the group's coordinator."""

from collections.abc import Callable

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from kio.schema.find_coordinator.v4 import request as find
from kio.schema.offset_fetch.v9 import request as offset_fetch
from tests.brokers import ClusterProcesses, NodeProcess
from tests.compat import confluent
from tests.compat.raw_client import send_request
from tests.topics import create_topics
from tests.waiting import eventually

from penstock.protocol.errors import ErrorCode

SETTINGS = {"offsets.topic.num.partitions": "1", "transaction.state.log.num.partitions": "1"}
TIMEOUT_S = 60.0
UNSTABLE = (-1, ErrorCode.unstable_offset_commit)


@pytest.fixture(scope="module")
def cluster(cluster_with: Callable[..., ClusterProcesses]) -> ClusterProcesses:
    return cluster_with(SETTINGS)


def coordinator(cluster: ClusterProcesses, group: str) -> NodeProcess:
    """A running node that all running nodes take for it."""
    request = find.FindCoordinatorRequest(key_type=0, coordinator_keys=(group,))

    def known() -> NodeProcess | None:
        running = [node for node in cluster.nodes.values() if node.is_running]
        told = {send_request(node.direct_address, request).coordinators[0].node_id for node in running}
        return next((node for node in running if told == {node.node_id}), None)

    return eventually(known, what="one coordinator")


def committed(cluster: ClusterProcesses, group: str, topic: str) -> tuple[int, ErrorCode]:
    """As a consumer is told that starts now."""
    asked = offset_fetch.OffsetFetchRequestTopics(name=topic, partition_indexes=(0,))
    request = offset_fetch.OffsetFetchRequest(
        groups=(offset_fetch.OffsetFetchRequestGroup(group_id=group, topics=(asked,)),), require_stable=True
    )

    def answer() -> tuple[int, ErrorCode] | None:
        (found,) = send_request(coordinator(cluster, group).direct_address, request).groups
        if found.error_code is not ErrorCode.none:
            return None
        (partition,) = found.topics[0].partitions
        return partition.committed_offset, partition.error_code

    return eventually(answer, what="an answer")


def all_in_sync(admin: AdminClient) -> bool:
    topics = admin.list_topics(timeout=60).topics.values()
    return all(len(p.isrs) == len(p.replicas) == 3 for topic in topics for p in topic.partitions.values())


@pytest.mark.parametrize("commits", [True, False])
def test_the_next_coordinator_knows_what_is_staged(
    cluster: ClusterProcesses, unique: Callable[[str], str], commits: bool
) -> None:
    topic, group = unique("topic"), unique("group")
    servers = cluster.bootstrap_servers
    admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})
    create_topics(admin, NewTopic(topic, 1, 3))
    reader = Consumer({"bootstrap.servers": servers, "group.id": group, "log_level": 0})
    reader.commit(offsets=[TopicPartition(topic, 0, 1)], asynchronous=False)
    producer = confluent.producer(servers, transactional_id=unique("tx"))
    producer.init_transactions(TIMEOUT_S)
    producer.begin_transaction()
    producer.produce(topic, b"x")
    producer.send_offsets_to_transaction(
        [TopicPartition(topic, 0, 5)], reader.consumer_group_metadata(), TIMEOUT_S
    )
    assert committed(cluster, group, topic) == UNSTABLE
    eventually(lambda: all_in_sync(admin), what="everyone in sync")

    dead = coordinator(cluster, group)
    dead.kill()
    eventually(lambda: coordinator(cluster, group) is not dead)
    assert committed(cluster, group, topic) == UNSTABLE
    producer.commit_transaction(TIMEOUT_S) if commits else producer.abort_transaction(TIMEOUT_S)
    expected = (5 if commits else 1, ErrorCode.none)
    eventually(lambda: committed(cluster, group, topic) == expected)

    dead.start()
    eventually(lambda: all_in_sync(admin), what="everyone in sync")
    coordinator(cluster, group).kill()
    assert committed(cluster, group, topic) == expected
    for node in cluster.nodes.values():
        if not node.is_running:
            node.start()
    reader.close()
