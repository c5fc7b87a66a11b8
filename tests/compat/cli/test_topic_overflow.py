"""`penstock topic describe` shows the overflow policy of a topic, its bounds, and what was dropped."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import Producer
from tests.brokers import BrokerProcess


@pytest.fixture(scope="module")
def broker(broker_with: Callable[..., BrokerProcess]) -> BrokerProcess:
    return broker_with({})


def test_drops_are_described_and_survive_a_restart(broker: BrokerProcess, penstock: Any, answer: Any) -> None:
    settings = {"penstock.overflow": "drop-newest", "penstock.overflow.records": "3"}
    penstock(
        "topic", "create", "few", *(part for pair in settings.items() for part in ("-c", "=".join(pair)))
    )
    penstock("topic", "create", "plain")
    assert re.search(r"^dropped +0$", penstock("topic", "describe", "few")[0], re.MULTILINE)
    said = [penstock("produce", "few", "a", "b")[1] for _ in range(2)]
    assert said[0] == "2 records to few (partition 0 offset 0-1)\n"
    assert said[1].startswith("2 records to few; the topic dropped some of them")
    assert "some of them" not in penstock("produce", "few", "a", "--acks", "0")[1]
    penstock("topic", "delete", "few", "--yes")
    penstock(
        "topic", "create", "few", *(part for pair in settings.items() for part in ("-c", "=".join(pair)))
    )
    producer = Producer(
        {"bootstrap.servers": broker.bootstrap_servers, "linger.ms": 0, "batch.num.messages": 1}
    )
    for _ in range(10):
        producer.produce("few", b"x", partition=0)
    assert producer.flush(60) == 0
    dropped = {
        "records": 7,
        "by": [{"policy": "drop-newest", "reason": "records", "records": 7}],
        "unknown_of_nodes": [],
    }
    for _ in range(2):
        (shown,) = answer("topic", "describe", "few")
        assert shown["settings"] == settings
        assert shown["dropped"] == dropped
        assert "7 by drop-newest (records)" in penstock("topic", "describe", "few")[0]
        broker.stop()
        broker.start()
    assert answer("topic", "describe", "plain")[0]["dropped"]["records"] == 0
    assert "dropped" not in penstock("topic", "describe", "plain")[0]
