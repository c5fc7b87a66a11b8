"""The examples run as documented."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.brokers import BrokerProcess, executable

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 60.0


def run(*command: str) -> str:
    """Run in the project folder; whatever goes wrong is shown."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_publish_and_consume(fresh_broker: BrokerProcess) -> None:
    assert run("examples/publish_consume.py", fresh_broker.bootstrap_servers) == "world: hello (offset 0)\n"


def test_an_asyncio_worker(fresh_broker: BrokerProcess) -> None:
    printed = run("examples/asyncio_worker.py", fresh_broker.bootstrap_servers)
    assert printed.splitlines() == [f"done: job {number}" for number in range(5)]


def test_a_faststream_application(fresh_broker: BrokerProcess) -> None:
    printed = run("examples/faststream_app.py", fresh_broker.bootstrap_servers)
    greetings = [line for line in printed.splitlines() if line.startswith("Good day")]
    assert greetings == ["Good day, Ada!", "Good day, Grace!", "Good day, Edsger!"]


def test_an_exactly_once_copier(fresh_broker: BrokerProcess) -> None:
    for _ in range(2):
        printed = run("examples/exactly_once_copier.py", fresh_broker.bootstrap_servers)
        assert sorted(map(int, printed.split())) == [2 * number for number in range(10)]


def test_a_work_queue(fresh_broker: BrokerProcess) -> None:
    printed = run("examples/work_queue.py", fresh_broker.bootstrap_servers).splitlines()
    assert printed[-1] == "dead letter: hopeless, because of limit"
    attempts = [("easy", 1), ("flaky", 1), ("flaky", 2), ("simple", 1), *(("hopeless", n) for n in (1, 2, 3))]
    assert sorted(printed[:-1]) == sorted(f"{job}, attempt {attempt}" for job, attempt in attempts)


def test_scheduled_messages(fresh_broker: BrokerProcess) -> None:
    printed = run("examples/scheduled_messages.py", fresh_broker.bootstrap_servers)
    assert [line.strip() for line in printed.splitlines()] == ["now", "in a second", "in two seconds"]


def test_the_pytest_example() -> None:
    if not Path(executable()[0]).name.startswith("penstock"):
        pytest.skip("the fixture starts a broker of this package, not another program")
    printed = run("-m", "pytest", "-q", "examples/pytest_example", "-p", "no:cacheprovider")
    assert "1 passed" in printed
