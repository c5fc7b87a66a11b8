"""The examples, run as a newcomer would run them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.brokers import BrokerProcess, executable

ROOT = Path(__file__).parents[2]
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


def test_the_pytest_example() -> None:
    if not Path(executable()[0]).name.startswith("penstock"):
        pytest.skip("the fixture starts a broker of this package, not another program")
    printed = run("-m", "pytest", "-q", "examples/pytest_example", "-p", "no:cacheprovider")
    assert "1 passed" in printed
