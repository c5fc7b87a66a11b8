"""Exactly once on Apache Kafka, where its jars can be had: the same steps, and prepared transactions that time out."""

from collections.abc import Iterator

import pytest
from tests.compat import apache_kafka
from tests.compat.apache_kafka import ApacheKafka
from tests.spark.sink.world import World
from tests.spark.source.topics import Topics

pytestmark = apache_kafka.NEEDED


@pytest.fixture(scope="module")
def topics(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Topics]:
    kafka = ApacheKafka(tmp_path_factory.mktemp("kafka"), ["PLAINTEXT"], {}).start()
    yield Topics(kafka.address("PLAINTEXT"))
    kafka.stop()


@pytest.mark.parametrize("seed", range(8))
def test_every_row_once_and_nothing_left_open(topics, seed):
    world = World(topics, seed)
    world.run()
    world.check()
