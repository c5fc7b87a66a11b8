"""Kafka's own tools and the Java clients, over SASL_SSL with SCRAM.

kafka-configs, kafka-acls and kafka-delegation-tokens; the Java producer and consumer in the console tools.
"""

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.brokers import external_bootstrap
from tests.compat.apache_kafka import NEEDED, has_tools, java_command
from tests.compat.secure_node import SCRAM_MODULE, SecureNode

from penstock.client.admin.acls import create_acls, list_acls
from penstock.client.admin.quotas import describe_quotas
from penstock.client.admin.users import list_users, set_password
from penstock.client.errors import AuthenticationFailed
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.settings import ConnectionSettings
from penstock.client.wire.topics import NewTopic, create_topics
from penstock.protocol.acls import (
    AclBinding,
    AclFilter,
    Operation,
    PatternType,
    Permission,
    ResourceType,
)

pytestmark = [
    *NEEDED,
    pytest.mark.skipif(not has_tools(), reason="needs the jar of Kafka's tools: make test-kafka fetches it"),
]
TIMEOUT_S = 180
#: kafka-configs splits its argument at commas, also inside a password.
ALICE = "password-of-alice"
TOOLS = {
    "kafka-configs": "kafka.admin.ConfigCommand",
    "kafka-acls": "org.apache.kafka.tools.AclCommand",
    "kafka-delegation-tokens": "org.apache.kafka.tools.DelegationTokenCommand",
    "kafka-topics": "org.apache.kafka.tools.TopicCommand",
    "kafka-console-producer": "org.apache.kafka.tools.ConsoleProducer",
    "kafka-console-consumer": "org.apache.kafka.tools.consumer.ConsoleConsumer",
}

Run = Callable[..., str]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureNode]:
    if external_bootstrap():
        pytest.skip("needs a broker with settings of its own; PENSTOCK_TEST_BOOTSTRAP names another")
    settings = {"delegation.token.secret.key": "shared by all nodes"}
    node = SecureNode(tmp_path_factory.mktemp("secure"), settings=settings)
    node.start()
    yield node
    assert node.stop() == 0


