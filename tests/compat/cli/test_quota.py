"""`penstock quota`, and what librdkafka sees of a quota that its application exceeds."""

from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from tests.brokers import BrokerProcess


@pytest.fixture(scope="module")
def broker(broker_with: Callable[..., BrokerProcess]) -> BrokerProcess:
    return broker_with({})  # a quota of all users must not slow the clients of other tests


@pytest.fixture(scope="module")
def admin(broker: BrokerProcess) -> AdminClient:
    return AdminClient({"bootstrap.servers": broker.bootstrap_servers, "log_level": 0})


def test_quotas_are_set_listed_and_removed(penstock: Any, answer: Any) -> None:
    said = penstock("quota", "set", "--user", "ann", "--produce", "20MB", "--requests", "12.5")[1]
    assert said == "quotas of user ann: producer_byte_rate 20,000,000, request_percentage 12.5\n"
    penstock("quota", "set", "--user", "default", "--client-id", "app", "--consume", "500KB/s")
    penstock("quota", "set", "--ip", "127.0.0.9", "--connections", "3")
    ann = {"entity": {"user": "ann"}, "limits": {"producer_byte_rate": 20e6, "request_percentage": 12.5}}
    assert ann in answer("quota", "list")
    assert answer("quota", "list", "--user", "ann") == [ann]
    assert len(answer("quota", "list")) == 3
    shown = penstock("quota", "list")[0]
    assert "20,000,000" in shown
    assert "default" in shown
    said = penstock("quota", "remove", "--user", "ann", "request_percentage")[1]
    assert said == "quotas of user ann removed: request_percentage\n"
    assert answer("quota", "list", "--user", "ann")[0]["limits"] == {"producer_byte_rate": 20e6}
    for entity in (("--user", "ann"), ("--user", "default", "--client-id", "app"), ("--ip", "127.0.0.9")):
        penstock("quota", "remove", *entity)
    assert answer("quota", "list") == []


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("set", "--produce", "1MB"), 2, "whose quota is it?"),
        (("set", "--user", "ann"), 2, "which limit?"),
        (("set", "--user", "ann", "--produce", "fast"), 2, "'fast' is no rate"),
        (("set", "--user", "ann", "--produce", "0"), 1, "must be greater than 0"),
        (
            ("set", "--user", "ann", "--connections", "1"),
            1,
            "Invalid configuration key connection_creation_rate",
        ),
        (("set", "--ip", "nowhere", "--connections", "1"), 1, "nowhere is not an IP address"),
        (("remove", "--user", "nobody"), 1, "it has no quotas"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_sentence(
    penstock: Any, words: tuple[str, ...], code: int, message: str
) -> None:
    assert message in penstock("quota", *words, code=code)[1]


def test_librdkafka_is_told_that_it_is_throttled(penstock: Any, bootstrap: str, topic: str) -> None:
    """And loses nothing."""
    throttled: list[float] = []
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "client.id": "greedy",
            "linger.ms": 0,
            "log_level": 0,
            "throttle_cb": lambda event: throttled.append(event.throttle_time),
        }
    )
    penstock("quota", "set", "--client-id", "greedy", "--produce", "100KB")
    errors: list[Any] = []
    for _ in range(12):
        producer.produce(topic, bytes(100_000), on_delivery=lambda error, _: errors.append(error))
        producer.flush(60)
    assert errors == [None] * 12
    assert producer.flush(60) == 0
    while not throttled:
        producer.poll(1)
    assert 0 < throttled[0] < 10
    penstock("quota", "remove", "--client-id", "greedy")
