"""Exactly once on Apache Kafka, if its jars are available, with prepared transactions that time out."""

import pytest
from tests.compat import apache_kafka
from tests.spark.driver_campaign import check_world
from tests.spark.sink.world import World

pytestmark = apache_kafka.NEEDED


@pytest.mark.parametrize("seed", range(8))
def test_every_row_once_and_nothing_left_open(kafka_topics, seed):
    check_world(World(kafka_topics, seed), seed)