@pytest.fixture
def tool(node: SecureNode, tmp_path: Path) -> Run:
    """`tool("kafka-acls", "--list", login=...)` returns what it prints; it fails if the tool does."""

    def run(
        name: str, *words: str, login: dict[str, str] | None = None, lines: str = "", code: int = 0
    ) -> str:
        properties = tmp_path / "client.properties"
        properties.write_text(
            "".join(f"{key}={value}\n" for key, value in (login or node.java("admin")).items())
        )
        connection = ("--bootstrap-server", node.bootstrap_servers, "--command-config", str(properties))
        command = java_command(TOOLS[name], *connection, *words)
        done = subprocess.run(
            command, input=lines, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


@pytest.fixture
def admin(node: SecureNode) -> Iterator[Cluster]:
    with Cluster(ConnectionSettings.parse(node.librdkafka("admin"))) as cluster:
        yield cluster


def test_configs_makes_users_and_quotas(tool: Run, admin: Cluster, node: SecureNode) -> None:
    credential = f"SCRAM-SHA-512=[iterations=8192,password={ALICE}]"
    alice = ("--entity-type", "users", "--entity-name", "alice")
    tool("kafka-configs", "--alter", *alice, "--add-config", credential)
    (user,) = list_users(admin, ["alice"])
    assert user.iterations == {"SCRAM-SHA-512": 8192}
    tool("kafka-configs", "--alter", *alice, "--add-config", "producer_byte_rate=1000000")
    assert describe_quotas(admin, {"user": "alice"})[0].limits == {"producer_byte_rate": 1e6}
    described = tool("kafka-configs", "--describe", *alice)
    assert "producer_byte_rate=1000000" in described
    assert "SCRAM-SHA-512=iterations=8192" in described
    # alice can log in, and may not do what admin may.
    login = node.java("alice") | {
        "sasl.jaas.config": f'{SCRAM_MODULE} required username="alice" password="{ALICE}";'
    }
    refused = tool("kafka-configs", "--describe", *alice, login=login, code=1)
    assert "ClusterAuthorizationException" in refused


def test_acls_adds_lists_and_removes_rules(tool: Run, admin: Cluster) -> None:
    rule = ("--allow-principal", "User:tom", "--consumer", "--topic", "tools", "--group", "tools-")
    tool("kafka-acls", "--add", *rule, "--resource-pattern-type", "prefixed")
    about_tom = AclFilter(principal="User:tom")
    assert {(acl.resource_name, Operation(acl.operation)) for acl in list_acls(admin, about_tom)} == {
        ("tools", Operation.READ),
        ("tools", Operation.DESCRIBE),
        ("tools-", Operation.READ),
    }
    listed = tool("kafka-acls", "--list", "--principal", "User:tom")
    assert "resourceType=TOPIC, name=tools, patternType=PREFIXED" in listed
    tool("kafka-acls", "--remove", "--force", *rule, "--resource-pattern-type", "prefixed")
    assert list_acls(admin, about_tom) == []


def test_delegation_tokens_are_made_used_renewed_and_expired(tool: Run, node: SecureNode) -> None:
    made = tool("kafka-delegation-tokens", "--create", "--max-life-time-period", "3600000")
    token_id, hmac = re.findall(r"^(\S{22})\s+(\S+=*)\s+User:admin", made, re.MULTILINE)[0]
    login = node.java("admin") | {
        "sasl.jaas.config": (
            f'{SCRAM_MODULE} required username="{token_id}" password="{hmac}" tokenauth="true";'
        )
    }
    tool("kafka-topics", "--create", "--topic", "with-a-token", login=login)
    assert token_id in tool("kafka-delegation-tokens", "--describe", "--owner-principal", "User:admin")
    refused = tool("kafka-delegation-tokens", "--describe", login=login, code=1)
    assert "Delegation Token requests are not allowed" in refused
    tool("kafka-delegation-tokens", "--renew", "--hmac", hmac, "--renew-time-period", "1800000")
    tool("kafka-delegation-tokens", "--expire", "--hmac", hmac, "--expiry-time-period", "-1")
    settings = node.librdkafka("admin") | {
        "sasl.username": token_id,
        "sasl.password": hmac,
        "penstock.sasl.tokenauth": "true",
    }
    with pytest.raises(AuthenticationFailed), Cluster(ConnectionSettings.parse(settings)) as cluster:
        _ = cluster.cluster_id


def test_the_java_producer_and_consumer_do_what_the_rules_allow(
    tool: Run, admin: Cluster, node: SecureNode
) -> None:
    set_password(admin, "tom", ALICE)
    login = node.java("tom") | {
        "sasl.jaas.config": f'{SCRAM_MODULE} required username="tom" password="{ALICE}";'
    }
    create_topics(admin, [NewTopic(name=name, partitions=1) for name in ("java.orders", "others")])
    create_acls(
        admin,
        [
            AclBinding(kind, "java.", PatternType.PREFIXED, "User:tom", "*", Operation.ALL, Permission.ALLOW)
            for kind in (ResourceType.TOPIC, ResourceType.GROUP)
        ],
    )
    values = [f"order-{number}" for number in range(100)]
    idempotent = ("--command-property", "acks=all", "--command-property", "enable.idempotence=true")
    tool(
        "kafka-console-producer",
        *("--topic", "java.orders", *idempotent),
        login=login,
        lines="\n".join(values) + "\n",
    )

    def read(count: int, protocol: str) -> list[str]:
        which = ("--topic", "java.orders", "--group", "java.readers", "--from-beginning")
        bounds = ("--max-messages", str(count), "--command-property", f"group.protocol={protocol}")
        printed = tool("kafka-console-consumer", *which, *bounds, login=login)
        return [line for line in printed.splitlines() if line.startswith("order-")]

    # The consumer commits as it closes, and the next one of its group goes on from there, by either protocol.
    assert read(40, "classic") == values[:40]
    assert read(60, "consumer") == values[40:]
    refused = tool("kafka-console-producer", "--topic", "others", login=login, lines="x\n")
    assert "Not authorized to access topics: [others]" in refused
    wrong = login | {"sasl.jaas.config": login["sasl.jaas.config"].replace(ALICE, "guessed")}
    refused = tool("kafka-console-producer", "--topic", "java.orders", login=wrong, lines="x\n")
    assert "SaslAuthenticationException" in refused
    refused = tool("kafka-console-consumer", "--topic", "java.orders", "--group", "x", login=login)
    assert "GroupAuthorizationException" in refused
