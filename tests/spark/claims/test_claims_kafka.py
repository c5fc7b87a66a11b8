"""At most once on Apache Kafka, if its jars are available."""

import pytest
from tests.compat import apache_kafka
from tests.spark.claims.world import World
from tests.spark.driver_campaign import check_world

pytestmark = apache_kafka.NEEDED


@pytest.mark.parametrize("seed", range(6))
def test_nothing_twice_and_what_is_lost_is_counted(kafka_topics, seed):
    check_world(World(kafka_topics, seed), seed)
