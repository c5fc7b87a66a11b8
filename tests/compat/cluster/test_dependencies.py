"""What a node depends on: quorum, disk, peers, clock. For each, what goes on without it and what is refused.

docs/operations.md says which of them fails open and which fails closed; these tests are its witnesses. A full disk has
its own in tests/unit/broker/partition/test_disk_full.py.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from tests.brokers import BrokerProcess, ClusterProcesses
from tests.compat.cluster import failing_node
from tests.compat.raw_client import describe_cluster, describe_quorum, send_request, settings
from tests.topics import create_topics
from tests.waiting import eventually

from penstock.client.admin.cluster import QuorumInfo
from penstock.client.wire.cluster import Cluster
from penstock.protocol.schemas import schema_class

HOUR_S = 3600


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ClusterProcesses]:
    program = tmp_path / "penstock"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {failing_node.__file__} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PENSTOCK_TEST_EXECUTABLE", str(program))
    processes = ClusterProcesses(tmp_path)
    for node in processes.nodes.values():
        failing_node.failures_of(node.data_dir).mkdir()
    processes.start()
    eventually(lambda: len(seen_quorum(processes).voters) == len(processes.nodes), what="all nodes voting")
    yield processes
    processes.kill()


def seen_quorum(processes: ClusterProcesses) -> QuorumInfo:
    return describe_quorum(processes.nodes[1].direct_address, timeout_s=10)


@pytest.fixture
def admin(cluster: ClusterProcesses) -> AdminClient:
    client = AdminClient({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0})
    # One that hears of no broker at first does not ask again for minutes, and has no controller to send requests to.
    eventually(lambda: len(client.list_topics(timeout=60).brokers) == len(cluster.nodes), what="all brokers")
    return client


def create(admin: AdminClient, name: str, replicas: list[int]) -> None:
    create_topics(admin, NewTopic(name, 1, replica_assignment=[replicas]))


def publish(bootstrap: str, topic: str, *values: str, timeout_s: float = 20) -> list[str]:
    """Returns what went wrong; empty when all were acknowledged by all in-sync replicas."""
    producer = Producer(
        {"bootstrap.servers": bootstrap, "log_level": 0, "message.timeout.ms": int(timeout_s * 1000)}
    )
    errors: list[str] = []
    for value in values:
        producer.produce(topic, value, on_delivery=lambda error, _: error and errors.append(error.name()))
    assert producer.flush(timeout_s + 10) == 0
    return errors


def read(bootstrap: str, topic: str, count: int) -> list[str]:
    # No commit when it closes, which would look for a coordinator for as long as there is none.
    consumer = Consumer(
        {"bootstrap.servers": bootstrap, "group.id": "none", "enable.auto.commit": False, "log_level": 0}
    )
    consumer.assign([TopicPartition(topic, 0, 0)])
    found: list[str] = []

    def arrived() -> bool:
        found.extend(m.value().decode() for m in consumer.consume(100, 0.2) if not m.error())
        return len(found) >= count

    eventually(arrived, what=f"{count} records")
    consumer.close()
    return found


def find_coordinator(node: BrokerProcess) -> str:
    request = schema_class("find_coordinator.v4.request:FindCoordinatorRequest")(
        key_type=0, coordinator_keys=("a group",)
    )
    (found,) = send_request(node.direct_address, request, timeout_s=10).coordinators
    return str(found.error_code.name)


def in_sync(node: BrokerProcess, topic: str) -> set[int]:
    """As this node knows it: librdkafka may ask a node that is suspended, and waits for it until it gives up."""
    with Cluster(settings(node.bootstrap_servers)) as cluster:
        return set(cluster.topics([topic])[topic].partitions[0].in_sync)


def leader(admin: AdminClient, topic: str) -> int:
    return int(admin.list_topics(topic, timeout=60).topics[topic].partitions[0].leader)


def controller(admin: AdminClient) -> int:
    return int(admin.describe_cluster().result().controller.id)


def test_without_a_quorum_leaders_go_on_and_changes_are_refused(
    cluster: ClusterProcesses, admin: AdminClient
) -> None:
    create(admin, "here", [3])
    create(admin, "there", [2, 3])
    last = cluster.nodes[3].bootstrap_servers
    assert publish(last, "here", "before") == []
    assert publish(last, "there", "before") == []
    cluster.nodes[1].kill()
    cluster.nodes[2].kill()

    # Open: the partitions that node 3 leads need no other node.
    assert publish(last, "here", "during") == []
    assert read(last, "here", 2) == ["before", "during"]
    # A request for a coordinator that cannot be created gets an error, and the next requests are not delayed.
    assert find_coordinator(cluster.nodes[3]) == "coordinator_not_available"
    # Closed: nothing is decided without a majority, neither a topic nor another leader.
    alone = AdminClient({"bootstrap.servers": last, "log_level": 0})
    [new] = alone.create_topics([NewTopic("new", 1, 1)], operation_timeout=5, request_timeout=15).values()
    with pytest.raises(KafkaException) as refused:
        new.result()
    assert refused.value.args[0].name() in {"REQUEST_TIMED_OUT", "NOT_CONTROLLER", "_TIMED_OUT"}
    assert publish(last, "there", "during", timeout_s=3) == ["_MSG_TIMED_OUT"]

    cluster.nodes[1].start()
    eventually(lambda: leader(alone, "there") == 3, what="node 3 leading once there is a quorum")
    cluster.nodes[2].start()  # two replicas are asked for
    assert publish(last, "there", "after") == []
    assert read(last, "there", 2)[0] == "before"


def test_without_a_peer_the_in_sync_set_shrinks_and_writes_go_on(
    cluster: ClusterProcesses, admin: AdminClient
) -> None:
    create(admin, "orders", [1, 2, 3])
    assert publish(cluster.bootstrap_servers, "orders", "before") == []
    led_by = leader(admin, "orders")
    follower = next(n for n in (3, 2, 1) if n not in {led_by, controller(admin)})
    awake = cluster.nodes[led_by]
    cluster.nodes[follower].freeze()
    assert publish(cluster.bootstrap_servers, "orders", "during") == []
    eventually(lambda: in_sync(awake, "orders") == {1, 2, 3} - {follower}, what="a smaller in-sync set")
    assert publish(cluster.bootstrap_servers, "orders", "during too") == []

    cluster.nodes[follower].thaw()
    eventually(lambda: in_sync(awake, "orders") == {1, 2, 3}, what="the follower back in sync")


def test_below_min_insync_replicas_writes_are_refused_and_reads_go_on(
    cluster: ClusterProcesses, admin: AdminClient
) -> None:
    first = controller(admin)
    other = next(n for n in cluster.nodes if n != first)
    create(admin, "orders", [first, other])
    assert publish(cluster.bootstrap_servers, "orders", "before") == []
    cluster.nodes[other].kill()
    eventually(lambda: in_sync(cluster.nodes[first], "orders") == {first}, what="a smaller in-sync set")
    assert publish(cluster.bootstrap_servers, "orders", "during", timeout_s=3) == ["_MSG_TIMED_OUT"]
    assert read(cluster.bootstrap_servers, "orders", 1) == ["before"]


def test_a_disk_that_fails_to_sync_ends_the_node_and_another_leads(
    cluster: ClusterProcesses, admin: AdminClient
) -> None:
    create(admin, "orders", [1, 2, 3])
    assert publish(cluster.bootstrap_servers, "orders", "before") == []
    broken_node = cluster.nodes[leader(admin, "orders")]
    (failing_node.failures_of(broken_node.data_dir) / "sync").touch()
    # The write that meets the failing disk is acknowledged by another leader, never on the strength of a failed sync.
    assert publish(cluster.bootstrap_servers, "orders", "during") == []

    def has_ended() -> bool:
        """Leadership may have moved since it was looked up; a follower meets its disk with the next write."""
        assert publish(cluster.bootstrap_servers, "orders", "more") == []
        return broken_node.exit_code not in (None, 0)

    eventually(has_ended, what="the end of the node")
    eventually(lambda: leader(admin, "orders") not in (-1, broken_node.node_id), what="another leader")
    assert {"before", "during"} <= set(read(cluster.bootstrap_servers, "orders", 3))


@pytest.mark.parametrize("jump_s", [HOUR_S, -HOUR_S])
def test_a_clock_that_jumps_expires_no_member_and_loses_nothing(
    cluster: ClusterProcesses, admin: AdminClient, jump_s: int
) -> None:
    create(admin, "orders", [1, 2, 3])
    consumer = _member(cluster, "orders")
    assert publish(cluster.bootstrap_servers, "orders", "before") == []
    epochs = _leader_epochs(cluster)
    for node in cluster.nodes.values():
        (failing_node.failures_of(node.data_dir) / "clock").write_text(str(jump_s))
    assert publish(cluster.bootstrap_servers, "orders", "during") == []
    found = [message.value() for message in _poll(consumer, 2)]
    assert found == [b"before", b"during"]
    consumer.commit(asynchronous=False)  # refused if the group had thrown it out
    consumer.close()
    assert in_sync(cluster.nodes[1], "orders") == {1, 2, 3}
    assert _leader_epochs(cluster) == epochs, "somebody was fenced or the controller has changed"


def _member(cluster: ClusterProcesses, topic: str) -> Consumer:
    member_settings = {
        "group.id": "billing",
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
        "log_level": 0,
    }
    consumer = Consumer({"bootstrap.servers": cluster.bootstrap_servers, **member_settings})
    consumer.subscribe([topic])
    eventually(lambda: consumer.poll(0.1) is None and consumer.assignment(), what="an assignment")
    return consumer


def _poll(consumer: Consumer, count: int) -> list[object]:
    found: list[object] = []

    def arrived() -> bool:
        message = consumer.poll(0.2)
        if message is not None and not message.error():
            found.append(message)
        return len(found) >= count

    eventually(arrived, what=f"{count} records")
    return found


def _leader_epochs(cluster: ClusterProcesses) -> tuple[int, frozenset[int]]:
    """The epoch of the quorum, and who is fenced."""
    fenced = frozenset(
        broker.id for broker in describe_cluster(cluster.nodes[1].direct_address).brokers if broker.fenced
    )
    return seen_quorum(cluster).epoch, fenced
