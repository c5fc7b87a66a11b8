"""Hundreds of worlds under faults: no invariant breaks, work is done between the faults, and every kind fires."""

import os

import pytest
from simulation.campaign import Tally, failure_lines, outcomes

SEEDS = 400
#: Faults that depend on what a world looks like are rarer than the rest.
FIRED_MIN = 10
OPERATIONS = (
    "records acknowledged",
    "records consumed",
    "offsets committed",
    "offsets read",
    "generations joined",
)


@pytest.mark.timeout(900)
def test_no_seed_breaks_an_invariant() -> None:
    tally = Tally()
    for outcome in outcomes(range(SEEDS), workers=min(2, os.cpu_count() or 1)):
        assert outcome.is_clean, "\n".join(failure_lines(outcome))
        tally.add(outcome)
    assert tally.seeds == SEEDS
    assert len(tally.fired) == 20, tally.fired
    assert min(tally.fired.values()) >= FIRED_MIN, tally.fired
    assert all(tally.counts[operation] >= SEEDS for operation in OPERATIONS), tally.counts
    # Nothing is proven by a cluster that acknowledges nothing while it is being broken.
    assert tally.counts["records acknowledged"] >= 4 * sum(tally.fired.values()), tally.as_json()
