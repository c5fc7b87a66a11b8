"""Every row once, whoever dies and whoever comes late: seeded orders of drivers and tasks on a real broker."""

import pytest
from tests.spark.sink.world import World
from tests.spark.source.topics import Topics

SEEDS = range(12)


@pytest.fixture
def topics(broker) -> Topics:
    return Topics(broker.bootstrap_servers)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_row_once_and_nothing_left_open(topics, seed):
    world = World(topics, seed)
    try:
        world.run()
        world.check()
    except AssertionError as error:
        story = "\n".join(world.stage.gates)
        raise AssertionError(f"seed {seed}: {error}\n{story}\n{world.failures}") from error
