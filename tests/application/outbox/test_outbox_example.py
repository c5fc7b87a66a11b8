"""The example of the outbox runs as documented."""

import subprocess
import sys

from tests.brokers import BrokerProcess, environment
from tests.chaos.network import ROOT


def test_the_example(fresh_broker: BrokerProcess) -> None:
    done = subprocess.run(
        [sys.executable, "examples/outbox.py", fresh_broker.bootstrap_servers],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [
        "rolled back: sextant: out of stock",
        "relayed: 2",
        'ada: {"number":1,"item":"compass"}',
        'ada: {"number":2,"item":"lantern"}',
    ]
