"""Three nodes that know each other by certificates or passwords: they survive kills, and let nobody else in."""

import socket
import ssl
import struct
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient, NewTopic
from tests.brokers import CLIENTS, NODES, ClusterProcesses
from tests.certificates import Authority
from tests.topics import create_topics
from tests.waiting import eventually

TOPIC = "replicated"


JAAS = (
    "org.apache.kafka.common.security.plain.PlainLoginModule required "
    'username="node" password="planted-secret" user_node="planted-secret";'
)
CERTIFICATES = {
    "listener.security.protocol.map": f"{CLIENTS}:SSL,{NODES}:SSL",
    "listener.name.nodes.ssl.client.auth": "required",
}
PASSWORDS = {
    "listener.security.protocol.map": f"{CLIENTS}:SSL,{NODES}:SASL_SSL",
    "listener.name.nodes.sasl.enabled.mechanisms": "PLAIN",
    "sasl.mechanism.inter.broker.protocol": "PLAIN",
    "listener.name.nodes.plain.sasl.jaas.config": JAAS,
    # Sessions end during the test, so nodes have to connect again.
    "listener.name.nodes.connections.max.reauth.ms": "2000",
}


@pytest.mark.parametrize("security", [CERTIFICATES, PASSWORDS], ids=["certificates", "passwords"])
def test_nodes_that_authenticate_survive_kills(tmp_path: Path, security: dict[str, str]) -> None:
    authority, stranger = Authority(tmp_path / "certificates"), Authority(tmp_path / "stranger")
    hosts = tuple(f"127.0.0.{100 + node}" for node in (1, 2, 3))
    cluster = ClusterProcesses(
        tmp_path,
        settings={
            **security,
            "ssl.keystore.location": str(authority.issue("node", hosts=hosts)),
            "ssl.truststore.location": str(authority.certificate),
        },
    )
    common = {
        "bootstrap.servers": cluster.bootstrap_servers,
        "security.protocol": "SSL",
        "ssl.ca.location": str(authority.certificate),
    }
    try:
        cluster.start()
        topic = NewTopic(TOPIC, 3, 3)
        admin = AdminClient(common)
        create_topics(admin, topic)
        acknowledged: list[bytes] = []

        def report(error: object, message) -> None:
            if error is None:
                acknowledged.append(message.value())

        producer = Producer({**common, "enable.idempotence": True})
        for number, node in enumerate(cluster.nodes.values()):
            for part in range(20):
                producer.produce(TOPIC, b"%d-%d" % (number, part), on_delivery=report)
            node.kill()
            assert producer.flush(120) == 0
            node.start()
        assert len(acknowledged) == 60
        read = _read_all(common, len(acknowledged))
        assert sorted(read) == sorted(acknowledged)
        address = cluster.nodes[1].direct_peer_address
        for certificate in (None, stranger.issue("node", hosts=hosts)):
            with pytest.raises(OSError):  # noqa: PT011 - a TLS alert or a reset, as the timing has it
                _ask_for_metadata(address, authority, certificate)
        for node in cluster.nodes.values():
            assert node.log is not None
            log = node.log.read_text()
            assert "planted-secret" not in log
            if "this node was suspended" not in log:  # a node that got no CPU may come too late
                assert "session's end" not in log
    finally:
        cluster.kill()


def _read_all(common: dict[str, str], count: int) -> list[bytes]:
    consumer = Consumer({**common, "group.id": "g", "auto.offset.reset": "earliest"})
    consumer.subscribe([TOPIC])
    read: list[bytes] = []

    def has_all() -> bool:
        read.extend(message.value() for message in consumer.consume(100, 1) if message.error() is None)
        return len(read) >= count

    eventually(has_all)
    consumer.close()
    return read


def _ask_for_metadata(address: tuple[str, int], authority: Authority, certificate: Path | None) -> bytes:
    """Send a request with a certificate that is none of a node, and without a password."""
    context = ssl.create_default_context(cafile=str(authority.certificate))
    if certificate is not None:
        context.load_cert_chain(certificate)
    with (
        socket.create_connection(address, 30) as plain,
        context.wrap_socket(plain, server_hostname=address[0]) as secured,
    ):
        secured.sendall(struct.pack(">ihhih", 15, 3, 0, 7, 1) + b"c" + bytes(4))
        reply = secured.recv(4)
        if not reply:
            raise ConnectionError("closed")
        return reply
