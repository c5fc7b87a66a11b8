"""At most once under seeded orders of drivers and tasks on a real broker, with deaths and late steps."""

import pytest
from tests.spark.claims.campaign import first_flaw
from tests.spark.claims.mutations import MUTATIONS
from tests.spark.claims.world import World
from tests.spark.driver_campaign import check_world

SEEDS = range(8)
#: Where it takes a rare order of steps, the first seed that has it.
NOTICED_BY = {"no fence": 7}


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_twice_and_what_is_lost_is_counted(topics, seed):
    check_world(World(topics, seed), seed)


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_each_safeguard_is_missed_when_it_is_taken_out(topics, mutation):
    first = NOTICED_BY.get(mutation, 0)
    assert first_flaw(topics, range(first, first + 8), mutation)
