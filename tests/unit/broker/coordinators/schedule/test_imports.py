"""A node without scheduled records does not import the modules of the schedule."""

import subprocess
import sys

SCRIPT = """
import sys
from penstock.testing import EmbeddedBroker
with EmbeddedBroker() as broker:
    broker.create_topic("plain")
    schedule = ("penstock.scheduling", "penstock.broker.coordinators.schedule")
    print(sorted(name for name in sys.modules if name.startswith(schedule)))
"""


def test_the_schedule_is_not_loaded_before_it_is_needed() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
