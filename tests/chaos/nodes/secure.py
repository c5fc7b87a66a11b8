"""`--secure`: TLS and SCRAM for clients and between nodes, access rules, and certificates that are replaced."""

import contextlib
import secrets
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.brokers import CLIENTS, NODES, ClusterProcesses, NodeProcess
from tests.certificates import Authority
from tests.chaos.view import ASK_TIMEOUT_S
from tests.compat.raw import RawConnection, schema
from tests.waiting import eventually

from penstock.client.admin.acls import create_acls
from penstock.client.admin.users import set_password
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.settings import ConnectionSettings
from penstock.protocol.acls import WILDCARD, AclBinding, Operation, PatternType, Permission, ResourceType

OBSERVER, CLIENT, NODE = "observer", "client", "node"
MECHANISM = "SCRAM-SHA-512"
#: Nodes look for changed files every few seconds.
RELOAD_S = 60.0
NODE_SETTINGS = {
    "listener.security.protocol.map": f"{CLIENTS}:SASL_SSL,{NODES}:SASL_SSL",
    "listener.name.client.sasl.enabled.mechanisms": f"PLAIN,{MECHANISM}",
    "listener.name.nodes.sasl.enabled.mechanisms": MECHANISM,
    "sasl.mechanism.inter.broker.protocol": MECHANISM,
    "authorizer.class.name": "StandardAuthorizer",
    "super.users": f"User:{NODE};User:{OBSERVER}",
}
PLAIN_MODULE = "org.apache.kafka.common.security.plain.PlainLoginModule"
SCRAM_MODULE = "org.apache.kafka.common.security.scram.ScramLoginModule"


class Security:
    """Secures a cluster before it starts, and its clients afterwards."""

    def __init__(self, folder: Path, cluster: ClusterProcesses) -> None:
        self._authority = Authority(folder / "certificates")
        self._cluster = cluster
        self._passwords = {name: secrets.token_urlsafe() for name in (OBSERVER, CLIENT, NODE)}
        self._own = threading.local()
        self._trusted = ssl.create_default_context(cafile=str(self._authority.certificate))
        jaas = f'{PLAIN_MODULE} required user_{OBSERVER}="{self._passwords[OBSERVER]}";'
        login = f'{SCRAM_MODULE} required username="{NODE}" password="{self._passwords[NODE]}";'
        for node in cluster.nodes.values():
            node.settings |= {
                **NODE_SETTINGS,
                f"listener.name.nodes.{MECHANISM.lower()}.sasl.jaas.config": login,
                "listener.name.client.plain.sasl.jaas.config": jaas,
                "ssl.keystore.location": str(self._issue(node)),
                "ssl.truststore.location": str(self._authority.certificate),
            }

    def prepare(self) -> None:
        """Create the user of the clients, who may do what rules allow and nothing else."""
        settings = {
            **self._connection("PLAIN", OBSERVER),
            "bootstrap.servers": self._cluster.direct_servers,
        }
        rules = [
            AclBinding(
                kind,
                WILDCARD,
                PatternType.LITERAL,
                f"User:{CLIENT}",
                WILDCARD,
                Operation.ALL,
                Permission.ALLOW,
            )
            for kind in (ResourceType.TOPIC, ResourceType.GROUP)
        ]
        with Cluster(ConnectionSettings.parse(settings)) as connected:
            set_password(connected, CLIENT, self._passwords[CLIENT], mechanisms=[MECHANISM])
            create_acls(connected, rules)

    def client_settings(self) -> dict[str, str]:
        """Settings of librdkafka, without addresses."""
        return self._connection(MECHANISM, CLIENT)

    def _connection(self, mechanism: str, user: str) -> dict[str, str]:
        return {
            "security.protocol": "SASL_SSL",
            "ssl.ca.location": str(self._authority.certificate),
            "sasl.mechanism": mechanism,
            "sasl.username": user,
            "sasl.password": self._passwords[user],
        }

    # -- certificates --------------------------------------------------------------------------------

    def replace_certificates(self) -> None:
        """Give every node another key and certificate. Raises AssertionError if one that runs does not use it."""
        for node in self._cluster.nodes.values():
            self._issue(node)
        for node in self._cluster.nodes.values():
            wanted = self._certificate_file(node).read_text().partition("-----BEGIN CERTIFICATE")[2]
            eventually(
                lambda node=node, wanted=wanted: wanted in self._shown_by(node),  # type: ignore[misc]
                within_s=RELOAD_S,
                what=f"the new certificate of node {node.node_id}",
            )

    def _issue(self, node: NodeProcess) -> Path:
        hosts = (node.host, node.direct_address[0])
        return self._authority.issue(f"node-{node.node_id}", hosts=tuple(dict.fromkeys(hosts)))

    def _certificate_file(self, node: NodeProcess) -> Path:
        return self._authority.folder / f"node-{node.node_id}.pem"

    def _shown_by(self, node: NodeProcess) -> str:
        try:
            with (
                socket.create_connection(node.direct_address, timeout=ASK_TIMEOUT_S) as plain,
                self._trusted.wrap_socket(plain, server_hostname=node.direct_address[0]) as secured,
            ):
                return ssl.DER_cert_to_PEM_cert(secured.getpeercert(binary_form=True) or b"")
        except OSError:
            return ""

    # -- observing -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def connected(self, address: tuple[str, int]) -> Iterator[RawConnection]:
        """Yield a connection that has logged in. Each thread keeps its own: logging in costs more than asking."""
        kept: dict[Any, Any] = self._own.__dict__.setdefault("kept", {})
        if address not in kept:
            kept[address] = self._log_in(address)
        secured, connection = kept[address]
        try:
            yield connection
        except BaseException:
            del kept[address]
            secured.close()
            raise

    def _log_in(self, address: tuple[str, int]) -> tuple[ssl.SSLSocket, RawConnection]:
        plain = socket.create_connection(address, timeout=ASK_TIMEOUT_S)
        try:
            secured = self._trusted.wrap_socket(plain, server_hostname=address[0])
            connection = RawConnection(secured)
            handshake = schema("sasl_handshake", 1, "SaslHandshakeRequest")(mechanism="PLAIN")
            message = f"\0{OBSERVER}\0{self._passwords[OBSERVER]}".encode()
            login = schema("sasl_authenticate", 2, "SaslAuthenticateRequest")(auth_bytes=message)
            for request in (handshake, login):
                assert connection.call(request).error_code.name == "none"
        except BaseException:
            plain.close()
            raise
        return secured, connection
