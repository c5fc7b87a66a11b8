"""Seeds of every world under faults: no promise breaks, work is done, and every kind of fault occurs."""

import os

import pytest
from simulation.campaign import Tally, failure_lines, outcomes
from simulation.faults import KINDS
from simulation.run import WORLDS

SEEDS_PER_WORLD = 24


@pytest.mark.timeout(900)
def test_no_seed_breaks_a_promise() -> None:
    jobs = [(world, seed) for seed in range(SEEDS_PER_WORLD) for world in WORLDS]
    tally = Tally()
    for outcome in outcomes(jobs, workers=min(2, os.cpu_count() or 1)):
        assert outcome.is_clean, "\n".join(failure_lines(outcome))
        tally.add(outcome)
    assert tally.seeds == len(jobs)
    assert set(tally.fired) == set(KINDS), tally.as_json()
    # A cluster that acknowledges nothing while it is being broken proves nothing.
    assert tally.counts["records acknowledged"] >= 2 * sum(tally.fired.values()), tally.as_json()
