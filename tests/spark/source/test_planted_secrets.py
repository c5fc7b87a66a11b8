"""No password, key or JAAS text in Spark's options is in a plan, an error, the UI, the event log or an argument."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.certificates import Authority
from tests.planted import PlantedSecrets, command_lines
from tests.spark.source import secrets_driver
from tests.waiting import eventually

from penstock.testing import EmbeddedBroker

MODULE = "org.apache.kafka.common.security.scram.ScramLoginModule"
TOPIC = "planted"
TIMEOUT_S = 600


@pytest.fixture(scope="module")
def broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(secure=True) as broker:
        broker.create_topic(TOPIC, 2)
        broker.create_topic(f"{TOPIC}-copy")
        yield broker


def test_spark_shows_none(broker: EmbeddedBroker, tmp_path: Path) -> None:
    planted = PlantedSecrets()
    password, key_password = planted.new("password"), planted.new("key_password")
    key = Authority(tmp_path / "certificates").issue("alice", password=key_password)
    planted.add_key("key", key)
    end = "-----END ENCRYPTED PRIVATE KEY-----\n"
    private, chain = key.read_text().split(end)
    broker.create_user("alice", password)
    broker.allow("alice", topic="*")
    login = {f"kafka.{name}": value for name, value in broker.client_settings("alice").items()}
    del login["kafka.sasl.username"], login["kafka.sasl.password"]
    options = login | {
        "kafka.sasl.jaas.config": f'{MODULE} required username="alice" password="{password}";',
        "kafka.ssl.key.pem": private + end,
        "kafka.ssl.certificate.pem": chain,
        "kafka.ssl.key.password": key_password,
    }
    wrong = login | {"kafka.sasl.username": "alice", "kafka.sasl.password": planted.new("wrong_password")}
    given = tmp_path / "given.json"
    given.write_text(json.dumps({"options": options, "wrong": wrong, "topic": TOPIC}))
    (tmp_path / "out").mkdir()
    log = tmp_path / "log"
    with log.open("w") as output:
        driver = subprocess.Popen(
            [sys.executable, "-m", secrets_driver.__name__, str(tmp_path / "out"), str(given)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=Path(__file__).parents[3],
        )
        try:
            eventually(
                lambda: secrets_driver.WAITING in log.read_text() or driver.poll() is not None,
                within_s=TIMEOUT_S,
            )
            planted.check(command_lines(), "the list of processes")
            driver.communicate(b"\n", timeout=TIMEOUT_S)
        finally:
            driver.kill()
    text = log.read_text()
    assert driver.returncode == 0, text[-5000:]
    for proof in ("rows: 3", "BatchScan", "failed as it should", "executions shown", "stopped"):
        assert proof in text
    planted.check(text, "the output of the driver")
    assert list((tmp_path / "out" / "events").iterdir())
    planted.check_files(tmp_path / "out")
