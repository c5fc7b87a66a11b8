"""`controller.listener.names`: controllers listen apart from brokers, with a protocol of their own."""

from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from tests.brokers import CLIENTS, NODES, ClusterProcesses, NodeProcess
from tests.certificates import Authority
from tests.topics import create_topics
from tests.waiting import eventually

CONTROLLER = "CONTROLLER"
BROKER_LOGIN = (
    "org.apache.kafka.common.security.plain.PlainLoginModule required "
    'username="node" password="secret" user_node="secret";'
)


@pytest.fixture
def cluster(tmp_path: Path) -> ClusterProcesses:
    """Controllers speak TLS with certificates, brokers among themselves SASL, and clients plaintext."""
    authority = Authority(tmp_path / "certificates")
    hosts = tuple(f"127.0.0.{100 + node}" for node in (1, 2, 3))
    nodes = ClusterProcesses(
        tmp_path,
        settings={
            "controller.listener.names": CONTROLLER,
            "listener.security.protocol.map": f"{CLIENTS}:PLAINTEXT,{NODES}:SASL_PLAINTEXT,{CONTROLLER}:SSL",
            "listener.name.nodes.sasl.enabled.mechanisms": "PLAIN",
            "sasl.mechanism.inter.broker.protocol": "PLAIN",
            "listener.name.nodes.plain.sasl.jaas.config": BROKER_LOGIN,
            "listener.name.controller.ssl.client.auth": "required",
            "listener.name.controller.ssl.keystore.location": str(authority.issue("node", hosts=hosts)),
            "listener.name.controller.ssl.truststore.location": str(authority.certificate),
        },
    )
    for node in nodes.nodes.values():
        node.add_listener(CONTROLLER)
    return nodes


def elect(cluster: ClusterProcesses, voters: list[int]) -> None:
    addresses = ",".join(f"{voter}@{cluster.nodes[voter].address_at(CONTROLLER)}" for voter in voters)
    for node in cluster.nodes.values():
        node.settings["controller.quorum.voters"] = addresses


def write(cluster: ClusterProcesses, node: int, count: int) -> None:
    settings = {"bootstrap.servers": cluster.nodes[node].bootstrap_servers, "acks": "all"}
    producer = Producer(settings | {"enable.idempotence": True, "log_level": 0})
    failures: list[object] = []
    for number in range(count):
        producer.produce("t", str(number), on_delivery=lambda error, _: failures.append(error))
    assert producer.flush(60) == 0
    assert failures == [None] * count


def test_nodes_that_are_both_use_either_listener_for_what_it_is_for(cluster: ClusterProcesses) -> None:
    elect(cluster, [1, 2, 3])
    try:
        cluster.start()
        admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0})
        create_topics(admin, NewTopic("t", 3, 3))
        write(cluster, 1, 50)
        for node_id in cluster.nodes:  # each election and each failover crosses both listeners
            cluster.nodes[node_id].kill()
            write(cluster, node_id % 3 + 1, 50)
            cluster.nodes[node_id].start()
        topic = eventually(lambda: _whole(admin))
        assert all(len(partition.isrs) == 3 for partition in topic.partitions.values())
    finally:
        cluster.kill()


def test_brokers_reach_a_controller_whose_listener_they_do_not_have(cluster: ClusterProcesses) -> None:
    elect(cluster, [1])
    controller, *brokers = cluster.nodes.values()
    controller.settings["process.roles"] = "controller"
    controller.remove_listener(CLIENTS)
    controller.remove_listener(NODES)
    for node in brokers:
        node.settings["process.roles"] = "broker"
        node.remove_listener(CONTROLLER)
    for node in cluster.nodes.values():
        node.settings |= {"offsets.topic.replication.factor": "2", "min.insync.replicas": "1"}
    try:
        cluster.start()
        create_topics(AdminClient({"bootstrap.servers": brokers[0].bootstrap_servers}), NewTopic("t", 3, 2))
        write(cluster, 2, 50)
        cluster.nodes[3].kill()
        write(cluster, 2, 50)
    finally:
        cluster.kill()


def test_the_listener_is_introduced_without_downtime(cluster: ClusterProcesses) -> None:
    """The three rolling restarts of operations.md."""
    own = {name: text for name, text in cluster.nodes[1].settings.items() if "name.controller." in name}
    for node in cluster.nodes.values():
        for name in ("controller.listener.names", *own):
            del node.settings[name]
        node.remove_listener(CONTROLLER)
        node.settings["controller.quorum.voters"] = ",".join(
            f"{each.node_id}@{each.peer_address}" for each in cluster.nodes.values()
        )
    try:
        cluster.start()
        admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0})
        create_topics(admin, NewTopic("t", 3, 3))

        def restart_each(prepare: Callable[[NodeProcess], None]) -> None:
            for node in cluster.nodes.values():
                assert node.stop() == 0
                prepare(node)
                write(cluster, node.node_id % 3 + 1, 20)
                node.start()
                eventually(lambda: _whole(admin))

        def add(node: NodeProcess) -> None:
            node.add_listener(CONTROLLER)
            node.settings |= own | {"penstock.inter.broker.listeners": CONTROLLER}

        def use(node: NodeProcess) -> None:
            addresses = (f"{each.node_id}@{each.address_at(CONTROLLER)}" for each in cluster.nodes.values())
            node.settings["controller.quorum.voters"] = ",".join(addresses)
            node.settings["controller.listener.names"] = CONTROLLER
            node.settings["penstock.inter.broker.listeners"] = NODES

        def finish(node: NodeProcess) -> None:
            del node.settings["penstock.inter.broker.listeners"]

        for step in (add, use, finish):
            restart_each(step)
    finally:
        cluster.kill()


def _whole(admin: AdminClient):
    topic = admin.list_topics("t", timeout=30).topics["t"]
    return topic if all(len(partition.isrs) == 3 for partition in topic.partitions.values()) else None
