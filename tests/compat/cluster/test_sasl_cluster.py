"""Three nodes that log in to each other, and clients that log in to each of them."""

from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from kio.schema.write_txn_markers.v1 import request as markers
from tests.brokers import ClusterProcesses
from tests.topics import create_topics
from tests.waiting import eventually

from penstock.client.admin.cluster import describe_quorum
from penstock.client.admin.tokens import DelegationToken, create_token, list_tokens, renew_token
from penstock.client.admin.users import list_users, set_password
from penstock.client.errors import AuthenticationFailed
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.connection import Connection
from penstock.client.wire.settings import ConnectionSettings
from penstock.protocol.errors import ErrorCode

MODULE = "org.apache.kafka.common.security.plain.PlainLoginModule"
NODE_LOGIN = (
    f'{MODULE} required username="node" password="between-nodes" user_node="between-nodes" user_mallory="pw";'
)


@pytest.fixture(scope="module")
def cluster(cluster_with: Callable[..., ClusterProcesses]) -> ClusterProcesses:
    return cluster_with(
        {
            "listener.security.protocol.map": "CLIENT:SASL_PLAINTEXT,NODES:SASL_PLAINTEXT",
            "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-512",
            "sasl.mechanism.inter.broker.protocol": "PLAIN",
            "listener.name.nodes.plain.sasl.jaas.config": NODE_LOGIN,
            "listener.name.client.plain.sasl.jaas.config": f'{MODULE} required user_admin="pw";',
            "penstock.sasl.secret": "of all nodes",
            "delegation.token.secret.key": "of all nodes too",
        }
    )


def login(address: str, mechanism: str, user: str, password: str) -> dict[str, Any]:
    return {
        "bootstrap.servers": address,
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": mechanism,
        "sasl.username": user,
        "sasl.password": password,
    }


def test_records_are_replicated_by_nodes_that_log_in(cluster: ClusterProcesses) -> None:
    settings = login(cluster.bootstrap_servers, "PLAIN", "admin", "pw")
    admin = AdminClient(settings)
    create_topics(admin, NewTopic("replicated", 3, 3))
    producer = Producer(settings | {"acks": "all"})
    failures: list[Any] = []
    for number in range(100):
        producer.produce("replicated", str(number), on_delivery=lambda error, _: failures.append(error))
    assert producer.flush(60) == 0
    assert failures == [None] * 100


def test_a_user_of_the_inter_broker_listener_is_no_node(cluster: ClusterProcesses) -> None:
    marker = markers.WritableTxnMarker(
        producer_id=1,
        producer_epoch=0,
        transaction_result=True,
        topics=(markers.WritableTxnMarkerTopic(name="replicated", partition_indexes=(0,)),),
        coordinator_epoch=0,
    )
    request = markers.WriteTxnMarkersRequest(markers=(marker,))
    for node in cluster.nodes.values():
        for user, password, is_node in (("mallory", "pw", False), ("node", "between-nodes", True)):
            settings = ConnectionSettings.parse(login(node.peer_address, "PLAIN", user, password))
            with Connection(settings.bootstrap[0], settings) as connection:
                (answer,) = connection.call(request).markers
            refused = answer.topics[0].partitions[0].error_code is ErrorCode.cluster_authorization_failed
            assert refused != is_node


def test_a_user_can_log_in_to_every_node(cluster: ClusterProcesses) -> None:
    """Whichever node is asked, the controller decides, and all nodes know the user."""
    for node in cluster.nodes.values():
        name = f"user-{node.node_id}"
        admin = ConnectionSettings.parse(login(node.bootstrap_servers, "PLAIN", "admin", "pw"))
        with Cluster(admin) as client:
            set_password(client, name, "secret")
            assert [user.name for user in list_users(client, [name])] == [name]
        for other in cluster.nodes.values():
            settings = ConnectionSettings.parse(
                login(other.bootstrap_servers, "SCRAM-SHA-512", name, "secret")
            )
            with eventually(lambda settings=settings: _connected(settings)):  # type: ignore[misc]
                pass


def test_a_token_is_good_at_every_node_and_outlives_the_controller(cluster: ClusterProcesses) -> None:
    """Whichever node is asked, the controller decides; and the next controller knows the tokens."""
    admin = ConnectionSettings.parse(login(cluster.bootstrap_servers, "PLAIN", "admin", "pw"))
    with Cluster(admin) as client:
        tokens = [_token_from(node.bootstrap_servers) for node in cluster.nodes.values()]
        controller = client.call_any(describe_quorum).leader
    cluster.nodes[controller].kill()
    try:
        others = [node for node in cluster.nodes.values() if node.node_id != controller]
        for node in others:
            for token in tokens:
                settings = ConnectionSettings.parse(
                    login(node.bootstrap_servers, "SCRAM-SHA-512", token.token_id, token.hmac)
                    | {"penstock.sasl.tokenauth": "true"}
                )
                with eventually(lambda settings=settings: _connected(settings)):  # type: ignore[misc]
                    pass
        left = login(",".join(node.bootstrap_servers for node in others), "PLAIN", "admin", "pw")
        with Cluster(ConnectionSettings.parse(left)) as client:
            assert {token.token_id for token in list_tokens(client)} >= {token.token_id for token in tokens}
            for token in tokens:
                assert renew_token(client, token.hmac, 3_600_000) < token.expires_ms
    finally:
        cluster.nodes[controller].launch()
        cluster.nodes[controller].await_ready()


def _token_from(address: str) -> DelegationToken:
    with Cluster(ConnectionSettings.parse(login(address, "PLAIN", "admin", "pw"))) as client:
        return create_token(client)


def _connected(settings: ConnectionSettings) -> Connection | None:
    try:
        return Connection(settings.bootstrap[0], settings)
    except AuthenticationFailed:
        return None  # the node has not applied the record yet
