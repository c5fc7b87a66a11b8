"""Ten thousand access rules, from one file: applied, decided by, in a snapshot, after a restart, listed and removed."""

import json
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError, Producer
from tests import outcomes as delivery
from tests.brokers import environment, executable, external_bootstrap
from tests.compat.secure_node import PASSWORD, SecureNode
from tests.waiting import eventually

from penstock.client.admin.acls import list_acls
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.settings import ConnectionSettings
from penstock.client.wire.topics import NewTopic, create_topics
from penstock.protocol.acls import AclFilter

USERS, PREFIXES = 100, 25
ALLOWED = ("Read", "Write", "Describe", "AlterConfigs")
#: This prefix of each user is denied in place of allowed.
DENIED = 3
#: Users who log in, and the prefixes of theirs that have topics.
SHOWN, WITH_TOPICS = (7, 42, 99), (0, DENIED, 24)
RULES = USERS * PREFIXES * len(ALLOWED)
TIMEOUT_S = 300
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureNode]:
    if external_bootstrap():
        pytest.skip("needs a broker with settings of its own; PENSTOCK_TEST_BOOTSTRAP names another")
    settings = {"metadata.log.max.record.bytes.between.snapshots": "100000"}
    node = SecureNode(tmp_path_factory.mktemp("secure"), settings=settings)
    node.start()
    yield node
    assert node.stop() == 0


def declaration() -> str:
    """Each user may use its own prefixes; a broad rule would allow one of them, and a narrow one denies it."""
    lines = [f"[users.u{user}]\npassword_env = 'PASSWORD'" for user in SHOWN]
    for user in range(USERS):
        for prefix in range(PREFIXES):
            permission = "deny" if prefix == DENIED else "allow"
            lines.append(
                f'[[rules]]\n{permission} = "User:u{user}"\noperation = {json.dumps(ALLOWED)}\n'
                f'topic = "t{user}-{prefix}."\npattern = "prefixed"'
            )
    return "\n".join(lines) + "\n"


class Files:
    """The declaration and the settings of the admin, and the command with them."""

    def __init__(self, folder: Path, node: SecureNode) -> None:
        self.declared = folder / "access.toml"
        self._properties = folder / "client.properties"
        self._properties.write_text(
            "".join(f"{name}={value}\n" for name, value in node.librdkafka("admin").items())
        )

    def apply(self, *flags: str) -> dict[str, Any]:
        done = subprocess.run(
            [
                *(*executable(), "apply", "-f", str(self.declared)),
                *("--command-config", str(self._properties), "--json", *flags),
            ],
            capture_output=True,
            text=True,
            env={**environment(), "PASSWORD": PASSWORD},
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found


def topics_of(user: int) -> list[str]:
    return [f"t{user}-{prefix}.orders" for prefix in WITH_TOPICS]


def publish(settings: dict[str, Any], topics: list[str]) -> dict[str, KafkaError | None]:
    outcomes: dict[str, KafkaError | None] = {}
    producer = Producer({**settings, "log_level": 0})
    for name in topics:
        delivery.produce(producer, name, b"x", partial(outcomes.__setitem__, name))
    assert producer.flush(TIMEOUT_S) == 0
    return outcomes


def check_decisions(node: SecureNode) -> None:
    for user in SHOWN:
        settings = node.librdkafka(f"u{user}")
        with Cluster(ConnectionSettings.parse(settings)) as cluster:
            visible = set(cluster.topics())
        own = topics_of(user)
        denied = f"t{user}-{DENIED}.orders"
        assert visible == {*own} - {denied}
        wanted = [name for each in SHOWN for name in topics_of(each)]
        outcomes = publish(settings, wanted)
        assert {name for name, error in outcomes.items() if error is None} == visible
        refused = {error.code() for error in outcomes.values() if error is not None}
        assert refused == {KafkaError.TOPIC_AUTHORIZATION_FAILED}
        assert outcomes.keys() == {*wanted}


def test_ten_thousand_rules(node: SecureNode, tmp_path: Path) -> None:
    files = Files(tmp_path, node)
    files.declared.write_text(declaration())
    applied = files.apply("--yes")
    assert (applied["applied"], applied["error"]) == (RULES + len(SHOWN), None)
    with Cluster(ConnectionSettings.parse(node.librdkafka("admin"))) as cluster:
        create_topics(
            cluster, [NewTopic(name=name, partitions=1) for user in SHOWN for name in topics_of(user)]
        )
        listed = list_acls(cluster, AclFilter())
        assert len({*listed}) == len(listed) == RULES
        assert len(list_acls(cluster, AclFilter(principal="User:u42"))) == PREFIXES * len(ALLOWED)
    check_decisions(node)

    folder = node.data_dir / "__cluster_metadata-0"
    eventually(lambda: max(map(size, folder.glob("*.checkpoint")), default=0) > 10 * RULES, what="a snapshot")
    for restart in (node.restart, lambda: (node.kill(), node.start())):
        restart()
        check_decisions(node)
        assert files.apply("--check")["changes"] == []
        with Cluster(ConnectionSettings.parse(node.librdkafka("admin"))) as cluster:
            assert list_acls(cluster, AclFilter()) == listed

    files.declared.write_text("rules = []\n")
    assert files.apply("--prune", "--yes")["applied"] == RULES
    with Cluster(ConnectionSettings.parse(node.librdkafka("admin"))) as cluster:
        assert list_acls(cluster, AclFilter()) == []
    with Cluster(ConnectionSettings.parse(node.librdkafka("u42"))) as cluster:
        assert cluster.topics() == {}


def size(path: Path) -> int:
    return path.stat().st_size
