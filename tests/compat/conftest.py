"""Fixtures of the compatibility tests: topics on the shared broker, and clients that are closed afterwards."""

import contextlib
import io
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient
from kafka import KafkaAdminClient
from tests.compat.confluent import create_topic

from penstock.cli import main


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


@pytest.fixture
def penstock(
    bootstrap: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[str, str]]:
    """Runs the command against the shared broker; returns what it wrote to stdout and stderr.

    In this process, which spares each call the start of an interpreter; what needs a process has its own.
    """
    monkeypatch.setenv("PENSTOCK_BOOTSTRAP", bootstrap)

    def call(*words: str, given: str = "", code: int = 0) -> tuple[str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given.encode())))
        capfd.readouterr()
        assert main(words) == code, (words, capfd.readouterr())
        return capfd.readouterr()

    return call


@pytest.fixture
def answer(penstock: Any) -> Callable[..., Any]:
    """The same, for the JSON that scripts read."""
    return lambda *words, **options: json.loads(penstock(*words, "--json", **options)[0])
