"""Nothing is delivered twice if drivers and tasks die or are late: seeded orders of steps on a real broker."""

import pytest
from tests.spark.claims.campaign import first_flaw
from tests.spark.claims.mutations import MUTATIONS
from tests.spark.claims.world import World
from tests.spark.driver_campaign import check_world

SEEDS = range(8)
#: The first seed that detects a mutation which needs a rare order of steps.
NOTICED_BY = {"no fence": 7}


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_twice_and_what_is_lost_is_counted(topics, seed):
    check_world(World(topics, seed), seed)


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_removed_safeguard_is_detected(topics, mutation):
    first = NOTICED_BY.get(mutation, 0)
    assert first_flaw(topics, range(first, first + 8), mutation)
