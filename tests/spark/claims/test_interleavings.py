"""Nothing is given twice, whoever dies and whoever comes late: seeded orders of drivers and tasks on a real broker."""

import pytest
from tests.spark.claims.campaign import first_flaw
from tests.spark.claims.mutations import MUTATIONS
from tests.spark.claims.world import World

SEEDS = range(8)
#: Where it takes a rare order of steps, the first seed that has it.
NOTICED_BY = {"no fence": 7}


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_twice_and_what_is_lost_is_counted(topics, seed):
    world = World(topics, seed)
    try:
        world.run()
        world.check()
    except AssertionError as error:
        story = "\n".join(world.stage.gates)
        raise AssertionError(f"seed {seed}: {error}\n{story}\n{world.failures}") from error


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_each_safeguard_is_missed_when_it_is_taken_out(topics, mutation):
    first = NOTICED_BY.get(mutation, 0)
    assert first_flaw(topics, range(first, first + 8), mutation)
