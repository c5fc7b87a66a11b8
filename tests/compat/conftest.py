"""Fixtures of the compatibility tests: topics on the shared broker, and clients that are closed afterwards."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient
from kafka import KafkaAdminClient
from tests.compat.confluent import create_topic


@pytest.fixture(scope="session")
def admin(broker: Any) -> AdminClient:
    """Quiet, because it outlives the broker at the end of the session."""
    return AdminClient({"bootstrap.servers": broker.bootstrap_servers, "log_level": 0})


@pytest.fixture
def new_topic(admin: AdminClient, unique: Callable[[str], str]) -> Callable[..., str]:
    """`new_topic(partitions=3, **{"cleanup.policy": "compact"})` creates a topic and returns its name."""

    def create(partitions: int = 1, **settings: str) -> str:
        return create_topic(admin, unique("topic"), partitions, settings)

    return create


@pytest.fixture
def topic(new_topic: Callable[..., str]) -> str:
    """A topic with one partition and default settings."""
    return new_topic()


@pytest.fixture
def closing() -> Iterator[contextlib.ExitStack]:
    """`closing.callback(client.close)`: what a test opens is closed even when it fails."""
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def python_admin(bootstrap: str, closing: contextlib.ExitStack) -> KafkaAdminClient:
    client = KafkaAdminClient(bootstrap_servers=bootstrap)
    closing.callback(client.close)
    return client
