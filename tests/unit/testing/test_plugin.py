"""The pytest plugin: installed with the package, cheap until used, and documented correctly."""

import doctest
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

USERS_CONFTEST = """
import pytest

@pytest.fixture(scope="session")
def penstock_settings():
    return {"num.partitions": 7}
"""

USERS_TESTS = """
from confluent_kafka.admin import AdminClient

def partitions(broker, topic):
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    while True:  # who asks for a topic that is not there is answered before it is created, as by Apache Kafka
        found = admin.list_topics(topic, timeout=20).topics[topic]
        if found.error is None:
            return len(found.partitions)

def test_settings_are_those_of_the_conftest(penstock):
    assert partitions(penstock, "made-by-asking") == 7

def test_each_test_has_a_broker_of_its_own(penstock, penstock_session):
    assert penstock.create_topic("orders") == "orders"
    assert penstock.bootstrap_servers != penstock_session.bootstrap_servers

def test_and_finds_it_empty(penstock):
    assert penstock.create_topic("orders") == "orders"

def test_the_shared_broker(penstock_session):
    penstock_session.create_topic("shared")

def test_is_shared(penstock_session):
    assert partitions(penstock_session, "shared") == 1
"""


def test_a_users_suite(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(USERS_CONFTEST)
    (tmp_path / "test_users.py").write_text(USERS_TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)],
        cwd=tmp_path, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 passed" in done.stdout


def test_loading_it_costs_next_to_nothing() -> None:
    script = "import sys, penstock.testing.plugin; print(*sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    heavy = {"kio", "uvloop", "confluent_kafka", "prometheus_client", "penstock.broker", "penstock.protocol"}
    assert not heavy & set(done.stdout.split())


@pytest.mark.parametrize("name", ["penstock.testing", "penstock.testing.embedded", "penstock.testing.faults"])
def test_the_examples_in_the_documentation_run(name: str) -> None:
    failed, tried = doctest.testmod(import_module(name))
    assert tried
    assert not failed
