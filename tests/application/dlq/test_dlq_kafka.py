"""`penstock dlq` on Apache Kafka, if its jars are available."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.application.dlq.campaign import Campaign
from tests.application.dlq.dead_letters import Office, letter
from tests.application.dlq.killed import Executioner
from tests.compat import apache_kafka
from tests.compat.apache_kafka import ApacheKafka

from penstock.cli import main

pytestmark = [
    *apache_kafka.NEEDED,
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Office]:
    server = ApacheKafka(tmp_path_factory.mktemp("kafka"), ["PLAINTEXT"], {}).start()
    yield Office(server.address("PLAINTEXT"))
    server.stop()


def test_looked_at_corrected_replayed_and_purged(kafka: Office, capfd: pytest.CaptureFixture[str]) -> None:
    orders = kafka.create("orders", 2)
    dead = kafka.create_dead(orders, 2)
    kafka.fill(dead, [letter(orders, number, partition=1) for number in range(5)])
    there = ["--bootstrap", kafka.bootstrap]
    assert main(["dlq", "list", *there]) == 0
    assert main(["dlq", "edit", dead, "0:2", "--value", "20", *there]) == 0
    assert main(["dlq", "purge", dead, "--key", "k4", "--yes", *there]) == 0
    for _ in range(2):
        assert main(["dlq", "replay", dead, *there]) == 0
    assert kafka.numbers(orders) == [0, 1, 3, 20]
    assert main(["dlq", "purge", dead, "--yes", *there]) == 0
    assert kafka.read(dead) == []
    assert "4 dead letters of orders.dlq replayed" in capfd.readouterr().err


def test_killed_and_run_again(kafka: Office, tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log, Executioner(log) as executioner:
        points = ["begun:1", "acknowledged:2", "before the end:2", "after the end:1"]
        Campaign(kafka, executioner, seed=1).run_scripted(points)
