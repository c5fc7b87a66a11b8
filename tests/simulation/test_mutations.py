"""The mutation score: every classic bug that can be switched on is caught within a bounded number of seeds."""

import os

import pytest
from simulation.campaign import hunts
from simulation.mutation import Traps
from simulation.mutations import MUTATIONS
from simulation.run import run_seed
from simulation.worlds import WORLDS

#: A seed counts only if it is clean without the bug.
SEEDS_MAX = 800


@pytest.mark.timeout(900)
def test_every_bug_is_caught() -> None:
    names = [mutation.name for mutation in MUTATIONS]
    workers = min(2, os.cpu_count() or 1)
    caught = list(hunts(names, first_seed=0, seeds_max=SEEDS_MAX, workers=workers))
    assert [catch.name for catch in caught if catch.invariant is None] == []


def test_every_trap_has_a_bug() -> None:
    traps = {value for name, value in vars(Traps).items() if name.isupper()}
    assert traps == {mutation.trap for mutation in MUTATIONS}
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 80
    worlds = {mutation.world for mutation in MUTATIONS}
    assert worlds == set(WORLDS)


def test_a_bug_is_switched_off_again() -> None:
    before = run_seed(3).digest
    for mutation in MUTATIONS:
        with mutation.switched_on():
            pass
    assert run_seed(3).digest == before
