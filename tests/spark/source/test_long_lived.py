"""One query through broker fail-over, new partitions, a recreated topic, restarts and the death of its driver.

Longer: python -m tests.spark.source.long_lived --restarts 100
"""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.spark.source.long_lived import Life, live


@pytest.fixture
def life(tmp_path: Path) -> Iterator[Life]:
    made = Life(tmp_path, random.Random(5))
    yield made
    made.close()


@pytest.mark.slow
def test_each_row_once_through_all_faults(life):
    every = {"leader_dies": 2, "partitions_are_added": 1, "driver_dies": 3, "topic_is_recreated": 3}
    live(life, 3, every)
    assert life.tally["leader killed"] == life.tally["driver killed"] == life.tally["topic recreated"] == 1
    assert life.tally["restarts"] == life.tally["partition added"] == 3
