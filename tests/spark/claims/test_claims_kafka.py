"""At most once on Apache Kafka, where its jars can be had: the same steps."""

from collections.abc import Iterator

import pytest
from tests.compat import apache_kafka
from tests.compat.apache_kafka import ApacheKafka
from tests.spark.claims.world import World
from tests.spark.source.topics import Topics

pytestmark = apache_kafka.NEEDED


@pytest.fixture(scope="module")
def topics(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Topics]:
    kafka = ApacheKafka(tmp_path_factory.mktemp("kafka"), ["PLAINTEXT"], {}).start()
    yield Topics(kafka.address("PLAINTEXT"))
    kafka.stop()


@pytest.mark.parametrize("seed", range(6))
def test_nothing_twice_and_what_is_lost_is_counted(topics, seed):
    world = World(topics, seed)
    world.run()
    world.check()
