"""Nodes that know each other by SCRAM form a new cluster, and find each other again when all of them were down."""

from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from tests.brokers import CLIENTS, NODES, ClusterProcesses
from tests.topics import create_topics
from tests.waiting import eventually

from penstock.client.admin.users import list_users
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.settings import ConnectionSettings

MODULE = "org.apache.kafka.common.security.scram.ScramLoginModule"
SCRAM = {
    "listener.security.protocol.map": f"{CLIENTS}:SASL_PLAINTEXT,{NODES}:SASL_PLAINTEXT",
    "sasl.enabled.mechanisms": "SCRAM-SHA-512",
    "sasl.mechanism.inter.broker.protocol": "SCRAM-SHA-512",
}
ONE_USER = {
    "listener.name.nodes.scram-sha-512.sasl.jaas.config": f'{MODULE} required username="broker" password="between";'
}


def login(address: str, user: str, password: str) -> dict[str, Any]:
    return {
        "bootstrap.servers": address,
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.username": user,
        "sasl.password": password,
    }


def create_topic(settings: dict[str, Any]) -> None:
    admin = AdminClient(settings)
    create_topics(admin, NewTopic("t", 3, 3))


def write(settings: dict[str, Any], count: int) -> None:
    producer = Producer(settings | {"acks": "all", "enable.idempotence": True})
    failures: list[object] = []
    for number in range(count):
        producer.produce("t", str(number), on_delivery=lambda error, _: failures.append(error))
    assert producer.flush(60) == 0
    assert failures == [None] * count


def users(settings: dict[str, Any]) -> set[str]:
    with Cluster(ConnectionSettings.parse(settings)) as client:
        return {user.name for user in list_users(client)}


def test_the_first_users_come_from_a_flag_and_from_the_login_of_the_nodes(tmp_path: Path) -> None:
    cluster = ClusterProcesses(tmp_path, settings=SCRAM | ONE_USER)
    password = tmp_path / "password"
    password.write_text("of-admin")
    first = cluster.nodes[1]
    first.flags = ("--bootstrap-user", "admin", "--bootstrap-password-file", str(password))
    admin = login(cluster.bootstrap_servers, "admin", "of-admin")
    try:
        cluster.start()
        create_topic(admin)
        write(admin, 100)
        assert users(admin) == {"admin", "broker"}
        # All nodes are down, so that none can say which users there are.
        cluster.kill()
        cluster.start()
        assert eventually(lambda: users(admin) == {"admin", "broker"})
        write(admin, 100)
    finally:
        cluster.kill()


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_the_first_users_come_from_settings(tmp_path: Path, mechanism: str) -> None:
    """Each node is a user of its own, so all nodes need the credentials of all before they can talk."""
    credentials = ";".join(
        f'{mechanism}=[name="{name}",password="of-{name}"]'
        for name in ("node-1", "node-2", "node-3", "admin")
    )
    cluster = ClusterProcesses(
        tmp_path,
        settings=SCRAM
        | {
            "sasl.enabled.mechanisms": mechanism,
            "sasl.mechanism.inter.broker.protocol": mechanism,
            "penstock.initial.scram.credentials": credentials,
            "penstock.node.principals": "User:node-1;User:node-2;User:node-3",
        },
    )
    for node in cluster.nodes.values():
        name = f"node-{node.node_id}"
        node.settings[f"listener.name.nodes.{mechanism.lower()}.sasl.jaas.config"] = (
            f'{MODULE} required username="{name}" password="of-{name}";'
        )
    admin = login(cluster.bootstrap_servers, "admin", "of-admin") | {"sasl.mechanism": mechanism}
    try:
        cluster.start()
        create_topic(admin)
        write(admin, 100)
        assert users(admin) == {"node-1", "node-2", "node-3", "admin"}
        for node in cluster.nodes.values():
            assert "of-node" not in "".join(node.output)
    finally:
        cluster.kill()
