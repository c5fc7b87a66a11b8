"""Every row is written once if drivers and tasks die or are late: seeded orders of steps on a real broker."""

import pytest
from tests.spark.driver_campaign import check_world
from tests.spark.sink.world import World
from tests.spark.source.topics import Topics

SEEDS = range(12)


@pytest.fixture
def topics(broker) -> Topics:
    return Topics(broker.bootstrap_servers)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_row_once_and_nothing_left_open(topics, seed):
    check_world(World(topics, seed), seed)
