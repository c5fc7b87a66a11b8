"""The sized cluster of the requirements, through broker and rack failures."""

import json

from simulation.campaign import in_processes
from simulation.sized import run_sized


def test_ninety_brokers_lose_a_broker_and_a_rack() -> None:
    # In a process of its own, because nodes that lost power leave tasks behind.
    (report,) = in_processes(run_sized, [0], workers=1)
    assert (report.brokers, report.racks, report.partitions) == (90, 9, 200)
    assert report.acknowledged > 200
    rack = report.fail_overs[-1]
    assert (rack.what, rack.brokers) == ("one rack", 10)
    assert rack.partitions >= 15
    for fail_over in report.fail_overs:
        # Simulated: the session timeout, and what a client's own timeout adds to it.
        assert report.session_ms // 2 < fail_over.median_ms <= fail_over.max_ms < 5_000
    assert json.loads(report.as_json())["fail_overs"][0]["partitions"] > 0
    assert len(report.lines()) == 4
