"""Worlds of transactions, groups, share groups and the schedule: no invariant breaks, and all of them do their work."""

import os

import pytest
from simulation.campaign import Tally, failure_lines, outcomes

#: How many seeds a world is given here, and what must have happened in each of them on average.
SEEDS = {"transactions": 36, "consumer": 70, "share": 64, "schedule": 64}
OPERATIONS = {
    "transactions": {
        "transactions committed": 8,
        "transactions aborted": 1,
        "records copied": 10,
        "committed records read": 20,
        "incarnations replaced": 2,
        "producers fenced": 2,
    },
    "consumer": {"epochs reached": 8, "partitions taken": 6, "offsets committed": 4, "members left": 2},
    "share": {"records received": 40, "outcomes told": 30, "dead letters": 1},
    "schedule": {"records held": 15, "records released": 15},
}


@pytest.mark.parametrize("world", SEEDS)
def test_no_seed_breaks_an_invariant(world: str) -> None:
    tally = Tally()
    for outcome in outcomes(range(SEEDS[world]), workers=min(2, os.cpu_count() or 1), world=world):
        assert outcome.is_clean, "\n".join(failure_lines(outcome))
        tally.add(outcome)
    assert tally.seeds == SEEDS[world]
    assert len(tally.fired) >= 18, tally.fired
    for operation, least in OPERATIONS[world].items():
        assert tally.counts[operation] >= least * tally.seeds, tally.counts
