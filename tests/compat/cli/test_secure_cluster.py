"""`penstock cluster start --secure`: three commands to a cluster with TLS, users and access rules."""

import json
import os
import stat
import subprocess
from pathlib import Path

import pytest
from confluent_kafka import Producer
from tests.brokers import environment, executable
from tests.compat.cli.test_cluster_cli import TIMEOUT_S, Starting, cluster
from tests.waiting import eventually

from penstock.client import read_properties
from penstock.client.errors import Unavailable
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.settings import ConnectionSettings, librdkafka_names


@pytest.fixture(autouse=True)
def _own_contexts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def penstock(*words: str, code: int = 0, given: str = "", **variables: str) -> str:
    done = subprocess.run(
        [*executable(), *words],
        input=given,
        capture_output=True,
        text=True,
        env={**environment(), **variables},
        timeout=TIMEOUT_S,
    )
    assert done.returncode == code, (words, done.stdout, done.stderr)
    return done.stdout + done.stderr


def await_secure(starting: Starting) -> None:
    eventually(
        lambda: "client.properties" in starting.text or starting.process.poll() is not None,
        within_s=TIMEOUT_S,
    )
    assert starting.process.poll() is None, starting.text


def secrets_of(security: Path) -> list[str]:
    keys = [
        path.read_text().splitlines()[1] for path in security.glob("*.pem") if "PRIVATE" in path.read_text()
    ]
    return [(security / "admin.password").read_text(), (security / "sasl.secret").read_text(), *keys]


def test_from_the_first_start_to_a_larger_cluster(tmp_path: Path) -> None:
    folder, planted = tmp_path / "trial", "planted-of-all-nodes"
    security = folder / "security"
    words = ("--secure", "--port", "0", "--set", f"delegation.token.secret.key={planted}")
    with cluster(folder, *words) as first:
        await_secure(first)
        assert "export PENSTOCK_CONTEXT=trial" in first.text
        status = json.loads(penstock("cluster", "status", "--json", PENSTOCK_CONTEXT="trial"))
        assert [row["state"] for row in status["brokers"]] == ["active"] * 3
        penstock("topic", "create", "orders", "-p", "6", "--context", "trial")
        penstock("produce", "orders", "--context", "trial", given="hello\n")

        properties = read_properties(security / "client.properties")
        producer = Producer({**librdkafka_names(properties), "log_level": 0})
        producer.produce("orders", b"from librdkafka")
        assert producer.flush(60) == 0
        with (
            pytest.raises(Unavailable),
            Cluster(
                ConnectionSettings.parse(
                    {"bootstrap.servers": first.bootstrap, "default.api.timeout.ms": "2000"}
                )
            ) as plain,
        ):
            _ = plain.cluster_id

        commands = [Path(f"/proc/{node['pid']}/cmdline").read_bytes() for node in first.document["nodes"]]
        for secret in (*secrets_of(security), planted):
            assert not any(secret.encode() in command for command in commands)
            assert secret not in first.text
            assert not any(secret in path.read_text() for path in folder.glob("*.log"))
        penstock("cluster", "start", "--dir", str(folder), "--nodes", "4")  # grows while it runs
        assert len(json.loads(penstock("cluster", "status", "--json", "--context", "trial"))["brokers"]) == 4
        penstock("cluster", "stop", "--dir", str(folder))
        assert first.await_end() == 0, first.text
    assert stat.S_IMODE((folder / "cluster.json").stat().st_mode) == 0o600
    assert {stat.S_IMODE(path.stat().st_mode) for path in security.iterdir()} == {0o600}
    before = {path.name: path.read_bytes() for path in security.iterdir()}

    with cluster(folder) as second:  # it stays secure without being told
        await_secure(second)
        assert penstock("consume", "orders", "-n", "2", "--context", "trial").count("hello") == 1
        assert {path.name: path.read_bytes() for path in security.iterdir()} == before | {
            "client.properties": (security / "client.properties").read_bytes()
        }
        assert "node-4.pem" in before


def test_the_context_of_another_cluster_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "prod"
    penstock("context", "set", "prod", "-b", "prod.example.com:9093")
    with cluster(folder, "--secure", "--nodes", "1", "--port", "0") as starting:
        await_secure(starting)
        assert "prod is the context of another cluster" in starting.text
        assert f"export PENSTOCK_COMMAND_CONFIG={folder}/security/client.properties" in starting.text
        shown = json.loads(penstock("context", "show", "prod", "--json"))
        assert shown["settings"] == {"bootstrap.servers": "prod.example.com:9093"}
        variables = {"PENSTOCK_COMMAND_CONFIG": os.path.join(folder, "security", "client.properties")}
        penstock("cluster", "info", **variables)
